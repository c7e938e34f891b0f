"""A claim is decided by tests of all its sets together; a theorem shows its largest deviation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.claims import (
    Claim,
    Effect,
    Outcome,
    claims_section,
    decide,
    decide_pooled,
    holm,
    split_error,
    student_p,
    student_quantile,
)


def claim_of(measure: Any, *, above: float | None = None, below: float = 0.0) -> Claim:
    return Claim("x", "level", measure, above is not None, below if above is None else above)


def verdict(effect: Effect | None, **limit: float) -> str | None:
    return decide(claim_of(lambda _: effect, **limit), {"a": {}}).outcomes["a"].verdict


def test_an_effect_without_a_spread_is_decided_by_its_number() -> None:
    assert verdict(Effect(2.0), above=1.0) == "holds"
    assert verdict(Effect(1.0), above=1.0) == "fails"
    assert verdict(Effect(-1.0), below=0.0) == "holds"
    assert verdict(Effect(0.0), below=0.0) == "fails"
    assert verdict(None, below=0.0) is None
    assert Effect(2.0).p(1.0) is None
    assert Effect(2.0).interval == (2.0, 2.0)
    assert Effect.measured(0.0, 0.0, 0.0) == Effect(0.0)  # nothing varied


def test_an_effect_is_tested_against_the_threshold() -> None:
    assert verdict(Effect(2.0, 0.1, 19), above=1.0) == "holds"
    assert verdict(Effect(2.0, 0.6, 19), above=1.0) == "not decided"
    assert verdict(Effect(0.0, 0.1, 19), above=1.0) == "fails"
    assert verdict(Effect(-2.0, 0.1, 19), below=0.0) == "holds"
    assert verdict(Effect(1.0, 0.1, 19), below=0.0) == "fails"
    assert verdict(Effect.mean(np.array([5.0])), above=1.0) == "not decided"  # one split says nothing
    assert verdict(Effect(1.5, 0.0, 3), above=1.0) == "holds"  # all splits say the same
    assert verdict(Effect(1.0, 0.0, 3), above=1.0) == "not decided"


def test_intervals() -> None:
    low, high = Effect.mean(np.array([1.0, 3.0]), overlap=1.5).interval
    assert (low, high) == pytest.approx((2 - 2 * 12.7062, 2 + 2 * 12.7062), rel=1e-5)  # six digits of a table
    measured = Effect.measured(-0.2, -0.35, -0.04)
    assert measured.interval == (-0.35, -0.04)
    assert measured.error == pytest.approx(0.31 / 2 / 1.959964)


def test_the_sets_of_a_claim_are_one_family() -> None:
    claim = claim_of(lambda record: Effect(record["effect"], 1.0), above=0.0)
    alone: dict[str, dict[str, Any]] = {"a": {"effect": 2.2}}  # p = 0.028
    assert decide(claim, alone).outcomes["a"].verdict == "holds"
    more = alone | {f"set {place}": {"effect": 0.5} for place in range(3)}
    decided = decide(claim, more).outcomes
    assert decided["a"].verdict == "not decided"
    assert decided["a"].p == pytest.approx(4 * 0.0278, rel=1e-2)
    # What has no spread, or says nothing, is no test and costs nothing.
    other = claim_of(lambda record: Effect(record["effect"], 1.0) if record["effect"] < 9 else None, above=0.0)
    assert decide(other, alone | {"b": {"effect": 10.0}}).outcomes["a"].verdict == "holds"
    assert decide(other, alone | {"b": {"effect": 10.0}}).outcomes["b"] == Outcome()


def test_quantiles_and_p_values_are_those_of_the_tables() -> None:
    # Abramowitz and Stegun, table 26.10.
    for freedom, expected in ((1, 12.706), (2, 4.303), (19, 2.093), (None, 1.960)):
        assert student_quantile(0.95, freedom) == pytest.approx(expected, abs=5e-4)
        assert student_p(expected, freedom) == pytest.approx(0.05, abs=5e-5)


def pooled(**levels: float) -> list[Any]:
    claim = claim_of(lambda record: record["effect"], above=0.5)
    return decide_pooled((claim,), {name: {"effect": Effect(level)} for name, level in levels.items()})


def test_where_sets_count_as_one_their_mean_is_tested() -> None:
    decided = pooled(p=0.6, q=0.61, r=0.62)[0]
    assert (decided.verdict, decided.agreeing, decided.pooled.effect.freedom) == ("holds", "3 of 3", 2)
    assert pooled(p=0.4, q=0.9)[0].verdict == "not decided"
    assert pooled(p=0.6)[0].verdict == "not measured"
    assert pooled(p=0.3, q=0.31, r=0.32)[0].verdict == "fails"


def test_more_claims_make_each_harder() -> None:
    claim = claim_of(lambda record: record["effect"], above=0.5)
    results = {name: {"effect": Effect(level)} for name, level in (("p", 0.6), ("q", 0.65), ("r", 0.7))}
    alone, together = decide_pooled((claim,), results)[0], decide_pooled((claim,) * 5, results)[0]
    assert alone.pooled is not None
    assert together.pooled is not None
    assert (alone.pooled.p or 0) < 0.05 < (together.pooled.p or 0)


def test_a_section_numbers_its_claims_and_marks_what_has_no_spread() -> None:
    first = Claim("one", "x", lambda record: Effect(record["effect"]), True, 0.0)
    second = Claim("two", "y", lambda record: Effect(record["effect"], 0.1, 9), True, 0.0)
    results = {"yacht": {"effect": 1.0}, "boston-housing": {"effect": -1.0}}
    groups = {"First": [decide(first, results)], "Then": [decide(second, results)]}
    lines = claims_section(groups, by_set=True)
    assert "| 1 | one | paper | **holds on 1, fails on 1 of 2** | holds \\* | fails \\* |" in lines
    assert "| 2 | two | paper | **holds on 1, fails on 1 of 2** | holds | fails |" in lines
    assert "### 2. two" in lines
    assert "| boston | -1.000 |  |  | fails |" in lines
    assert "| | claim | by | verdict | effect, median over sets |" in [
        line.replace("|  |", "| |", 1) for line in claims_section(groups)
    ]


def test_error_of_splits_that_share_rows() -> None:
    values = [1.0, 2.0, 4.0, 5.0]  # variance 10 / 3
    assert split_error(values) == pytest.approx(math.sqrt(10 / 3 / 4))
    assert split_error(values, overlap=31 / 222) == pytest.approx(math.sqrt(10 / 3 * (1 / 4 + 31 / 222)))
    assert split_error([1.0]) == math.inf


def test_the_error_is_right_where_splits_share_most_of_a_mean() -> None:
    """Values with correlation r have a mean of variance `var (1 / J + r / (1 - r))`, in terms of the expected `var`."""
    rng, splits, common = np.random.default_rng(0), 10, 0.25
    shared = math.sqrt(common) * rng.normal(size=(4000, 1))
    values = shared + math.sqrt(1 - common) * rng.normal(size=(4000, splits))
    expected = np.mean([split_error(row, overlap=common / (1 - common)) ** 2 for row in values])
    # The variance of 4000 normal means is known to sqrt(2 / 4000), 2.2 %.
    assert values.mean(1).var() == pytest.approx(expected, rel=4 * 0.022)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_the_step_down_procedure_does(p: list[float]) -> None:
    order = sorted(range(len(p)), key=lambda place: p[place])
    rejected: set[int] = set()
    for step, place in enumerate(order):
        if (len(p) - step) * p[place] > 0.05:
            break
        rejected.add(place)
    assert {place for place, value in enumerate(holm(p)) if value <= 0.05} == rejected
