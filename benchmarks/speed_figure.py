"""What `benchmarks.speed` found, as one figure for each machine: a panel for each question, from its JSON alone.

How long does one row take? How long a row of a large batch? How much memory does that batch take? The tables
have every candidate; the figure shows those that a reader chooses between.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed_pages import LABELS, best_peer

__all__ = ["SHOWN", "figure", "points"]

SHOWN = {
    "plain": ("{draws} plain passes, at their best batch size", "black", "|", 1.0),
    "latedrop": ("latedrop, {draws} draws", "#D55E00", "o", 1.0),
    "latedrop_compiled": ("latedrop, compiled", "#E69F00", "D", 0.8),
    "linearize": ("latedrop, first order (no draws)", "#CC79A7", "^", 1.0),
    "loop": ("plain loop over {draws} draws", "#555555", "x", 0.9),
    "peer": ("fastest other library with the right answer, named", "#0072B2", "s", 0.9),
}
"""Label, colour, marker and size of what is drawn; plain passes give no uncertainty."""
_PANELS = (
    ("small", "seconds", "How long does one row take?", "time [ms]"),
    ("large", "seconds", "And a row of a large batch?", "time per row [ms]"),
    ("large", "bytes", "How much memory is that batch?", "peak memory [MiB]"),
)


def figure(record: dict[str, Any], path: Path, draws: int = 50) -> Path:
    """One panel for each question, one line for each network."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    nets = [name for name, sizes in record["nets"].items() if any(points(found, draws) for found in sizes.values())]
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(15, 1.9 + 0.95 * len(nets)))
    drawn: set[str] = set()
    for axis, (size, measure, question, unit) in zip(axes, _PANELS, strict=True):
        labels = []
        for line, net in enumerate(nets):
            found = record["nets"][net].get(size, {"draws": {}})
            drawn |= _line(axis, line, found, measure, draws)
            many = found.get("rows", 0)
            labels.append(net.replace("_", " ") + (f"\n{many} rows" if size == "large" and many else ""))
        axis.set_xscale("log")
        axis.set_xlabel(unit, fontsize=12)
        axis.set_title(question, fontsize=13, loc="left")
        axis.set(ylim=(len(nets) - 0.5, -0.5), yticks=range(len(nets)))
        axis.set_yticklabels(labels, fontsize=11)
        axis.tick_params(axis="x", labelsize=11)
        axis.margins(x=0.16)
        axis.xaxis.set_minor_formatter(NullFormatter())
        if measure == "bytes" and axis.get_xlim()[1] < 1e3:  # less than two powers of ten would leave one number
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        for note in (text for text in axis.texts if hasattr(text, "xy")):  # to stay inside the panel
            if axis.transAxes.inverted().transform(axis.transData.transform(note.xy))[0] > 0.6:
                note.xy = note.lower, note.xy[1]
                note.set(ha="right", position=(-7, 0))
        axis.grid(axis="x", color="#DDDDDD", zorder=0)
        for edge in range(len(nets) - 1):
            axis.axhline(edge + 0.5, color="#BBBBBB", linewidth=0.8)
    handles = [
        axes[0].scatter([], [], label=text.format(draws=draws), **_style(name))
        for name, (text, *_) in SHOWN.items()
        if name in drawn
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=12, frameon=False)
    figure.set_layout_engine("constrained")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def points(found: dict[str, Any], draws: int) -> dict[str, dict[str, Any]]:
    """What is drawn of one network and batch, by the keys of `SHOWN`; with `"library"` for the fastest other one."""
    measured = found["draws"].get(str(draws))
    if measured is None:
        return {}
    entries = measured["candidates"]
    chosen = {name: dict(entries[name]) for name in SHOWN if "seconds" in entries.get(name, {})}
    best = best_peer(entries)
    peer = {} if best is None else {"peer": entries[best] | {"library": LABELS[best]}}
    whole = measured["plain_seconds"]
    for entry in (*chosen.values(), *peer.values()):
        entry["range"] = [whole * end for end in entry.get("interval", [])]
    return {"plain": {"seconds": whole}} | chosen | peer


def _line(axis: Any, line: int, found: dict[str, Any], measure: str, draws: int) -> set[str]:
    drawn = points(found, draws)
    for name, height, value, library in _places(drawn, measure, found.get("rows", 1)):
        axis.scatter([value], [line + height], zorder=3, **_style(name))
        ends = drawn[name].get("range") if measure == "seconds" else None
        low, high = (1e3 * end / found.get("rows", 1) for end in ends) if ends else (value, value)
        if ends:
            axis.plot([low, high], [line + height] * 2, color=SHOWN[name][1], linewidth=5, alpha=0.35, zorder=2)
        if library:
            note = axis.annotate(
                library.partition(",")[0], (max(value, high), line + height), (7, 0), textcoords="offset points",
                va="center", fontsize=9, color=SHOWN[name][1],
            )  # fmt: skip
            note.lower = min(value, low)
    if not drawn:
        words = {"ha": "center", "va": "center", "color": "#777777", "transform": axis.get_yaxis_transform()}
        axis.text(0.5, line, "not measured", **words)
    return set(drawn)


def _places(drawn: dict[str, dict[str, Any]], measure: str, rows: int) -> Iterator[tuple[str, float, float, str]]:
    """Name, height in its line, value in the panel's unit, and the library where it is another's."""
    shown = [name for name in SHOWN if measure in drawn.get(name, {})]
    for place, name in enumerate(shown):
        value = drawn[name][measure] / 2**20 if measure == "bytes" else 1e3 * drawn[name][measure] / rows
        yield name, 0.7 * ((place + 0.5) / len(shown) - 0.5), value, drawn[name].get("library", "")


def _style(name: str) -> dict[str, Any]:
    _, colour, marker, size = SHOWN[name]
    return {"color": colour, "marker": marker, "s": 75 * size, "linewidths": 2.2 if marker in "|x" else 1.0}
