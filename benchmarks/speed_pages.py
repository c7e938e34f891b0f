"""What `benchmarks.speed` found, as tables, from its JSON alone; `speed_figure` draws it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS

__all__ = ["IMAGES", "LABELS", "OTHER_TARGET", "best_peer", "memory_table", "one_table", "rows_for_readme", "tables"]

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LABELS = {
    "latedrop": "latedrop",
    "latedrop_loop": "latedrop, engine loop",
    "latedrop_vmap": "latedrop, engine vmap (before draws were rows)",
    "latedrop_compiled": "latedrop, engine compiled",
    "linearize": "latedrop, first order",
    "loop": "plain loop",
    "loop_stack": "plain loop, stacked",
    "torch_uncertainty_batch": "torch-uncertainty, on_batch",
    "torch_uncertainty_loop": "torch-uncertainty, loop",
    "baal": "baal",
    "baal_cached": "baal, cached",
    "lightning_uq_box": "lightning-uq-box",
    "probly": "probly",
    "laplace_last_layer": "Laplace, last layer",
    "laplace_kron": "Laplace, Kronecker",
    "laplace_full": "Laplace, full",
}
"""Every candidate: what it is called in the JSON, and on pages."""

OTHER_TARGET = ("linearize", "laplace_last_layer", "laplace_kron", "laplace_full")
"""Candidates with no draws and another variance than that of thinned networks."""

_STACKING = {
    "T passes, outputs kept": ("loop_stack", "torch_uncertainty_loop", "baal_cached", "lightning_uq_box", "probly"),
    "T copies of the batch": ("torch_uncertainty_batch", "baal"),
}
"""The two ways to hold the outputs of all T draws, and who goes them."""

_RIVALS = ("torch_uncertainty_batch", "torch_uncertainty_loop", "baal", "baal_cached", "lightning_uq_box", "probly")


def tables(record: dict[str, Any]) -> str:
    """Markdown from the JSON of one machine: a table for each network and batch."""
    return "\n\n".join(
        one_table(name, found, markdown=True)
        for name, by_batch in record["nets"].items()
        for found in by_batch.values()
    )


def rows_for_readme(results: Path = RESULTS, draws: int = 50) -> str:
    """The short table: multiples of plain x T, and peak memory, for latedrop, the best peer and a plain loop.

    The best peer is the fastest one that gives the right answer.
    """
    lines = [
        "| network | on | rows | latedrop | compiled | best peer | plain loop | memory, latedrop / best peer [MiB] |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        _readme_row(name, kind, found, draws) for kind, name, found in _all(results) if str(draws) in found["draws"]
    ]
    return "\n".join(lines)


def memory_table(results: Path = RESULTS) -> str:
    """Peak memory against draws, the least of others that hold T outputs, and time over that of a plain loop."""
    measured = list(_all(results))
    counts = sorted({int(count) for _, _, found in measured for count in found["draws"]})
    heads = ["network", "on", "rows", *(f"MiB, T = {count}" for count in counts)]
    heads += [f"{way} [MiB]" for way in _STACKING] + [f"time / plain loop, T = {count}" for count in counts]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- " + "| ---: " * (len(heads) - 2) + "|"]
    return "\n".join([*lines, *(_memory_row(kind, name, found, counts) for kind, name, found in measured)])


def _all(results: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kind of machine, network, and what was found with a batch."""
    for kind in ("cpu", "gpu"):
        path = results / f"speed_{kind}.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"nets": {}}
        yield from ((kind, name, found) for name, by_batch in record["nets"].items() for found in by_batch.values())


def _memory_row(kind: str, name: str, found: dict[str, Any], counts: Sequence[int]) -> str:
    entries = {count: found["draws"].get(str(count), {"candidates": {}})["candidates"] for count in counts}
    ours = {count: entries[count].get("latedrop", {}) for count in counts}
    sizes = [_mebibytes(entry["bytes"]) if "bytes" in entry else "-" for entry in ours.values()]
    least = [_least(entries, keys) for keys in _STACKING.values()]
    times = [
        _times(ours[count]["seconds"] / entries[count]["loop"]["seconds"])
        if "seconds" in ours[count] and "seconds" in entries[count].get("loop", {})
        else "-"
        for count in counts
    ]
    return f"| {' | '.join([name.replace('_', ' '), kind.upper(), str(found['rows']), *sizes, *least, *times])} |"


