"""Pictures of the streams on counts, from the JSON of `benchmarks.stream` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TITLES = {"mall": "Mall", "ucsd": "UCSD", "pets": "PETS2009"}
WINDOW = {"mall": 100, "ucsd": 100, "pets": 50}
"""Frames over which the coverage is shown."""
_BLUE, _ORANGE = "#0072B2", "#D55E00"  # which colour-blind readers tell apart
_BREAKS = {"ucsd": 600}  # frames 601 to 1400 are for training: time jumps there


def figures(record: dict[str, Any]) -> list[Path]:
    """One picture for each set."""
    return [figure(name, found, record["alarms"]["alarm"]) for name, found in record["crowd"].items()]


def figure(name: str, found: dict[str, Any], alarm: float) -> Path:
    """Counts with their band, coverage over time, and the capital of the alarm, for both spacings of labels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown, axes = plt.subplots(
        3, len(found["every"]), figsize=(13, 8), sharex=True, sharey="row", height_ratios=[3, 1.3, 1.3], squeeze=False
    )
    truth = np.array(found["truth"])
    for column, (every, runs) in zip(axes.T, found["every"].items(), strict=True):
        run = runs["shown"]
        centre, half = np.array(run["centre"]), np.array(run["half"])
        held = np.abs(truth - centre) <= half
        column[0].set_title(f"{TITLES[name]}, a label every {every} frames: {held.mean():.0%} of frames held")
        _band(column[0], truth, centre, half, run["labels"], _BREAKS.get(name))
        _coverage(column[1], held, WINDOW[name], found["own"]["held"])
        _capital(column[2], run, 1 / alarm)
    axes[0, 0].set_ylabel("people")
    axes[1, 0].set_ylabel(f"share held,\nlast {WINDOW[name]} frames")
    axes[2, 0].set_ylabel("alarm: log10\nof capital")
    axes[0, 0].legend(loc="best", fontsize=10, ncols=2)
    axes[1, 0].legend(loc="lower right", fontsize=10)
    axes[2, 0].legend(loc="best", fontsize=10)
    shown.tight_layout()
    path = IMAGES / f"stream_{name}.png"
    shown.savefig(path, dpi=120)
    plt.close(shown)
    return path


def _band(ax: Any, truth: Any, centre: Any, half: Any, labels: list[int], cut: int | None) -> None:
    frames = np.arange(len(truth), dtype=float)
    if cut is not None:
        frames, truth, centre, half = (
            np.insert(part.astype(float), cut, np.nan) for part in (frames, truth, centre, half)
        )
        ax.axvline(cut, color="0.6", lw=0.8, ls=":")
    ax.fill_between(frames, np.maximum(centre - half, 0), centre + half, color=_BLUE, alpha=0.25, label="90 % band")
    ax.plot(frames, centre, color=_BLUE, lw=0.9, label="count, bias corrected")
    ax.plot(frames, truth, color="black", lw=0.9, label="truth")
    known = [i + (cut is not None and i >= cut) for i in labels]
    ax.plot(labels, truth[known], "o", ms=3.5, color=_ORANGE, label="labels")


def _coverage(ax: Any, held: Any, window: int, own: float) -> None:
    sums = np.cumsum(np.insert(held.astype(float), 0, 0))
    ends = np.arange(1, len(held) + 1)
    starts = np.maximum(ends - window, 0)
    ax.plot(ends[window // 2 :], ((sums[ends] - sums[starts]) / (ends - starts))[window // 2 :], color=_BLUE)
    ax.axhline(0.9, color="black", lw=0.8, label="level")
    ax.axhline(own, color=_ORANGE, lw=1, ls="--", label=f"without labels, all frames: {own:.0%}")
    ax.set_ylim(0, 1.03)


def _capital(ax: Any, run: dict[str, Any], limit: float) -> None:
    ax.plot(np.clip(run["log_capital"], -4, 8), color=_BLUE)
    ax.axhline(np.log10(limit), color="black", lw=0.8, label="limit of the alarm")
    if run["alarm"] is not None:
        ax.axvline(run["alarm"], color=_ORANGE, lw=1, label=f"at frame {run['alarm']}")
        ax.legend(loc="best", fontsize=10)
    ax.set_xlabel("test frame")
