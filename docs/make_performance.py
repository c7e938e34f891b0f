"""Draw the figures of docs/performance.md from benchmarks/results: `python -m docs.make_performance`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.timing import stored
from latedrop.files import write_aside
from latedrop.plots import new_figure, png
from latedrop.plots.canvas import COLOURS, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = Path(__file__).parent / "images"
Bars = Mapping[str, Sequence[float]]
"""Heights by the names of the series; NaN where something was not measured."""


def bars(ax: "Axes", groups: Sequence[str], series: Bars, label: str, line: float | None = None) -> None:
    """Draw groups of bars with their heights above them, on a logarithmic scale where there are several series."""
    width = 0.8 / len(series)
    for i, (name, heights) in enumerate(series.items()):
        places = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        ax.bar(places, heights, 0.92 * width, label=name, color=COLOURS[i])
        for place, height in zip(places, heights, strict=True):
            if np.isfinite(height):
                text = f"{height:.2g}" if height < 10 else f"{height:.0f}"
                ax.annotate(text, (float(place), height), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    if line is not None:
        ax.axhline(line, color=GREY, linewidth=1, linestyle="--", zorder=0)
    ax.margins(y=0.15)
    ax.set_xticks(range(len(groups)), groups, fontsize=9)
    ax.set_ylabel(label)
    if len(series) == 1:
        return
    ax.legend(fontsize=8, frameon=False)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ticks = [factor * 10.0**power for power in range(-2, 4) for factor in (1, 2, 5)]
    ax.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.minorticks_off()


def draws() -> Any:
    """50 draws beside other libraries: few rows on the left, many on the right."""
    figure = new_figure(10.5, 6.5)
    for row, kind in zip(figure.subplots(2, 2), ("cpu", "gpu"), strict=True):
        nets = stored(f"speed_{kind}")["nets"]
        for ax, size, words in zip(row, ("small", "large"), ("few rows", "many rows"), strict=True):
            there = {name: net[size]["candidates"] for name, net in nets.items() if size in net}
            ours = [ratio(candidates, "latedrop") for candidates in there.values()]
            compiled = [ratio(candidates, "latedrop_compiled") for candidates in there.values()]
            peers = [
                min(ratio(candidates, name) for name in candidates if not name.startswith("latedrop"))
                for candidates in there.values()
            ]
            series = {"latedrop": ours, "compiled": compiled, "fastest other library": peers}
            series = {name: values for name, values in series.items() if np.isfinite(values).any()}
            bars(ax, [name.replace("_", "\n") for name in there], series, "time in 50 plain passes", 1)
            ax.set_title(f"{kind.upper()}, {words}")
    return figure


def ratio(candidates: Mapping[str, Any], name: str) -> float:
    """Return the time of a candidate in units of plain passes; NaN where it has none, infinity where it failed."""
    measured = candidates.get(name)
    if name.startswith("latedrop"):
        return measured["ratio"] if isinstance(measured, dict) and "ratio" in measured else float("nan")
    return measured["ratio"] if isinstance(measured, dict) and "ratio" in measured else float("inf")


def steps() -> Any:
    """First order and the default, in plain passes."""
    record = stored("steps")["ms"]
    nets = list(dict.fromkeys(key.split(", ")[0] for key in record))
    figure = new_figure(10.5, 3.6)
    for ax, rows in zip(figure.subplots(1, 3, sharey=True), (1, 8, 64), strict=True):
        times = {work: [record.get(f"{net}, {rows}, {work}") for net in nets] for work in ("first order", "default")}
        plain = [record.get(f"{net}, {rows}, plain") for net in nets]
        series = {work: [divided(a, b) for a, b in zip(each, plain, strict=True)] for work, each in times.items()}
        bars(ax, [net.replace("-", "\n") for net in nets], series, "time in plain passes" if rows == 1 else "", 4)
        ax.set_title(f"GPU, {rows} row{'s' * (rows > 1)}")
    return figure


def compiled() -> Any:
    """A plain pass, the same work step by step, recorded and compiled, in milliseconds."""
    record = stored("steps")
    figure = new_figure(7, 3.6)
    runs = {key: run for key, run in record["compiled"].items() if isinstance(run, dict)}
    names = [key.removesuffix(", compiled").split(", ") for key in runs if key.endswith(", compiled")]
    series = {
        "plain pass": [record["ms"].get(f"{net}, {rows}, plain", np.nan) for net, _, rows in names],
        "step by step": [record["ms"].get(f"{net}, {rows}, {work}", np.nan) for net, work, rows in names],
    }
    for engine in ("recorded", "compiled"):
        series[engine] = [runs.get(", ".join([*name, engine]), {}).get("ms", np.nan) for name in names]
    labels = [f"{net}\n{work}, {rows} row{'s' * (rows != '1')}" for net, work, rows in names]
    bars(figure.subplots(), labels, series, "milliseconds on a GPU")
    return figure


def calibrate() -> Any:
    """Seconds of calibrations on a GPU."""
    record = stored("steps")["calibrated"]
    figure = new_figure(7, 3.2)
    seconds = [float(np.median(times)) for times in record.values()]
    groups = ["{}\n{} rows".format(*key.split(", ")) for key in record]
    bars(figure.subplots(), groups, {"calibrate": seconds}, "seconds")
    return figure


def growth() -> Any:
    """Time and memory of calibrations against the rows of a table."""
    tables = stored("long_tables")["calibrate"]["tables"]
    rows = [int(count) for count in tables]
    figure = new_figure(8.5, 3.4)
    left, right = figure.subplots(1, 2)
    for i, work in enumerate(("reading", "plain passes", "calibrate")):
        left.loglog(
            rows, [tables[str(count)][work]["cpu_seconds"] for count in rows], "o-", color=COLOURS[i], label=work
        )
    left.set_ylabel("CPU seconds")
    right.semilogx(rows, [tables[str(count)]["calibrate"]["megabytes"] for count in rows], "o-", color=COLOURS[2])
    right.set_ylim(0)
    right.set_ylabel("memory of calibrate, MB")
    for ax in (left, right):
        ax.set_xlabel("validation rows")
    left.legend(frameon=False)
    return figure


def divided(a: Any, b: Any) -> float:
    """Return a quotient; NaN where a number is missing."""
    return a / b if isinstance(a, float) and isinstance(b, float) else float("nan")


if __name__ == "__main__":
    for draw in (draws, steps, compiled, calibrate, growth):
        write_aside(IMAGES / f"performance_{draw.__name__}.png", png(draw()))
