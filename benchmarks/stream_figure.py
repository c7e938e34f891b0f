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

    # Below each other: half as wide, the lines of a thousand frames hide each other.
    high = [3, 1.2, 1.2]
    shown, axes = plt.subplots(
        *(3 * len(found["every"]), 1),
        figsize=(13, 6 * len(found["every"])),
        height_ratios=high * len(found["every"]),
        layout="constrained",
    )
    truth = np.array(found["truth"])
    for panels, (every, runs) in zip(axes.reshape(-1, 3), found["every"].items(), strict=True):
        run = runs["shown"]
        centre, half = np.array(run["centre"]), np.array(run["half"])
        held = np.abs(truth - centre) <= half
        panels[0].set_title(f"{TITLES[name]}, a label every {every} frames: {held.mean():.0%} of frames held")
        _band(panels[0], truth, centre, half, run["labels"], _BREAKS.get(name))
        _coverage(panels[1], held, WINDOW[name], found["own"]["held"])
        _capital(panels[2], run, 1 / alarm)
        panels[0].set_ylabel("people")
        panels[1].set_ylabel(f"share held,\nlast {WINDOW[name]} frames")
        panels[2].set_ylabel("log10 of the\nalarm's capital")
        for ax in panels:
            ax.set_xlim(-0.01 * len(truth), 1.01 * len(truth))
            ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=10)
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
    ax.fill_between(
        frames, np.maximum(centre - half, 0), centre + half, color=_BLUE, alpha=0.25, lw=0, label="90 % interval"
    )
    ax.plot(frames, centre, color=_BLUE, lw=0.9, label="count, bias\nsubtracted")
    ax.plot(frames, truth, color="black", lw=0.7, label="truth")
    known = [i + (cut is not None and i >= cut) for i in labels]
    ax.plot(labels, truth[known], "o", ms=3.5, color=_ORANGE, label="labels")


def _coverage(ax: Any, held: Any, window: int, own: float) -> None:
    sums = np.cumsum(np.insert(held.astype(float), 0, 0))
    ends = np.arange(1, len(held) + 1)
    starts = np.maximum(ends - window, 0)
    ax.plot(ends[window // 2 :], ((sums[ends] - sums[starts]) / (ends - starts))[window // 2 :], color=_BLUE)
    ax.axhline(0.9, color="black", lw=0.8, label="level")
    ax.axhline(own, color=_ORANGE, lw=1, ls="--", label=f"without labels,\nall frames: {own:.0%}")
    ax.set_ylim(0, 1.03)


def _capital(ax: Any, run: dict[str, Any], limit: float) -> None:
    ax.plot(np.clip(run["log_capital"], -4, 8), color=_BLUE)
    ax.axhline(np.log10(limit), color="black", lw=0.8, label="its limit")
    if run["alarm"] is not None:
        ax.axvline(run["alarm"], color=_ORANGE, lw=1, label=f"alarm at frame {run['alarm']}")
    ax.set_xlabel("test frame")
