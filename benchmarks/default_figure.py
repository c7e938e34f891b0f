"""The picture of `benchmarks.default`: what each method is worth, set by set, and what holds under shift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.default_summary import by_set
from latedrop import plots

_METHODS = {
    "paper": ("the paper's procedure", "#999999", "s"),
    "linear + floor": ("first order + floor", "#56B4E9", "^"),
    "ensemble + floor": ("ensemble of five + floor", "#009E73", "D"),
    "default": ("latedrop's default", "#E69F00", "v"),
    "default + reference": ("the same with training inputs", "#D55E00", "o"),
}


def figure(record: dict[str, Any], path: Path) -> Path:
    """Two panels with one line for each set; the constant is the line at 0, and a mark of its own on the right.

    A mark is the mean over seeds, its bar the standard error. Marks stand below each other: none hides another.
    """
    drawing = plots.new_figure(12, 9)
    gain, held = drawing.subplots(1, 2, sharey=True)
    order = sorted(record["units"], key=lambda name: by_set(record, "default + reference", "in", "gain")[name].mean())
    for place, (method, (label, colour, marker)) in enumerate(_METHODS.items()):
        heights = [line + 0.15 * (2 - place) for line in range(len(order))]
        for ax, group, measure in ((gain, "in", "gain"), (held, "shift", "coverage")):
            values = by_set(record, method, group, measure)
            means = [values[name].mean() for name in order]
            errors = [
                values[name].std(ddof=1) / len(values[name]) ** 0.5 if len(values[name]) > 1 else 0 for name in order
            ]
            look = {"color": colour, "marker": marker, "markersize": 5, "linestyle": "none", "elinewidth": 1}
            ax.errorbar(means, heights, xerr=errors, label=label, zorder=3, **look)
    constant = by_set(record, "constant", "shift", "coverage")
    held.scatter(
        [constant[name].mean() for name in order], range(len(order)), c="black", marker="|", s=260, linewidths=1.5
    )
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
