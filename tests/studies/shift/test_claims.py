"""Effects, tests and tables on hand-made results."""

import numpy as np
import pytest

from shift_records import random_results, record
from studies.claims import Claim
from studies.regression.data import SETS
from studies.shift.claims import CLAIMS, claims_page, slope
from studies.shift.pages import (
    by_set,
    method_names,
    method_tables,
    order_interval,
    overshoot_table,
    set_tables,
)


def named(text: str) -> Claim:
    """The claim that begins so."""
    return next(claim for claim in CLAIMS if claim.text.startswith(text))


def coverages(**methods: list[float]) -> dict[str, dict[str, list[float]]]:
    return {name.replace("_", ", "): {"coverage": values} for name, values in methods.items()}


def test_an_effect_is_the_mean_over_cuts() -> None:
    found = record(coverages(constant=[0.5, 0.6, 0.7, 0.8], injected_floor=[0.7, 0.7, 0.7, 0.7]))
    below, more = named("A constant's"), named("Injected dropout with a floor")
    assert below.measure(found).value == pytest.approx(0.65)
    assert more.measure(found).value == pytest.approx(0.05)
    assert named("The default holds more").measure(found) is None


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


def test_the_number_of_a_set() -> None:
    found = record({"a": {"coverage": [0.0, 0.0, 0.9], "nll": [0.0, 0.0, 900.0], "inside_nll": [1.0, 2.0, 9.0]}}, 3)
    assert by_set(found, "a", "coverage") == pytest.approx(0.3)
    assert by_set(found, "a", "nll") == 0.0
    assert by_set(found, "a", "inside_nll") == 2.0
    assert by_set(found, "b", "nll") is None


def test_like_stands_with_like() -> None:
    names = ("a, raw", "a, scaled", "a, floor", "b, raw", "b, scaled", "b, floor", "constant", "default")
    ordered = ["a, floor", "b, floor", "constant", "default", "a, scaled", "b, scaled", "a, raw", "b, raw"]
    assert method_names({"yacht": record({name: {} for name in names})}) == ordered


def test_cuts_where_the_default_overshoots() -> None:
    def grown(*factors: float) -> dict[str, list[float]]:
        return {"variance_growth": np.log(factors).tolist(), "error_growth": np.log([2.0, 2.0, 50.0]).tolist()}

    # 400 is 200 times what the error does, 150 is 75 times, 4000 is 80 times.
    guarded = grown(400, 150, 4000) | {"coverage": [0.99, 0.5, 0.5], "width": [31.0, 1.0, 1.0]}
    others = {"default": grown(30, 1, 1), "leverage, scaled": grown(20, 1, 1), "injected, scaled": grown(3, 1, 1)}
    found = overshoot_table({"boston-housing": record({"default + reference": guarded, **others}, 3)})
    assert found[2:] == ["| boston | 0 above | 2 | 4e+02 | 30 | 20 | 3 | 0.99 | 31 |"]
    assert overshoot_table({"yacht": record(others, 3)}) == ["None."]


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    assert order_interval([1.0, 2.0, 3.0, 4.0]) is None
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        low, high = order_interval(random.normal(size=8).tolist()) or (0.0, 0.0)
        inside += low <= 0 <= high
    # The truth is 1 - 18 / 256 = 0.93; four standard errors of 2000 trials are 0.023.
    assert inside / 2000 == pytest.approx(1 - 18 / 256, abs=0.023)


def test_pages_name_every_method_set_and_claim() -> None:
    results = random_results(("constant", "injected, floor", "default", "default + reference"), tuple(SETS))
    text = "\n".join(claims_page(results))
    assert all(claim.text in text for claim in CLAIMS)
    tables = "\n".join([*method_tables(results), *set_tables(results)])
    assert tables.count("| default + reference |") == 6
    assert "decide nothing" not in text
    assert "decide nothing" in "\n".join(claims_page({"yacht": record({"constant": {}}, epochs=0.1)}))


def test_one_set_has_effects_and_no_verdict() -> None:
    text = "\n".join(claims_page({"mine": record(coverages(constant=[0.5] * 4, injected_floor=[0.4] * 4))}))
    assert "One set alone decides nothing" in text
    assert "| mine | 0.500 |  |  |  |" in text
    assert "| mine | -0.100 |  |  |  |" in text
    assert "**holds**" not in text
