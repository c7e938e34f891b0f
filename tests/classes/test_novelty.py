"""How novel a row of a classifier is, and which candidate is used: the guard on novel rows always stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration.cross_validation import CrossValidation, leading
from latedrop.calibration.fit_classes import ALONE, Measured, chosen
from latedrop.errors import OutputError
from latedrop.metrics import auroc
from networks import Net, mlp, trained
from rounding import assert_same_up_to_rounding


def made(classes: int = 3, rows: int = 200, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return mlp(4, 12, 8, classes, seed=seed), x, torch.arange(rows) % max(classes, 2)


def calibrated(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> latedrop.ClassPredictor:
    uq = latedrop.calibrate(model, (x, y), task="classification", progress=False, **options)
    return uq


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    """`h · dz/dh` of the likeliest class at both sites, row by row, by autograd alone."""
    vectors = []
    for row in x.split(1):
        first = model[1](model[0](row)).detach().requires_grad_()
        second = model[3](model[2](first))
        z = model[4](second)
        scalar = z.abs().sum() if z.shape[1] == 1 else z.max()
        parts = torch.autograd.grad(scalar, [first, second])
        vectors.append(torch.cat([first * parts[0], second * parts[1]], 1).detach())
    return torch.cat(vectors)


def features(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = model[1](model[0](x))
        return torch.cat([first, model[3](model[2](first))], 1)


def leverage(reference: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Of new rows, and of the reference rows, each from the others, with the ridge of all of them."""
    reference, new = reference.double(), new.double()
    size = reference.square().sum(1).mean().sqrt()
    h, g = (torch.cat([part, size.expand(len(part), 1)], 1) for part in (reference, new))
    gram = h.T @ h / len(h)
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)

    def of(rows: Tensor, inverse: Tensor) -> Tensor:
        return torch.einsum("ni,ij,nj->n", rows, inverse, rows)

    n = len(h)
    apart = [of(row[None], torch.linalg.inv((gram - row[:, None] * row / n) * n / (n - 1))) for row in h]
    return of(g, torch.linalg.inv(gram)), torch.cat(apart)


@pytest.mark.parametrize("classes", [1, 3])
def test_the_larger_of_both_in_units_of_its_limit(classes: int) -> None:
    model, x, y = made(classes)
    uq, new = calibrated(model, x[:100], y[:100], reference=x[100:]), 2 * x[:30]
    expected = []
    for vectors in (features, gradients):
        values, usual = leverage(vectors(model, x[100:]), vectors(model, new))
        expected.append(values / usual.quantile(0.95, interpolation="higher"))
    assert_same_up_to_rounding(uq.predict(new).novelty, torch.stack(expected).amax(0))


def test_either_alone_by_its_name() -> None:
    model, x, y = made()
    both, *alone = (
        calibrated(model, x[:100], y[:100], reference=x[100:], **options).predict(2 * x[:30]).novelty
        for options in ({}, *({"method": latedrop.Terms([name])} for name in ("leverage", "gradients")))
    )
    assert_same_up_to_rounding(both, torch.stack(alone).amax(0))
    assert not torch.allclose(*alone, rtol=0.01)


def test_classes_never_seen_are_told_where_features_do_not() -> None:
    """Digits from 7 on lie within the features of the others: these say that nothing is new."""
    load = pytest.importorskip("sklearn.datasets").load_digits
    x, y = (torch.tensor(part) for part in load(return_X_y=True))
    x, y = x.float() / 16, y.long()
    seen, unseen = x[y < 7], x[y >= 7]
    labels = y[y < 7]
    net = mlp(64, 64, 64, 7, act=nn.ReLU)
    trained(net, seen[:600], labels[:600], 200, 3e-3, nn.functional.cross_entropy)
    areas = {}
    for name in ("leverage", "gradients"):
        uq = calibrated(net, seen[600:900], labels[600:900], reference=seen[:600], method=latedrop.Terms([name]))
        usual, novel = uq.predict(seen[900:]).novelty, uq.predict(unseen).novelty
        areas[name] = float(auroc(torch.cat([novel, usual]), torch.arange(len(novel) + len(usual)) < len(novel)))
    assert areas["gradients"] > 0.9
    assert areas["gradients"] > areas["leverage"] + 0.1


def test_a_model_without_derivatives_has_features_alone() -> None:
    inner, x, y = made()
    model = Net(torch.no_grad()(lambda net, x: net.inner(x)), inner=inner)
    uq = calibrated(model, x, y)
    assert uq.calibration.guard.terms == ("leverage",)
    assert uq.predict(x).novelty is not None
    with pytest.raises(OutputError, match="expected an output that autograd can differentiate"):
        calibrated(model, x, y, method=latedrop.Terms(["gradients"]))


ROWS = 400


def rows(sure: float) -> Measured:
    """A tenth of the rows are strange; `sure` is how often the likeliest class of these is right."""
    dice = torch.Generator().manual_seed(0)
    logits = torch.zeros(ROWS, 3)
    logits[:, 0] = 2.0
    strange = torch.cat([torch.full((40,), 3.0), torch.full((ROWS - 40,), 0.5)])
    right = torch.where(strange > 1, sure, float(torch.softmax(logits[0], 0)[0]))
    labels = torch.where(torch.rand(ROWS, generator=dice) < right, 0, torch.randint(1, 3, (ROWS,), generator=dice))
    return Measured(logits.double(), labels, strange.double())


@pytest.mark.parametrize("sure", [0.3, 0.6, 1.0])
def test_the_guard_stays(sure: float) -> None:
    picked = chosen(rows(sure), guard=True)
    guard = next(each for each in picked.candidates if each.name == "guard")
    assert (guard.gain < -2 * guard.gain_error) == (sure == 1.0)  # also where one temperature is clearly better
    assert picked.name != ALONE
    strange = picked.fit.temperatures(torch.tensor([1.0, 5.0]), torch.zeros(2, 3).double())
    assert float(strange[1]) >= 5 * float(strange[0]) * (1 - 1e-6)


def test_a_small_lead_adds_nothing() -> None:
    left, home = CrossValidation(), torch.zeros(ROWS)
    for gain, name in ((0.0009, "home"), (0.0011, "other")):
        scores = {"home": home, "other": home + gain}  # without any standard error
        assert leading(scores, "home", left) == name


def test_without_a_guard_one_temperature_is_left() -> None:
    assert chosen(rows(0.3), guard=False).name == ALONE


@pytest.mark.parametrize(("shift", "taken"), [(1e-5, False), (1e-3, False), (0.1, True)])
def test_draws_must_gain_a_thousandth_of_a_nat(shift: float, taken: bool) -> None:
    measured = rows(0.3)
    better = measured.logits + shift * torch.nn.functional.one_hot(measured.labels, 3)  # in every row, by the same
    picked = chosen(replace(measured, drawn={0.1: better.expand(4, -1, -1)}), guard=False)
    draws = next(each for each in picked.candidates if each.name == "draws at rate 0.1")
    assert draws.gain > draws.gain_error
    assert (draws.gain > 1e-3, picked.name == draws.name) == (taken, taken)
