"""The benchmark of streams: what it compares is what the library does, and its tables repeat the JSON."""

from typing import Any

import numpy as np
import pytest

from benchmarks import stream, stream_alarms, stream_pages, stream_shift
from benchmarks.stream_data import DRIFTS, SETS, crowd, drift
from benchmarks.stream_methods import METHODS, Scaled


@pytest.mark.parametrize("kind", DRIFTS)
def test_the_last_method_is_the_librarys(kind: str) -> None:
    series = drift(kind, 0, 120)
    labelled = stream.phase(120, 4, 1)
    ours = stream.streamed(series, labelled)["measures"]
    again = stream.followed(series, Scaled(stream.LEVEL), True, labelled)
    assert {name: ours[name] for name in again} == pytest.approx(again)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_follows_a_step(name: str) -> None:
    found = stream.followed(drift("step", 0), METHODS[name](stream.LEVEL), False, list(range(500)))
    if name == "the predictor's own":
        assert found["held"] < 0.75
    else:
        assert 0.85 < found["held"] < 0.93


def test_measures() -> None:
    series = drift("steady", 0, 3)
    series.truth[:] = [0.5, -3.0, 1.0]
    found = stream.judged(series, np.zeros(3), np.array([1.0, 2.0, 1.0]))
    assert found["held"] == pytest.approx(2 / 3)
    assert found["score"] == pytest.approx((2 + (4 + 20) + 2) / 3)
    assert found["mae"] == pytest.approx(1.5)


def test_labels_are_spread_over_the_frames() -> None:
    assert [stream.phase(30, 10, k)[0] for k in range(stream.PHASES)] == [1, 3, 5, 7, 9]
    assert stream.phase(30, 10, 4) == [9, 19, 29]
    assert len(stream.by_chance(100, 10, 0)) == 10


@pytest.mark.parametrize("name", SETS)
def test_series_of_counts_are_whole(name: str) -> None:
    series = crowd(name)
    assert len(series.mean) == len(series.std) == len(series.truth) > 200
    assert series.std.min() > 0
    assert series.usual.errors is not None


def test_a_stream_is_compared_on_both_sides_of_a_change() -> None:
    found = stream_shift.compared(drift("bias", 0, 900), 300)
    assert found["before"]["own held"] == pytest.approx(0.9, abs=0.05)
    assert found["after"]["own held"] < 0.2
    assert found["after"]["stream held"] == pytest.approx(0.9, abs=0.06)
    assert found["after"]["stream score"] < found["after"]["own score"]


def test_delays_are_summed_up() -> None:
    found = stream_alarms._summary([5, 9, None, -3])
    assert found == {"streams": 4, "false": 0.25, "found": pytest.approx(2 / 3), "delay": 9}
    assert stream_alarms._summary([None, None, 3])["delay"] is None


def test_tables_repeat_the_json() -> None:
    cell = {"held": 0.912, "score": 3.21, "width": 2.0, "mae": 1.0, "held_labelled": 0.9}
    assert stream_pages.methods({"methods": {"P": {"mall 10": cell}}}).splitlines()[2:] == ["| P | 91.2% / 3.2 |"]
    runs = {"regular": cell, "phases": [0.8, 0.95], "chance": cell}
    table = stream_pages.counts({"crowd": {"mall": {"own": cell, "every": {"10": runs}}}}).splitlines()
    assert table[3] == "| Mall | every 10 | 91.2% | 80% to 95% | 90.0% | 91.2% | 2.0 | 1.00 |"
    side = {"own held": 0.5, "own score": 3.0, "stream held": 0.9, "stream score": 1.0}
    table = stream_pages.shifts({"shift": {"yacht": {"before": side, "after": side}}}).splitlines()
    assert table[2] == "| yacht | 50.0% / 3.00 | 90.0% / 1.00 | 50.0% / 3.00 | 90.0% / 1.00 |"
    summary: dict[str, Any] = {"streams": 4, "false": 0.25, "found": 0.5, "delay": 9}
    each = {"nothing": {"errors": summary}, "shift": {"errors": {**summary, "delay": None}}}
    table = stream_pages.alarms_of_uci({"alarms": {"uci": {"yacht": each}}}).splitlines()
    assert table[2] == "| yacht | 62.5% | - | - | 50%, none | - | - |"
