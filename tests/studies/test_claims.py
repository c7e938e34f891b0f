"""A claim is decided by tests of all its sets together; a theorem shows its largest deviation."""

from typing import Any

import numpy as np
import pytest

from studies.claims import Claim, Effect, Outcome, Theorem, decide, theorem_table


def verdict(effect: Effect | None, **limit: float) -> str | None:
    return decide(Claim("", "", lambda _: effect, **limit), {"a": {}})["a"].verdict


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


def test_few_splits_need_more() -> None:
    # 2.5 standard errors: p is 0.022 with 19 degrees of freedom, and 0.13 with 2.
    assert verdict(Effect(1.25, 0.1, 19), above=1.0) == "holds"
    assert verdict(Effect(1.25, 0.1, 2), above=1.0) == "not decided"


def test_intervals() -> None:
    low, high = Effect.mean(np.array([1.0, 3.0]), overlap=1.5).interval
    assert (low, high) == pytest.approx((2 - 2 * 12.7062, 2 + 2 * 12.7062), rel=1e-5)  # six digits of a table
    measured = Effect.measured(-0.2, -0.35, -0.04)
    assert measured.interval == (-0.35, -0.04)
    assert measured.error == pytest.approx(0.31 / 2 / 1.959964)


def test_the_sets_of_a_claim_are_one_family() -> None:
    claim = Claim("", "", lambda record: Effect(record["effect"], 1.0), above=0.0)
    alone: dict[str, dict[str, Any]] = {"a": {"effect": 2.2}}  # p = 0.028
    assert decide(claim, alone)["a"].verdict == "holds"
    more = alone | {f"set {place}": {"effect": 0.5} for place in range(3)}
    found = decide(claim, more)
    assert found["a"].verdict == "not decided"
    assert found["a"].p == pytest.approx(4 * 0.0278, rel=1e-2)
    # What has no spread, or says nothing, is no test and costs nothing.
    other = Claim("", "", lambda record: Effect(record["effect"], 1.0) if record["effect"] < 9 else None, above=0.0)
    assert decide(other, alone | {"b": {"effect": 10.0}})["a"].verdict == "holds"
    assert decide(other, alone | {"b": {"effect": 10.0}})["b"] == Outcome()


def test_what_is_said() -> None:
    assert Claim("", "x", lambda _: None, above=0.5).threshold == "Effect: x; the claim is that it is above 0.5."
    assert Claim("", "x", lambda _: None, below=0.0).threshold == "Effect: x; the claim is that it is below 0."
    assert [Outcome("holds", Effect(1.0), p).said_p for p in (None, 0.0, 0.0312)] == ["", "< 0.0001", "0.031"]


def test_a_theorem_shows_its_largest_deviation() -> None:
    theorem = Theorem("two", "by halves", lambda record: record["off"])
    lines = theorem_table((theorem,), {"a": {"off": 1e-7}, "b": {"off": 3e-6}, "c": {"off": None}})
    assert lines[-1] == "| two | by halves | 3e-06 |"
    assert theorem_table((theorem,), {"c": {"off": None}})[-1].endswith("| not measured |")
