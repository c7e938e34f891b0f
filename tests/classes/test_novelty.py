"""How novel a row of a classifier is: leverage of features and of mask gradients of the largest logit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
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
