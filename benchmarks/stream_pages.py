"""The tables of docs/stream.md, from the JSON of `benchmarks.stream`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.stream_figure import TITLES

KINDS = ("errors", "strangeness", "shares")


def methods(record: dict[str, Any]) -> str:
    """Every method: share held and interval score, on every series."""
    columns = list(next(iter(record["methods"].values())))
    rows = [
        [name, *(f"{each[column]['held']:.1%} / {each[column]['score']:.1f}" for column in columns)]
        for name, each in record["methods"].items()
    ]
    return _table(["method", *columns], rows)


def counts(record: dict[str, Any]) -> str:
    """The library's streams on counts, beside the predictor's own intervals."""
    rows = []
    for name, found in record["crowd"].items():
        own = found["own"]
        rows.append([TITLES[name], "none", f"{own['held']:.1%}", *[""] * 3, f"{own['width']:.1f}", f"{own['mae']:.2f}"])
        for every, runs in found["every"].items():
            each, phases = runs["regular"], runs["phases"]
            spread = f"{min(phases):.0%} to {max(phases):.0%}"
            shares = [f"{each['held']:.1%}", spread, f"{each['held_labelled']:.1%}", f"{runs['chance']['held']:.1%}"]
            rows.append([TITLES[name], f"every {every}", *shares, f"{each['width']:.1f}", f"{each['mae']:.2f}"])
    head = ["set", "labels", "held", "by first label", "frames with labels", "labels by chance", "mean width", "MAE"]
    return _table(head, rows)


def delays(record: dict[str, Any]) -> str:
    """Two ways to learn from labels that come late."""
    columns = list(next(iter(record["delays"].values())))
    rows = [
        [name, *(f"{each[column]['held']:.1%} / {each[column]['score']:.3g}" for column in columns)]
        for name, each in record["delays"].items()
    ]
    return _table(["learns from", *columns], rows)


def shifts(record: dict[str, Any]) -> str:
    """UCI sets before and after a shift."""
    ways = [(side, way) for side in ("before", "after") for way in ("own", "stream")]
    rows = [
        [name, *(f"{each[side][f'{way} held']:.1%} / {each[side][f'{way} score']:.2f}" for side, way in ways)]
        for name, each in record["shift"].items()
    ]
    return _table(["set", *(f"{way}, {side}" for side, way in ways)], rows)


def alarms_of_counts(record: dict[str, Any]) -> str:
    """False alarms and delays on counts."""
    found = record["alarms"]["crowd"]
    changes = ("2 standard deviations more", "twice the errors")
    rows = []
    for name, each in found.items():
        in_time = [_number(each[f"in time, every {every}, validation frames known"]) for every in (10, 25)]
        delays = [f"{each[change]['found']:.0%}, {_number(each[change]['delay'])}" for change in changes]
        rows.append([TITLES[name], _share(each["nothing"]), *delays, *in_time])
    head = ["set", "false alarms", *changes, "in time, every 10", "in time, every 25"]
    return _table(head, rows)


def alarms_of_uci(record: dict[str, Any]) -> str:
    """False alarms and delays on UCI sets."""
    rows = []
    for name, each in record["alarms"]["uci"].items():
        kinds = [kind for kind in KINDS if kind in each["shift"]]
        false = [_share(each["nothing"].get(kind)) for kind in KINDS]
        true = [
            f"{each['shift'][k]['found']:.0%}, {_number(each['shift'][k]['delay'])}" if k in kinds else "-"
            for k in KINDS
        ]
        rows.append([name, *false, *true])
    head = ["set", *(f"false: {kind}" for kind in KINDS), *(f"found, delay: {kind}" for kind in KINDS)]
    return _table(head, rows)


def _share(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['found'] * (1 - found['false']) + found['false']:.1%}"


def _number(value: int | None) -> str:
    return "none" if value is None else str(value)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
