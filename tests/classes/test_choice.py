"""Which candidate is used: the guard stays unless it clearly hurts."""

from __future__ import annotations

import pytest
import torch

from latedrop.calibration.classes.fit import ALONE, Measured, chosen

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


def worse(found: Measured) -> tuple[str, float]:
    """The choice, and by how many standard errors the guard is worse than one temperature."""
    picked = chosen(found, {}, guard=True)
    guard = next(each for each in picked.candidates if each.name == "guard")
    return picked.name, -guard.gain / guard.gain_error


@pytest.mark.parametrize("sure", [0.3, 0.6])
def test_a_guard_that_hurts_little_stays(sure: float) -> None:
    name, errors = worse(rows(sure))
    assert errors < 2
    assert name != ALONE


def test_a_guard_within_two_standard_errors_stays() -> None:
    found = [worse(rows(sure)) for sure in (0.7, 0.75, 0.8)]
    between = [name for name, errors in found if 1 < errors < 2]
    assert between  # otherwise this tests nothing
    assert ALONE not in between


def test_a_guard_that_clearly_hurts_goes() -> None:
    name, errors = worse(rows(1.0))
    assert errors > 2
    assert name == ALONE


def test_without_a_guard_one_temperature_is_left() -> None:
    assert chosen(rows(0.3), {}, guard=False).name == ALONE
