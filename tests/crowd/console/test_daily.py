"""The report of a day: hours worked out by hand, what happened, hostile names, and when it is written."""

import csv
import io
import os
import time
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest

from latedrop_crowd.console.daily import day_bounds, day_page, hours_of, hours_table, write_reports
from latedrop_crowd.console.store import Store
from latedrop_crowd.console.zones import Zone

DAY = date.today() - timedelta(days=1)
NOON = day_bounds(DAY)[0] + 12 * 3600
NAME = '<b>"Stairs" & =1'


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "memory.sqlite")
    yield made
    made.close()


@pytest.fixture
def zone(store: Store) -> Zone:
    """An hour in which six steps of ten seconds were counted, and one could not be; and a frame of the day after."""
    number = store.add_zone("door", NAME, [[0, 0], [1, 0], [1, 1]], 9.5)
    counts = [(4, 2, 6), (8, 6, 10), (12, 10, 14), (13, 9, 17), (2, 1, 3), (3, 1, 5), (None, None, None)]
    store.add_counts([(number, NOON + 10 * i + 5, *row, 0.1) for i, row in enumerate(counts)])
    store.add_counts([(number, day_bounds(DAY)[1] + 5, 99, 98, 100, 0.1), (number, NOON + 3605, 5, 4, 6, 0.1)])
    return next(zone for zone in store.zones("door") if zone.id == number)


def test_hours_by_hand(store: Store, zone: Zone) -> None:
    first, second = hours_of(store, zone, DAY)
    assert first.mean == pytest.approx((4 + 8 + 12 + 13 + 2 + 3) / 6)
    assert (first.peak, first.peak_low, first.peak_high) == (13, 9, 17)
    assert first.sure_minutes == pytest.approx(1 / 6)  # only 10 to 14 lies above 9.5
    assert first.possible_minutes == pytest.approx(3 / 6)  # upper ends 10, 14, 17
    assert first.counted_minutes == pytest.approx(1)
    assert (second.mean, second.counted_minutes) == (5, pytest.approx(1 / 6))
    if day_bounds(DAY)[1] - day_bounds(DAY)[0] == 24 * 3600:
        assert (first.hour, second.hour) == ("12:00", "13:00")


def test_the_table_can_be_read_and_runs_no_formula(store: Store, zone: Zone) -> None:
    rows = list(csv.DictReader(io.StringIO(hours_table(store, store.zones("door"), DAY))))
    assert [float(row["peak"]) for row in rows] == [13, 5]
    assert rows[0]["zone"] == NAME
    assert rows[0]["limit"] == "9.5"
    assert not any(cell.startswith(("=", "@", "+")) for row in rows for cell in row.values())


def test_the_page_says_what_happened(store: Store, zone: Zone) -> None:
    store.add_event("door", "change", "what was changed")
    page = day_page(store, "door", [zone], date.today(), 0.9)
    assert "change: what was changed" in page
    assert "0 alarms, 0 of them acknowledged" in page
    page = day_page(store, "door", [zone], DAY, 0.9)
    assert "13 (9 to 17)" in page
    assert "<svg" in page
    assert "http" not in page
    assert "Nothing was counted" in day_page(store, "door", [zone], DAY - timedelta(days=3), 0.9)


def test_reports_of_yesterday_are_written_once(store: Store, zone: Zone, tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    sources = [("../door: 1", [zone]), ("empty", store.zones("empty"))]
    written = write_reports(store, sources, folder, 0.9)
    assert [path.name for path in written] == [f"{DAY} 1 _door_1.csv", f"{DAY} 1 _door_1.html"]
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in written]
    assert write_reports(store, sources, folder, 0.9) == []


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="needs time.tzset")
def test_a_day_may_have_25_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        lengths = [
            end - begin for begin, end in map(day_bounds, (date(2026, 10, 25), date(2026, 3, 29), date(2026, 6, 1)))
        ]
    finally:
        monkeypatch.undo()
        time.tzset()
    expected = [25, 23, 24] if os.path.exists("/usr/share/zoneinfo/Europe/Berlin") else [24, 24, 24]
    assert lengths == [3600 * hours for hours in expected]
