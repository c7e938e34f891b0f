"""Intervals of medians, and what is said where there is one set alone."""

from typing import Any

import numpy as np
import pytest

from studies.pages import order_interval
from studies.shift.claims import claims_page
from studies.shift.study import MEASURES


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    assert order_interval([1.0, 2.0, 3.0, 4.0]) is None
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        low, high = order_interval(random.normal(size=8).tolist()) or (0.0, 0.0)
        inside += low <= 0 <= high
    # The truth is 1 - 18 / 256 = 0.93; four standard errors of 2000 trials are 0.023.
    assert inside / 2000 == pytest.approx(1 - 18 / 256, abs=0.023)


def test_one_set_has_effects_and_no_verdict() -> None:
    shares = {"constant": {"coverage": [0.5] * 4}, "injected, floor": {"coverage": [0.4] * 4}}
    measured = {name: dict.fromkeys(MEASURES, [0.0] * 4) | each for name, each in shares.items()}
    record: dict[str, Any] = {"settings": {"epochs": 1.0}, "cuts": [{}] * 4, "methods": measured}
    text = "\n".join(claims_page({"mine": record}))
    assert "One set alone decides nothing" in text
    assert "| mine | 0.500 |  |  |  |" in text
    assert "| mine | -0.100 |  |  |  |" in text
    assert "**holds**" not in text
