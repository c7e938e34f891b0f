"""Write daily reports: each zone hour by hour, with the interval of its busiest moment, and all events.

Each hour is divided into steps of ten seconds. A step is surely above the limit if its whole interval is, and possibly
above if the upper end is. The mean of an hour has no interval, because the errors within an hour are correlated.
"""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import date, datetime, timedelta
from html import escape
from pathlib import Path

from latedrop.files import csv_line, write_aside
from latedrop_crowd.console.store import Store
from latedrop_crowd.console.zones import Zone

__all__ = ["day_page", "hours_of", "hours_table", "write_reports"]

_STEP = 10.0  # seconds; the store averages old counts over the same step
_WIDE, _HIGH = 720, 120  # width and height of a chart in pixels
_STYLE = """
body { font: 15px system-ui; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse }
tr + tr { border-top: 1px solid #ccc }
td, th { padding: .2em .8em; text-align: right }
td:first-child, th:first-child { text-align: left }
"""


@dataclass(frozen=True)
class Hour:
    """Summarise the counts of a zone in one hour."""

    hour: str  # local time at which it begins
    mean: float  # people, mean of the counted steps
    peak: float  # people in the fullest step
    peak_low: float  # interval of the fullest step
    peak_high: float
    sure_minutes: float  # minutes with the whole interval above the limit
    possible_minutes: float  # minutes with the upper end above the limit
    counted_minutes: float  # minutes that could be counted


def day_bounds(day: date) -> tuple[float, float]:
    """Return begin and end of a day in seconds since 1970; a day may have 23 or 25 hours."""
    ends = (datetime.combine(one, datetime.min.time()) for one in (day, day + timedelta(days=1)))
    begin, end = (moment.timestamp() for moment in ends)
    return begin, end


def hours_of(store: Store, zone: Zone, day: date) -> list[Hour]:
    """Return the hours of a day in which a zone was counted."""
    begin, end = day_bounds(day)
    rows = store.timeline(zone.id, begin, end, most=round((end - begin) / _STEP))
    by_hour: dict[int, list[tuple[float, ...]]] = {}
    for row in rows:
        if row[1] is not None and row[0] < end:
            by_hour.setdefault(int((row[0] - begin) // 3600), []).append(row)
    limit, hours = float("inf") if zone.limit is None else zone.limit, []
    for number, steps in sorted(by_hour.items()):
        peak = max(steps, key=lambda step: step[1])
        sure, possible = (_STEP / 60 * sum(step[column] > limit for step in steps) for column in (2, 3))
        clock = datetime.fromtimestamp(begin + 3600 * number).strftime("%H:%M")
        mean, counted = sum(step[1] for step in steps) / len(steps), _STEP / 60 * len(steps)
        hours.append(Hour(clock, mean, peak[1], peak[2], peak[3], sure, possible, counted))
    return hours


def hours_table(store: Store, zones: Iterable[Zone], day: date) -> str:
    """Return the hours of all zones of a day as CSV."""
    head = ("day", "zone", "limit", *(field.name for field in fields(Hour)))
    lines = [
        (day.isoformat(), zone.name, zone.limit, hour.hour, *(round(value, 2) for value in astuple(hour)[1:]))
        for zone in zones
        for hour in hours_of(store, zone, day)
    ]
    return "".join(map(csv_line, (head, *lines)))


def day_page(store: Store, source: str, zones: Sequence[Zone], day: date, level: float) -> str:
    """Return the report of a source as a self-contained HTML page."""
    begin, end = day_bounds(day)
    events = [event for event in store.events(5000) if begin <= event["time"] < end and event["source"] in (source, "")]
    parts = [f"<h1>{escape(source)}, {day.isoformat()}</h1>"]
    for zone in zones:
        hours = hours_of(store, zone, day)
        limit = "" if zone.limit is None else f", limit {zone.limit:g}"
        parts.append(f"<h2>{escape(zone.name)}{limit}</h2>")
        if not hours:
            parts.append("<p>Nothing was counted.</p>")
            continue
        parts += [_chart(store, zone, begin, end), _table(hours, zone, level)]
    alarms = [event for event in events if event["kind"] == "alarm"]
    seen = sum(event["acknowledged"] is not None for event in alarms)
    parts.append(f"<h2>What happened</h2><p>{len(alarms)} alarms, {seen} of them acknowledged.</p><ul>")
    for event in reversed(events):
        clock = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
        parts.append(f"<li>{clock} {escape(event['kind'])}: {escape(event['text'])}</li>")
    body = "\n".join([*parts, "</ul>"])
    title = f"<title>{escape(source)}, {day.isoformat()}</title>"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8">{title}<style>{_STYLE}</style>'
    return "\n".join([head, body, "</html>", ""])


def _table(hours: Sequence[Hour], zone: Zone, level: float) -> str:
    head = ["hour", "mean", f"fullest ({100 * level:g} % interval)", "minutes counted"]
    head += [] if zone.limit is None else ["surely above the limit", "possibly"]
    rows = []
    for hour in hours:
        cells = [hour.hour, f"{hour.mean:.1f}", f"{hour.peak:.0f} ({hour.peak_low:.0f} to {hour.peak_high:.0f})"]
        cells += [f"{hour.counted_minutes:.0f}"]
        cells += [] if zone.limit is None else [f"{hour.sure_minutes:.1f} min", f"{hour.possible_minutes:.1f} min"]
        rows.append(cells)
    lines = ["".join(f"<th>{name}</th>" for name in head), *("".join(f"<td>{c}</td>" for c in row) for row in rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _chart(store: Store, zone: Zone, begin: float, end: float) -> str:
    """Draw the counts of a day with their intervals and the limit, as SVG."""
    rows = [row for row in store.timeline(zone.id, begin, end, most=288) if row[1] is not None]
    most = max(1.0, zone.limit or 0.0, *(row[3] for row in rows)) * 1.05

    def points(column: int, some: Iterable[tuple[float, ...]]) -> str:
        return " ".join(
            f"{_WIDE * (row[0] - begin) / (end - begin):.1f},{_HIGH * (1 - row[column] / most):.1f}" for row in some
        )

    band = f'<polygon fill="#bbddf2" points="{points(2, rows)} {points(3, reversed(rows))}"/>'
    line = f'<polyline fill="none" stroke="#0072b2" points="{points(1, rows)}"/>'
    y = _HIGH * (1 - (zone.limit or 0.0) / most)
    limit = "" if zone.limit is None else f'<path stroke="#d55e00" stroke-dasharray="5 4" d="M0 {y:.1f}H{_WIDE}"/>'
    words = f'<text x="2" y="11" font-size="11">{most:.0f} people</text>'
    name = f'role="img" aria-label="The day of {escape(zone.name)}"'
    return f'<svg viewBox="0 0 {_WIDE} {_HIGH}" {name}>{band}{line}{limit}{words}</svg>'


def write_reports(
    store: Store, sources: Iterable[tuple[str, Sequence[Zone]]], folder: Path, level: float
) -> list[Path]:
    """Write missing reports of yesterday, for sources that were counted then; return their paths."""
    day, written = date.fromtimestamp(time.time()) - timedelta(days=1), []
    for number, (source, zones) in enumerate(sources, 1):
        name = re.sub(r"[^\w-]+", "_", source)[:60]
        page = folder / f"{day.isoformat()} {number} {name}.html"
        if page.exists() or not any(hours_of(store, zone, day) for zone in zones):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_aside(page.with_suffix(".csv"), hours_table(store, zones, day))
        write_aside(page, day_page(store, source, zones, day, level))
        written += [page.with_suffix(".csv"), page]
    return written
