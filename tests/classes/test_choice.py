"""Which candidate is used: the guard always stays; a scaling of each class, where rows tell it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from latedrop.calibration.cross_validation import CrossValidation, leading
from latedrop.calibration.fit_classes import ALONE, Measured, chosen

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
