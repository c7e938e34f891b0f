"""Effects, tests and tables on hand-made results."""

import numpy as np
import pytest

from shift_records import record
from studies.claims import Claim
from studies.shift.claims import CLAIMS, claims_page, slope
from studies.shift.pages import (
    order_interval,
)


def named(text: str) -> Claim:
    """The claim that begins so."""
    return next(claim for claim in CLAIMS if claim.text.startswith(text))


def coverages(**methods: list[float]) -> dict[str, dict[str, list[float]]]:
    return {name.replace("_", ", "): {"coverage": values} for name, values in methods.items()}


def test_nlls_are_compared_by_the_share_of_cuts() -> None:
    nlls = {"default + reference": {"nll": [1.0, 2.0, 3.0, 4.0]}, "constant": {"nll": [900.0, 1.0, 3.0, 5.0]}}
    claim = named("The default with reference rows has a lower NLL than a c")
    assert claim.measure(record(nlls)).value == pytest.approx((1 + 0 + 0.5 + 1) / 4)


def test_growth_is_compared_over_cuts() -> None:
    growth = {"error_growth": [0.0, 1.0, 2.0], "variance_growth": [1.0, 1.5, 2.0]}
    found = record({"default + reference": growth}, 3)
    assert named("The guard's variance").measure(found).value == pytest.approx(0.5)
    lag = named("The variance of the default with reference rows grows less")
    assert lag.measure(found).value == pytest.approx(-0.5)
    assert slope(record({"a": {name: values[:2] for name, values in growth.items()}}, 2), "a") is None


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
    text = "\n".join(claims_page({"mine": record(coverages(constant=[0.5] * 4, injected_floor=[0.4] * 4))}))
    assert "One set alone decides nothing" in text
    assert "| mine | 0.500 |  |  |  |" in text
    assert "| mine | -0.100 |  |  |  |" in text
    assert "**holds**" not in text
