"""Figures of the classification study, drawn from its JSON: gains, strengths of shift, and strange rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from latedrop import plots
from latedrop.plots.canvas import GREY, style_of
from studies.claims import Effect
from studies.classification.shifts import SHIFTS, STRENGTHS
from studies.classification.tables import Record, Results, method_names, score_names, told, values
from studies.pages import one_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "figures"]

CAPTIONS = {
    "gains": "Nats gained over one temperature for all rows, method by method: left on test rows, right on shifted "
    "rows (mean over all shifts and strengths). A mark is the mean over the repeats of a set, a line its 95 % "
    "interval. Right of 0 is better.",
    "strengths": "Nats gained over one temperature on test rows (strength 0) and under rotation, noise and blur of "
    "five strengths; mean over the repeats. A row of panels for each set; their scales differ. Above 0 is better.",
    "strange": "How well scores tell rows of other sets from test rows: AUROC, 0.5 for chance. A mark is one other "
    "set, or noise, mean over the repeats; the bar is the mean over the other sets, without the noise.",
}
_LINES = ("default", "draws", "embedded", "ensemble", "laplace")
_BASE = "temperature"
_MEAN = "mean, without noise"


def figures(results: Results) -> dict[str, Figure]:
    """The figures by name.

    Raises:
        LatedropError: matplotlib is not installed.
    """
    return {"gains": _gains(results), "strengths": _strengths(results), "strange": _strange(results)}


def _gains(results: Results) -> Figure:
    names = [name for name in method_names(results) if name != _BASE][::-1]
    figure = plots.new_figure(10, 1.4 + 0.42 * len(names))
    panels = figure.subplots(1, 2, sharey=True)
    for ax, where, title in zip(panels, ("test", "shift"), ("test rows", "shifted rows"), strict=True):
        for index, (key, record) in enumerate(results.items()):
            shown, base = [], values(record, _BASE, "nll", where)
            for y, method in enumerate(names):
                own = values(record, method, "nll", where)
                if own is not None and base is not None:
                    shown.append((y + _offset(index, len(results)), Effect.mean(base - own, record["overlap"])))
            at, gained = [y for y, _ in shown], [effect.value for _, effect in shown]
            reach = [(effect.interval[1] - effect.value) for _, effect in shown]
            look = style_of(index) | {"linestyle": "none"}
            ax.errorbar(gained, at, xerr=np.nan_to_num(reach, posinf=0.0), elinewidth=1, label=key, **look)
        ax.axvline(0, color="black", linewidth=1)
        ax.set_xscale("symlog", linthresh=0.01 if where == "test" else 0.1)
        ax.set_xlabel(f"nats gained over one temperature, {title}")
        ax.set_yticks(range(len(names)), names)
        ax.grid(axis="y", linewidth=0.3)
    one_legend(figure, panels[0])
    return figure


def _offset(index: int, count: int) -> float:
    return 0.6 * ((index + 0.5) / count - 0.5)


def _strengths(results: Results) -> Figure:
    figure = plots.new_figure(8.5, 0.6 + 1.5 * len(results))
    grid = figure.subplots(len(results), len(SHIFTS), squeeze=False, sharex=True)
    for row, (key, record) in zip(grid, results.items(), strict=True):
        for ax, shift in zip(row, SHIFTS, strict=True):
            parts = ("test", *(f"{shift}-{strength}" for strength in STRENGTHS))
            for index, method in enumerate(_LINES):
                gains = [_mean_gain(record, method, part) for part in parts]
                if None not in gains:
                    ax.plot(
                        (0, *STRENGTHS), gains, label=method, **style_of(index) | {"markersize": 3, "linestyle": "-"}
                    )
            ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
            ax.tick_params(labelsize="small")
        row[0].set_ylabel(f"{key}\nnats gained", fontsize="small")
    for ax, shift in zip(grid[0], SHIFTS, strict=True):
        ax.set_title(shift, fontsize="medium")
    for ax in grid[-1]:
        ax.set_xlabel("strength")
    one_legend(figure, grid[0][0])
    return figure


def _mean_gain(record: Record, method: str, part: str) -> float | None:
    own, base = (values(record, name, "nll", part) for name in (method, _BASE))
    return None if own is None or base is None else float((base - own).mean())


def _strange(results: Results) -> Figure:
    names = score_names(results)[::-1]
    figure = plots.new_figure(10.5, 1.4 + 0.27 * len(names))
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    sources = list(
        dict.fromkeys(part for r in results.values() for part in r["units"][0]["others"] if not _shift(part))
    )
    for ax, (key, record) in zip(panels, results.items(), strict=True):
        for index, source in enumerate(sources):
            points = [(found.mean(), y) for y, score in enumerate(names)
                      if (found := told(record, score, where=source)) is not None]  # fmt: skip
            look = style_of(index)
            if points:
                ax.scatter(*zip(*points, strict=True), c=look["color"], marker=look["marker"], s=18, label=source)
        _bars(ax, names, [told(record, score) for score in names])
        ax.axvline(0.5, color=GREY, linewidth=1, linestyle=":")
        ax.set(xlim=(0, 1.03), xlabel="AUROC", title=key)
        ax.set_yticks(range(len(names)), names)
        ax.grid(axis="y", linewidth=0.3)
    one_legend(figure, *panels)
    return figure


def _bars(ax: Axes, names: list[str], found: list[np.ndarray | None]) -> None:
    for y, each in zip(range(len(names)), found, strict=True):
        if each is not None:
            label = None if _MEAN in ax.get_legend_handles_labels()[1] else _MEAN
            ax.plot([each.mean()] * 2, [y - 0.35, y + 0.35], color="black", linewidth=1.6, zorder=3, label=label)


def _shift(part: str) -> bool:
    return part.rsplit("-", 1)[0] in SHIFTS
