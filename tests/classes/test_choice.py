"""Which candidate is used: the guard always stays; a scaling of each class, where rows tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration.cross_validation import CrossValidation, leading
from latedrop.calibration.fit_classes import ALONE, Measured, Scaling, chosen, losses
from latedrop.errors import ArgumentError, DataError

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
    picked = chosen(rows(sure), {}, guard=True)
    guard = next(each for each in picked.candidates if each.name == "guard")
    assert (guard.gain < -2 * guard.gain_error) == (sure == 1.0)  # also where one temperature is clearly better
    assert picked.name != ALONE
    strange = picked.fit.temperatures(torch.zeros(2, 3).double(), torch.tensor([1.0, 5.0]))
    assert float(strange[1]) >= 5 * float(strange[0]) * (1 - 1e-6)


def test_a_small_lead_adds_nothing() -> None:
    left, home = CrossValidation(), torch.zeros(ROWS)
    for gain, name in ((0.0009, "home"), (0.0011, "other")):
        scores = {"home": home, "other": home + gain}  # without any standard error
        assert leading(scores, "home", left, least=0.001) == name


def test_without_a_guard_one_temperature_is_left() -> None:
    assert chosen(rows(0.3), {}, guard=False).name == ALONE


@pytest.mark.parametrize(("shift", "taken"), [(1e-5, False), (1e-3, False), (0.1, True)])
def test_draws_must_gain_a_thousandth_of_a_nat(shift: float, taken: bool) -> None:
    found = rows(0.3)
    better = found.logits + shift * torch.nn.functional.one_hot(found.labels, 3)  # in every row, by the same
    picked = chosen(found, {0.1: better.expand(4, -1, -1)}, guard=False)
    draws = next(each for each in picked.candidates if each.name == "draws at rate 0.1")
    assert draws.gain > draws.gain_error
    assert (draws.gain > 1e-3, picked.name == draws.name) == (taken, taken)


def made(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels, and the weight and the bias of each class that lead from one to the other."""
    dice = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 4, generator=dice, dtype=torch.float64)
    weights, biases = torch.tensor([0.5, 1.0, 2.0, 1.0]).double(), torch.tensor([1.0, 0.0, -1.0, 0.0]).double()
    p = torch.softmax(logits * weights + biases, 1)
    return logits, torch.multinomial(p, 1, generator=dice)[:, 0], weights, biases


def test_a_weight_and_a_bias_for_each_class_are_found() -> None:
    logits, labels, weights, biases = made(4000)
    picked = chosen(Measured(logits, labels), {}, guard=True, scaling="vector")
    assert picked.name == "a weight and a bias for each class"
    found = torch.tensor(picked.fit.weights) / picked.fit.temperature
    # Fitted to 4000 labels, which are drawn.
    torch.testing.assert_close(found.double(), weights, atol=0.15, rtol=0.1)
    shift = torch.tensor(picked.fit.biases) / picked.fit.temperature
    torch.testing.assert_close((shift - shift.mean()).double(), biases - biases.mean(), atol=0.25, rtol=0.1)
    fresh, truth, *_ = made(4000, seed=1)
    exact = losses(torch.log_softmax(fresh * weights + biases, 1), truth).mean()
    ours = losses(picked.fit.log_probabilities(fresh, None, None), truth).mean()
    alone = losses(torch.log_softmax(fresh / picked.temperature, 1), truth).mean()
    assert float(ours - exact) < 0.01 < float(alone - exact)


def test_what_few_rows_cannot_tell_is_not_used() -> None:
    dice = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(60, 8, generator=dice, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits / 2, 1), 1, generator=dice)[:, 0]
    picked = chosen(Measured(logits, labels), {}, guard=True, scaling="vector")
    assert len(picked.candidates) == 3
    assert picked.name == ALONE


@pytest.mark.parametrize("scaling", ["bias", "vector"])
def test_scaling_end_to_end(scaling: Scaling, tmp_path: Path) -> None:
    logits, labels, *_ = made(800)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity(), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.eye(4))  # so that the inputs are the logits
    x = logits.float()
    uq = latedrop.calibrate(
        model,
        (x, labels),
        method=latedrop.Terms(["leverage"]),
        task=latedrop.Classification(scaling=scaling),
        progress=False,
    )
    assert isinstance(uq, latedrop.ClassPredictor)
    assert "bias for each class" in uq.calibration.choice
    uq.save(tmp_path / "c.json")
    found = latedrop.load(tmp_path / "c.json", model).predict(x)
    assert isinstance(found, latedrop.ClassPrediction)
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(found.probabilities, uq.predict(x).probabilities)
    plain = latedrop.calibrate(model, (x, labels), method=latedrop.Terms(["leverage"]), progress=False).predict(x)
    assert losses(found.log_probabilities, labels).mean() < losses(plain.log_probabilities, labels).mean()


@pytest.mark.parametrize("scaling", ["bias", "vector"])
@pytest.mark.parametrize("left", [0, 1])
def test_a_class_with_few_rows_is_not_learned_away(scaling: Scaling, left: int) -> None:
    logits, labels, *_ = made(800)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity(), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.eye(4))
    keep = (labels != 2) | (torch.cumsum(labels == 2, 0) <= left)
    options = {"method": latedrop.Terms(["leverage"]), "progress": False}
    told = f"10 validation rows or more of every class .*found {left} of class 2"
    with pytest.warns(latedrop.LatedropWarning, match=told):
        uq = latedrop.calibrate(
            model, (logits[keep].float(), labels[keep]), task=latedrop.Classification(scaling=scaling), **options
        )
    assert torch.equal(uq.predict(logits.float()).label, logits.argmax(1))


def test_a_scaling_that_does_not_fit() -> None:
    x = torch.randn(40, 3)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ArgumentError, match=r"expected scaling to be one of .*; found 'matrix'"):
        latedrop.Classification(scaling="matrix")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected one label for each row"):
        latedrop.calibrate(model, (x, torch.randn(40, 3)), task=latedrop.Classification(scaling="bias"))
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    maps = torch.randn(6, 1, 5, 5)
    with pytest.raises(ArgumentError, match="expected scaling='temperature' for maps"):
        latedrop.calibrate(
            net, (maps, net(maps).argmax(1)), task=latedrop.Classification(scaling="bias"), progress=False
        )
