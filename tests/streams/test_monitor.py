"""Alarms: p-values are uniform while nothing changes, false alarms as rare as promised, changes are found."""

import numpy as np
import pytest

from latedrop.errors import DataError
from latedrop.records import checked, plain
from latedrop.streams.monitor import (
    ERRORS,
    KINDS,
    SHARES,
    STRANGENESS,
    Kind,
    Monitor,
    Usual,
    counted,
    from_curve,
    p_value,
    uniform,
    usual_of_rows,
)
from rounding import assert_same_doubles

scipy_stats = pytest.importorskip("scipy.stats")


def ran(monitor: Monitor, scores: np.ndarray, kind: Kind = KINDS["errors"], alarm: float = 0.01) -> float:
    """Return the largest capital."""
    largest = 0.0
    for i, score in enumerate(scores):
        monitor.add(kind, [float(score)], i, alarm)
        largest = max(largest, monitor.capital)
    return largest


def errors(known: tuple[float, ...] | None = None) -> Monitor:
    return Monitor.of(KINDS["errors"], [known])


def test_p_values_are_uniform_and_independent_while_rows_are_exchangeable() -> None:
    rng = np.random.default_rng(0)
    first, second = [], []
    for seed in range(1500):
        counts = list(counted(ERRORS, np.abs(rng.standard_normal(20)).tolist()))
        scores = np.abs(rng.standard_normal(12))
        p_values = [p_value(ERRORS, counts, float(score), uniform(f"{seed}", i)) for i, score in enumerate(scores)]
        first.append(p_values[-2])
        second.append(p_values[-1])
    assert scipy_stats.kstest(first, "uniform").pvalue > 1e-3
    assert scipy_stats.kstest(second, "uniform").pvalue > 1e-3
    assert abs(scipy_stats.spearmanr(first, second).statistic) < 4 / np.sqrt(1500)


def test_many_equal_scores_have_uniform_p_values_too() -> None:
    counts = [0.0] * (len(ERRORS) + 1)
    p_values = [p_value(ERRORS, counts, 0.5, uniform("ties", i)) for i in range(500)]
    assert scipy_stats.kstest(p_values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("known", [0, 50], ids=["nothing known", "50 validation rows"])
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_false_alarms_are_as_rare_as_promised(known: int, tails: str) -> None:
    rng = np.random.default_rng(known)
    streams, alarm, false = 400, 0.1, 0
    for seed in range(streams):
        draw = rng.standard_normal if tails == "normal" else lambda size: rng.standard_t(2, size)
        usual = counted(ERRORS, np.abs(draw(known)).tolist()) if known else None
        monitor = errors(usual)
        largest = ran(monitor, np.abs(draw(200)), Kind(f"{tails} {known} {seed}", ERRORS), alarm)
        assert (monitor.alarm is not None) == (largest >= 1 / alarm)
        false += monitor.alarm is not None
    assert false <= alarm * streams + 3 * np.sqrt(alarm * (1 - alarm) * streams)


def test_false_alarms_with_both_sides_and_several_scores() -> None:
    rng = np.random.default_rng(3)
    streams, alarm, false = 300, 0.1, 0
    for seed in range(streams):
        kind = Kind(f"shares {seed}", SHARES, both=True)
        monitor = Monitor.of(kind, [None, None])
        for i, share in enumerate(rng.beta(2, 5, 200)):
            monitor.add(kind, [share, 1 - share], i, alarm)
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
        monitor = errors(usual)
        ran(monitor, np.abs(noise), Kind(f"{change} {seed}", ERRORS))
        delays.append(monitor.alarm.number - 200)
    assert 0 < np.median(delays) < 20


def test_smaller_scores_raise_an_alarm_with_both_sides_alone() -> None:
    rng = np.random.default_rng(0)
    scores = np.r_[np.full(100, 0.8), np.full(100, 0.1)] + 0.1 * rng.random(200)
    kinds = [Kind("shares", SHARES, both=both) for both in (False, True)]
    monitors = [Monitor.of(kind, [None]) for kind in kinds]
    for monitor, kind in zip(monitors, kinds, strict=True):
        ran(monitor, scores, kind)
    assert monitors[0].alarm is None
    assert 100 < monitors[1].alarm.number < 130


def test_curves_are_counts() -> None:
    rng = np.random.default_rng(0)
    scores = np.abs(rng.standard_normal(500))
    levels = [i / 100 for i in range(1, 100)]
    observed = [float((scores <= end).mean()) for end in ERRORS[:99]]
    counts = from_curve(levels, observed, 500)
    exact = counted(ERRORS, scores.tolist())
    assert_same_doubles(counts[:99], exact[:99])
    assert sum(counts[99:]) == pytest.approx(sum(exact[99:]))
    assert from_curve([0.5], [0.5], 500) is None


def test_there_and_back() -> None:
    monitor = errors()
    ran(monitor, np.linspace(0, 5, 60), alarm=0.05)
    other = checked(Monitor, plain(monitor), "monitor", "")
    assert ran(monitor, np.ones(20), alarm=0.05) == ran(other, np.ones(20), alarm=0.05)
    assert monitor.alarm == other.alarm is not None
    assert monitor.fits(KINDS["errors"], 1)
    assert not monitor.fits(KINDS["errors"], 2)
    assert not monitor.fits(KINDS["shares"], 1)
    bad = plain(monitor) | {"alarm": {"kind": "errors", "row": 1.5, "number": 1}}
    with pytest.raises(DataError, match=r"monitor\.alarm"):
        checked(Monitor, bad, "monitor", "")


def test_rows_are_counted() -> None:
    usual = usual_of_rows([0.5, 1.0, 1e9, float("inf")], {"floor": [0.0, 1.0]})
    assert (len(usual.strangeness), sum(usual.strangeness), usual.strangeness[-1]) == (len(STRANGENESS) + 1, 4, 2)
    assert (usual.shares["floor"][0], usual.shares["floor"][-1]) == (1, 1)
    assert usual_of_rows(None, {}) == Usual()
