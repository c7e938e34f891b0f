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
    "default": ("latedrop's default", "#E69F00", "o"),
    "default + reference": ("the same with training inputs", "#D55E00", "o"),
}


def figure(record: dict[str, Any], path: Path) -> Path:
    """Two panels with one line for each set; the constant is the line at 0, and a mark of its own on the right."""
    drawing = plots.new_figure(11, 6)
    gain, held = drawing.subplots(1, 2, sharey=True)
    order = sorted(record["units"], key=lambda name: by_set(record, "default + reference", "in", "gain")[name].mean())
    for method, (label, colour, marker) in _METHODS.items():
        for ax, group, measure in ((gain, "in", "gain"), (held, "shift", "coverage")):
            values = by_set(record, method, group, measure)
            means = [values[name].mean() for name in order]
            ax.scatter(means, range(len(order)), c=colour, marker=marker, s=34, label=label, zorder=3)
    constant = by_set(record, "constant", "shift", "coverage")
    held.scatter([constant[name].mean() for name in order], range(len(order)), c="black", marker="|", s=90)
    gain.axvline(0, color="black", linewidth=1)
    held.axvline(0.9, color="black", linewidth=1, linestyle=":")
    gain.set_xscale("symlog", linthresh=0.1)
    gain.set_yticks(range(len(order)), order)
    gain.set_xlabel("gain over one constant variance [nats] (logarithmic beyond 0.1)")
    held.set_xlabel("share held by 90 % intervals under shift; | is the constant")
    for ax in (gain, held):
        ax.grid(axis="y", linewidth=0.4)
    drawing.legend(*gain.get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize="small")
    drawing.savefig(path, dpi=130)
    return path