def _least(entries: dict[int, dict[str, Any]], keys: Sequence[str]) -> str:
    """The least memory of these candidates, with the most draws that any of them was measured with."""
    for count in sorted(entries, reverse=True):
        sizes = [entries[count][key]["bytes"] for key in keys if "bytes" in entries[count].get(key, {})]
        if sizes:
            return f"{_mebibytes(min(sizes))} (T = {count})"
    return "-"


def one_table(name: str, found: dict[str, Any], *, markdown: bool = False) -> str:
    counts = list(found["draws"])
    rows = "1 row" if found["rows"] == 1 else f"{found['rows']} rows"
    sites = "1 site" if found["sites"] == 1 else f"{found['sites']} sites"
    head = f"{name.replace('_', ' ')}, {rows}, {sites}; plain x T: "
    head += ", ".join(f"T = {c}: {_seconds(found['draws'][c]['plain_seconds'])}" for c in counts)
    cells = [["", *(f"T = {c}" for c in counts), *(f"MiB, T = {c}" for c in counts), "answer"]]
    for candidate, label in LABELS.items():
        entries = [found["draws"][c]["candidates"].get(candidate, {}) for c in counts]
        if not any(entries):
            continue
        if all("seconds" not in entry for entry in entries):
            cells.append([label, *(["-"] * (2 * len(counts))), next(e["status"] for e in entries if e)])
            continue
        times = [f"{_times(e['ratio'])} ({_seconds(e['seconds'])})" if "ratio" in e else "-" for e in entries]
        sizes = [_mebibytes(e["bytes"]) if "bytes" in e else "-" for e in entries]
        cells.append([label, *times, *sizes, _answer(candidate, entries)])
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in cells]
        lines.insert(1, "| --- " + "| ---: " * (2 * len(counts)) + "| --- |")
        return f"{head}\n\n" + "\n".join(lines)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([head, *padded, ""])


def _answer(candidate: str, entries: Sequence[dict[str, Any]]) -> str:
    if candidate in OTHER_TARGET:
        return "another variance"
    wrong = [entry for entry in entries if entry.get("right") is False]
    if not wrong:
        return "right"
    return f"wrong: std off by {wrong[-1]['std_error']:+.0%}, chance {wrong[-1]['std_chance']:.0%}"


def best_peer(entries: dict[str, Any]) -> str | None:
    """The fastest other library that gives the right answer."""
    return min(_rivals(entries), key=lambda key: entries[key]["seconds"], default=None)


def _rivals(entries: dict[str, Any]) -> list[str]:
    """Other libraries that ran and were right."""
    return [key for key in _RIVALS if "ratio" in entries.get(key, {}) and entries[key]["right"]]


def _readme_row(name: str, kind: str, found: dict[str, Any], draws: int) -> str:
    # With fewer draws where the others were too slow to be measured with so many.
    fewer = sorted((int(count) for count in found["draws"] if int(count) <= draws), reverse=True)
    used = next((n for n in fewer if _rivals(found["draws"][str(n)]["candidates"])), draws)
    entries = found["draws"][str(used)]["candidates"]
    name = name if used == draws else f"{name}, {used} draws"
    ratio = {key: _with_interval(entry) for key, entry in entries.items() if "ratio" in entry}
    best = best_peer(entries)
    sizes = [_mebibytes(entries[key]["bytes"]) if key in ratio else "-" for key in ("latedrop", best)]
    cells = [
        name.replace("_", " "),
        kind.upper(),
        str(found["rows"]),
        *(ratio.get(key, "-") for key in ("latedrop", "latedrop_compiled")),
    ]
    cells.append("-" if best is None else f"{ratio[best]}, {LABELS[best]}")
    return f"| {' | '.join([*cells, ratio.get('loop', '-'), ' / '.join(sizes)])} |"


def _with_interval(entry: dict[str, Any]) -> str:
    if "interval" not in entry:
        return _times(entry["ratio"])
    low, high = map(_times, entry["interval"])
    return f"{_times(entry['ratio'])} ({low} to {high})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.3g}" if size < 1000 * 2**20 else f"{size / 2**20:.0f}"
