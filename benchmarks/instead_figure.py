"""The picture of `benchmarks.instead`: what each method is worth, set by set, and what holds under shift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.instead import by_set
from benchmarks.instead_sets import APART, CHOSEN_ON
from latedrop import plots

__all__ = ["figure"]

_METHODS = {
    "paper": ("paper", "#999999", "s"),
    "constant + t": ("constant + t", "#56B4E9", "^"),
    "ensemble": ("five networks", "#009E73", "D"),
    "latedrop": ("latedrop", "#D55E00", "o"),
    "latedrop, corrected mean": ("latedrop, corrected mean", "#E69F00", "v"),
}


def figure(record: dict[str, Any], path: Path) -> Path:
    """Two panels with one line for each table; the constant is the line at 0, and a mark of its own on the right.

    Marks stand below each other: none hides another.
    """
    drawing = plots.new_figure(12, 9)
    gain, held = drawing.subplots(1, 2, sharey=True)
    names = [name for name in (*CHOSEN_ON, *APART) if name in record["units"]]
    own = by_set(record, names, False, "all", "latedrop")
    order = sorted(names, key=lambda name: own[name]["gain"])
    for place, (method, (label, colour, marker)) in enumerate(_METHODS.items()):
        heights = [line + 0.15 * (2 - place) for line in range(len(order))]
        look = {"color": colour, "marker": marker, "markersize": 5, "linestyle": "none", "zorder": 3}
        for ax, shifted, measure in ((gain, False, "gain"), (held, True, "held 2")):
            values = by_set(record, names, shifted, "all", method)
            ax.plot([values[name][measure] for name in order], heights, label=label, **look)
    constant = by_set(record, names, True, "all", "constant")
    marks = [constant[name]["held 2"] for name in order]
    held.scatter(marks, range(len(order)), c="black", marker="|", s=260, linewidths=1.5)
    gain.axvline(0, color="black", linewidth=1)
    held.axvline(0.9, color="black", linewidth=1, linestyle=":")
    gain.set_xscale("symlog", linthresh=0.1)
    gain.set_yticks(range(len(order)), [name.replace("_", " ") for name in order])
    gain.set_ylim(-0.5, len(order) - 0.5)
    gain.set_xlabel("gain over one constant variance [nats] (logarithmic beyond 0.1)")
    held.set_xlabel("share held by 90 % intervals under shift; | is the constant")
    for ax in (gain, held):
        for line in range(len(order) - 1):
            ax.axhline(line + 0.5, color="#CCCCCC", linewidth=0.6, zorder=0)
    drawing.legend(*gain.get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=11)
    drawing.savefig(path, dpi=130)
    return path
