"""Figures of the shift study, drawn from its JSON: what holds, what is noticed, and what grows.

A small mark is a set (or, where variances grow, a cut), the bar is the median over the sets.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from latedrop import plots
from latedrop.plots.canvas import COLOURS, GREY, style_of
from studies.shift.tables import Results, by_set, method_names, values
from studies.uci.tables import SHORT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "figures"]

CAPTIONS = {
    "coverage": "Share of rows inside 90 % intervals, method by method. Small marks are sets (means over their cuts), "
    "bars medians over the sets. Lines divide methods with a floor or a fit of their own, scaled ones and raw ones. "
    "Left: shifted rows. Right: held-out rows from the side of the training rows.",
    "auroc": "How well the standard deviation tells shifted rows from rows inside: AUROC, 0.5 for chance. "
    "Scaling does not change the order of rows, so each measure is shown once, scaled; a floor changes it only where "
    "it is all that is left of the variance. Marks as above.",
    "growth": "How much the mean variance grows from the rows inside to the shifted rows, against how much the mean "
    "squared error does, both as factors. One mark for each cut. On the line the variance grows as the squared error; "
    "below it intervals become too narrow.",
}
_GROWTH = ("injected, scaled", "injected, floor", "embedded, floor", "laplace, floor", "ensemble, floor",
           "gaussian ensemble, scaled", "default", "default + reference")  # fmt: skip
_WIDE = 4
_EIGHTH = "#7f4f24"
"""A brown: the usual colours are seven."""


def figures(results: Results) -> dict[str, Figure]:
    """The figures by name.

    Raises:
        LatedropError: matplotlib is not installed.
    """
    return {"coverage": _coverage(results), "auroc": _auroc(results), "growth": _growth(results)}


def _coverage(results: Results) -> Figure:
    names = _ranked(results, "coverage")
    figure = plots.new_figure(11, 1.4 + 0.24 * len(names))
    shifted, inside = figure.subplots(1, 2, sharey=True)
    _strip(shifted, results, names, "coverage", "share of shifted rows held")
    _strip(inside, results, names, "inside_coverage", "share of rows inside held")
    edges = [y for y, (a, b) in enumerate(pairwise(reversed(names))) if _group(a) != _group(b)]
    for ax in (shifted, inside):
        for y in edges:
            ax.axhline(y + 0.5, color="black", linewidth=0.8)
        ax.axvline(0.9, color="black", linewidth=1, linestyle=":")
        ax.set_xlim(right=1.01)
    _legend(figure, shifted)
    return figure


def _auroc(results: Results) -> Figure:
    names = [name for name in _ranked(results, "auroc", grouped=False) if not name.endswith((", raw", ", floor"))]
    names.remove("constant")
    figure = plots.new_figure(9, 1.4 + 0.26 * len(names))
    ax = figure.subplots()
    _strip(ax, results, names, "auroc", "AUROC of shifted rows against rows inside")
    ax.set_yticks(ax.get_yticks(), [name.removesuffix(", scaled") for name in names])
    ax.axvline(0.5, color="black", linewidth=1, linestyle=":")
    _legend(figure, ax)
    return figure


def _growth(results: Results) -> Figure:
    names = [name for name in _GROWTH if name in method_names(results)] or method_names(results)[:_WIDE]
    high = -(-len(names) // _WIDE)
    figure = plots.new_figure(3.1 * min(_WIDE, len(names)) + 0.6, 3.1 * high + 0.8)
    grid = figure.subplots(high, min(_WIDE, len(names)), squeeze=False, sharex=True, sharey=True).flatten()
    for ax, method in zip(grid, names, strict=False):
        for index, (name, record) in enumerate(results.items()):
            error, variance = (values(record, method, f"{what}_growth") for what in ("error", "variance"))
            if error is not None and variance is not None:
                ax.scatter(np.exp(error), np.exp(variance), alpha=0.7, label=SHORT.get(name, name), **_look(index))
        ax.set(xscale="log", yscale="log", title=method)
        ax.axline((1, 1), (10, 10), color=GREY, linewidth=1, zorder=0)
    for ax in grid[len(names) :]:
        ax.remove()
    figure.supxlabel("squared error, shifted over inside")
    figure.supylabel("variance, shifted over inside")
    _legend(figure, grid[0])
    return figure


def _strip(ax: Axes, results: Results, names: list[str], measure: str, label: str) -> None:
    """Methods from top to bottom, with a mark for each set and a bar at their median."""
    shown = range(len(names))[::-1]
    for index, (name, record) in enumerate(results.items()):
        points = [(number, y) for method, y in zip(names, shown, strict=True)
                  if (number := by_set(record, method, measure)) is not None]  # fmt: skip
        ax.scatter(*zip(*points, strict=True), alpha=0.8, zorder=2, label=SHORT.get(name, name), **_look(index))
    for method, y in zip(names, shown, strict=True):
        ax.plot(
            [np.median(_over_sets(results, method, measure))] * 2,
            [y - 0.38, y + 0.38],
            color="black",
            linewidth=2,
            zorder=3,
            label="median over the sets" if y == 0 else None,
        )
    ax.set_yticks(list(shown), names)
    ax.set_ylim(-0.7, len(names) - 0.3)
    ax.grid(axis="y", linewidth=0.4)
    ax.set_xlabel(label)


def _ranked(results: Results, measure: str, *, grouped: bool = True) -> list[str]:
    """Largest median over sets first; grouped: with a floor or a fit of their own, then scaled ones, then raw ones."""

    def place(method: str) -> tuple[int, float]:
        return _group(method) * grouped, -float(np.median(_over_sets(results, method, measure)))

    return sorted(method_names(results), key=place)


def _group(method: str) -> int:
    return 2 if method.endswith(", raw") else 1 if method.endswith(", scaled") else 0


def _over_sets(results: Results, method: str, measure: str) -> list[float]:
    return [number for record in results.values() if (number := by_set(record, method, measure)) is not None]


def _look(index: int) -> dict[str, Any]:
    if index >= len(COLOURS):
        return {"c": _EIGHTH, "marker": "*", "s": 45, "linewidths": 0}
    style = style_of(index)
    return {"c": style["color"], "marker": style["marker"], "s": 20, "linewidths": 0}


def _legend(figure: Figure, ax: Axes) -> None:
    lines, labels = ax.get_legend_handles_labels()
    figure.legend(
        lines,
        labels,
        loc="outside upper center",
        ncols=min(int(figure.get_figwidth() / 1.2), len(labels)),
        fontsize="small",
    )
