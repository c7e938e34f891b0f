"""Alarms: p-values are uniform while nothing changes, false alarms as rare as promised, changes are found."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from latedrop.errors import DataError
from latedrop.records import FieldError, checked, plain
from latedrop.streams.monitor import (
    ERRORS,
    SHARES,
    STRANGENESS,
    Bag,
    Monitor,
    MonitorState,
    Usual,
    counted,
    from_curve,
    uniform,
    usual_of_rows,
)
from rounding import assert_same_doubles

scipy_stats = pytest.importorskip("scipy.stats")


def ran(monitor: Monitor, scores: np.ndarray) -> float:
    """The largest capital."""
    largest = 0.0
    for i, score in enumerate(scores):
        monitor.add([float(score)], i)
        largest = max(largest, monitor.capital)
    return largest


def errors(alarm: float = 0.05, known: tuple[float, ...] | None = None, kind: str = "errors") -> Monitor:
    return Monitor(kind, ERRORS, [known], alarm)


def test_p_values_are_uniform_and_independent_while_rows_are_exchangeable() -> None:
    rng = np.random.default_rng(0)
    first, second = [], []
    for seed in range(1500):
        bag = Bag(ERRORS, counted(ERRORS, np.abs(rng.standard_normal(20)).tolist()))
        scores = np.abs(rng.standard_normal(12))
        p_values = [bag.add(float(score), uniform(f"{seed}", i)) for i, score in enumerate(scores)]
        first.append(p_values[-2])
        second.append(p_values[-1])
    assert scipy_stats.kstest(first, "uniform").pvalue > 1e-3
    assert scipy_stats.kstest(second, "uniform").pvalue > 1e-3
    assert abs(scipy_stats.spearmanr(first, second).statistic) < 4 / np.sqrt(1500)


def test_many_equal_scores_have_uniform_p_values_too() -> None:
    bag = Bag(ERRORS)
    p_values = [bag.add(0.5, uniform("ties", i)) for i in range(500)]
    assert scipy_stats.kstest(p_values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("known", [0, 50], ids=["nothing known", "50 validation rows"])
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_false_alarms_are_as_rare_as_promised(known: int, tails: str) -> None:
    rng = np.random.default_rng(known)
    streams, alarm, false = 400, 0.1, 0
    for seed in range(streams):
        draw = rng.standard_normal if tails == "normal" else lambda size: rng.standard_t(2, size)
        usual = counted(ERRORS, np.abs(draw(known)).tolist()) if known else None
        monitor = errors(alarm, usual, kind=f"{tails} {known} {seed}")
        largest = ran(monitor, np.abs(draw(200)))
        assert (monitor.alarm is not None) == (largest >= 1 / alarm)
        false += monitor.alarm is not None
    assert false <= alarm * streams + 3 * np.sqrt(alarm * (1 - alarm) * streams)


def test_false_alarms_with_both_sides_and_several_scores() -> None:
    rng = np.random.default_rng(3)
    streams, alarm, false = 300, 0.1, 0
    for seed in range(streams):
        monitor = Monitor(f"shares {seed}", SHARES, [None, None], alarm, both=True)
        for i, share in enumerate(rng.beta(2, 5, 200)):
            monitor.add([share, 1 - share], i)
        false += monitor.alarm is not None
    assert false <= alarm * streams + 3 * np.sqrt(alarm * (1 - alarm) * streams)


@pytest.mark.parametrize("change", ["wider", "biased"])
def test_a_change_is_found_soon(change: str) -> None:
    rng = np.random.default_rng(0)
    delays = []
    for seed in range(20):
        noise = rng.standard_normal(400)
        usual = counted(ERRORS, np.abs(rng.standard_normal(100)).tolist())
        noise[200:] = 3 * noise[200:] if change == "wider" else noise[200:] + 3
        monitor = errors(0.01, usual, kind=f"{change} {seed}")
        ran(monitor, np.abs(noise))
        assert monitor.alarm is not None
        delays.append(monitor.alarm.number - 200)
    assert 0 < np.median(delays) < 20


def test_smaller_scores_raise_an_alarm_with_both_sides_alone() -> None:
    rng = np.random.default_rng(0)
    scores = np.r_[np.full(100, 0.8), np.full(100, 0.1)] + 0.1 * rng.random(200)
    monitors = [Monitor("shares", SHARES, [None], 0.01, both=both) for both in (False, True)]
    for monitor in monitors:
        ran(monitor, scores)
    assert monitors[0].alarm is None
    assert monitors[1].alarm is not None
    assert 100 < monitors[1].alarm.number < 130


def test_a_restart_takes_what_comes_as_usual() -> None:
    rng = np.random.default_rng(0)
    monitor = errors(0.01, counted(ERRORS, np.abs(rng.standard_normal(100)).tolist()))
    ran(monitor, np.abs(5 * rng.standard_normal(50)))
    assert monitor.alarm is not None
    monitor.restart()
    assert (monitor.alarm, monitor.capital, monitor.number) == (None, 1.0, 0)
    ran(monitor, np.abs(5 * rng.standard_normal(300)))
    assert monitor.alarm is None


def test_curves_are_counts() -> None:
    rng = np.random.default_rng(0)
    scores = np.abs(rng.standard_normal(500))
    levels = [i / 100 for i in range(1, 100)]
    observed = [float((scores <= end).mean()) for end in ERRORS[:99]]
    counts = from_curve(levels, observed, 500)
    assert counts is not None
    exact = counted(ERRORS, scores.tolist())
    assert_same_doubles(counts[:99], exact[:99])
    assert sum(counts[99:]) == pytest.approx(sum(exact[99:]))
    assert from_curve([0.5], [0.5], 500) is None


def test_there_and_back() -> None:
    monitor, other = errors(), errors()
    ran(monitor, np.linspace(0, 5, 60))
    other.resume(checked(MonitorState, plain(monitor.state()), "monitor", ""), "monitor")
    assert ran(monitor, np.ones(20)) == ran(other, np.ones(20))
    assert monitor.alarm == other.alarm is not None
    with pytest.raises(FieldError, match=r"monitor\.counts"):
        other.resume(replace(monitor.state(), counts=((1.0,),)), "monitor")
    bad = plain(monitor.state()) | {"alarm": {"kind": "errors", "row": 1.5, "number": 1}}
    with pytest.raises(DataError, match=r"monitor\.alarm"):
        checked(MonitorState, bad, "monitor", "")


def test_rows_are_counted() -> None:
    usual = usual_of_rows([0.5, 1.0, 1e9, float("inf")], {"floor": [0.0, 1.0]})
    assert usual.strangeness is not None
    assert (len(usual.strangeness), sum(usual.strangeness), usual.strangeness[-1]) == (len(STRANGENESS) + 1, 4, 2)
    assert (usual.shares["floor"][0], usual.shares["floor"][-1]) == (1, 1)
    assert usual_of_rows(None, {}) == Usual()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strangeness", [1]),
        ("strangeness", [-1] * (len(STRANGENESS) + 1)),
        ("shares", {"floor": [0] * len(SHARES)}),
        ("shares", None),
        ("more", 1),
    ],
    ids=["short", "negative", "bins", "none", "other"],
)
def test_damaged_counts_are_refused(field: str, value: Any) -> None:
    with pytest.raises(DataError, match="usual"):
        checked(Usual, plain(Usual()) | {field: value}, "usual", "")
