"""The figures of the UCI study, drawn from its JSON.

Where nothing else is said, lines are means over splits of the test rows, bands one standard deviation to either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from latedrop import plots
from latedrop.plots.canvas import COLOURS, GREY
from studies.pages import one_legend
from studies.uci.effects import curves, deeper
from studies.uci.surface import valley
from studies.uci.tables import SHORT, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "embedded_figure", "figures"]

_FAR = 10.0
CAPTIONS = {
    "rmse_nll": "RMSE and unscaled NLL against the rate, injected and embedded; on the right the NLL of rates from "
    "0.05 on. Lines are means over splits, bands one standard deviation to either side, here and below. Where an NLL "
    f"is above {_FAR:g}, its axis is logarithmic, and linear near 0.",
    "scaled_nll": "Scaled NLL against the rate, and the ideal NLL, that of the variance e^2, which no method reaches. "
    "The scaled injected curve is flat: with one site before the output layer it does not depend on the rate.",
    "ma": "Miscalibration area against the rate, unscaled and scaled.",
    "deep": "Three hidden layers: RMSE, unscaled and scaled NLL against the rate. Here injection is not flat: the "
    "output is no longer linear in the masked units.",
    "surface": "NLL of the validation rows of one split over rate and scale. The dashed line is the valley: the best "
    "scale of each rate, in closed form. Below: NLL along the valley, and at scale 1.",
    "tradeoff": "RMSE, NLL and miscalibration area together: for each rate a line from the scale of least NLL (circle) "
    "to the relaxed scale (square), coloured by RMSE: grey lines are embedded dropout. Injection, in orange, has one "
    "line for all rates. Means over splits; every panel has axes of its own.",
}
_KINDS = ("injected", "embedded")
_UNITS = {
    "yacht": "resistance / weight",
    "boston-housing": "$1000",
    "energy": "kWh/m²",
    "concrete": "MPa",
    "wine-quality-red": "points",
    "kin8nm": "distance",
    "power-plant": "MW",
    "protein-tertiary-structure": "Å",
}
"""Of the targets; the sources of yacht and kin8nm give none."""
_WIDE = 4
_ABOVE = 3.0
"""Nats above the least NLL at which the colours of the surface end."""
_LEAST_AREA = 0.02
"""No panel shows less of the miscalibration area: smaller differences should look small."""


def figures(results: Results) -> dict[str, Figure]:
    """The figures by name.

    Raises:
        LatedropError: matplotlib is not installed.
    """
    deep = {name: found for name, record in results.items() if (found := deeper(record)) is not None}
    return ({"deep": _deep(deep)} if deep else {}) | {
        "rmse_nll": _by_rate(results),
        "scaled_nll": _scaled(results),
        "ma": _areas(results),
        "surface": _surface(results),
        "tradeoff": _tradeoff(results),
        "embedded": embedded_figure(results),
    }


def embedded_figure(results: Results) -> Figure:
    """Rank correlation of squared error and variance, the floor's share, and the scale: three panels a set."""
    measures = {"ranking": "rank correlation", "floor_share": "floor's share", "scale": "scale asked for"}
    wide, tall = min(_WIDE, len(results)), len(measures)
    high = -(-len(results) // wide)
    figure = plots.new_figure(3.6 * wide if wide > 2 else 7.2, 2.4 * tall * high)
    grid = figure.subplots(tall * high, wide, squeeze=False)
    for place, (name, record) in enumerate(results.items()):
        row, column = divmod(place, wide)
        panels = grid[tall * row : tall * (row + 1), column]
        for ax, (measure, label) in zip(panels, measures.items(), strict=True):
            plots.metric_by_rate(record["rates"], _of_kinds(record, measure), ax, ylabel=label, log=True)
        panels[0].set_title(SHORT.get(name, name))
        panels[1].set_ylim(-0.03, 1.03)
        panels[2].set_yscale("log")
        panels[2].axhline(1, color="black", linewidth=1, linestyle=":")
    for place in range(len(results), wide * high):
        for off in range(tall):
            grid[tall * (place // wide) + off, place % wide].remove()
    one_legend(figure, figure.axes[0])
    return figure


def _deep(results: Results) -> Figure:
    """Like the first figure, of the networks with three hidden layers."""
    columns = {"rmse": "RMSE", "nll_unscaled": "unscaled NLL", "nll_scaled": "scaled NLL"}
    figure = plots.new_figure(11, 2.2 * len(results))
    grid = figure.subplots(len(results), len(columns), squeeze=False)
    for row, (name, record) in zip(grid, results.items(), strict=True):
        for ax, (measure, label) in zip(row, columns.items(), strict=True):
            values = _of_kinds(record, measure)
            plots.metric_by_rate(record["rates"], values, ax, ylabel=_label(name, label), log=True)
            if measure != "rmse":
                _far(ax, values)
    one_legend(figure, figure.axes[0])
    return figure


def _far(ax: Axes, values: Mapping[str, Any]) -> None:
    """A logarithmic axis, linear near 0, where values are large."""
    if max(found.mean(1).max() for found in values.values()) > _FAR:
        ax.set_yscale("symlog")
        ax.autoscale(axis="y")


def _by_rate(results: Results) -> Figure:
    figure = plots.new_figure(11, 2.4 * len(results))
    grid = figure.subplots(len(results), 3, squeeze=False)
    for row, (name, record) in zip(grid, results.items(), strict=True):
        rates = record["rates"]
        shown = [index for index, rate in enumerate(rates) if rate >= 0.05]
        for ax, measure, label in ((row[0], "rmse", "RMSE"), (row[1], "nll_unscaled", "unscaled NLL")):
            plots.metric_by_rate(rates, _of_kinds(record, measure), ax, ylabel=_label(name, label), log=True)
        _far(row[1], _of_kinds(record, "nll_unscaled"))
        large = {kind: values[shown] for kind, values in _of_kinds(record, "nll_unscaled").items()}
        label = _label(name, "unscaled NLL")
        plots.metric_by_rate([rates[index] for index in shown], large, row[2], ylabel=label)
    one_legend(figure, figure.axes[0])
    return figure


def _scaled(results: Results) -> Figure:
    def lines(record: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{kind}, {how}": curves(record, kind, f"nll_{how}") for how in ("scaled", "ideal") for kind in _KINDS}

    return _grid(results, lines, "NLL [nats]")


def _areas(results: Results) -> Figure:
    def lines(record: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"{kind}, {how}": curves(record, kind, f"ma_{how}") for how in ("unscaled", "scaled") for kind in _KINDS
        }

    return _grid(results, lines, "miscalibration area")


def _tradeoff(results: Results) -> Figure:
    figure = plots.new_figure(max(7.2, 4.2 * min(_WIDE, len(results))), 3.5 * -(-len(results) // _WIDE))
    for ax, name, record in _panels(figure, results):
        paths = {
            kind: [
                np.stack([curves(record, kind, f"{measure}_{how}").mean(1) for how in ("scaled", "relaxed")], 1)
                for measure in ("nll", "ma")
            ]
            for kind in _KINDS
        }
        rmse = {kind: curves(record, kind, "rmse").mean(1) for kind in _KINDS}
        nll, area = (np.concatenate([paths["embedded"][i], paths["injected"][i][:1]]) for i in (0, 1))
        shade = np.append(rmse["embedded"], rmse["injected"][0])[:, None]
        plots.tradeoff(nll, area, ax, rmse=shade, xlabel="NLL [nats]", rmse_label=f"RMSE {_unit(name)}".rstrip())
        ax.scatter(nll[-1], area[-1], s=150, facecolors="none", edgecolors=COLOURS[1], linewidths=1.6, label="injected")
        ax.plot(nll[-1], area[-1], color=COLOURS[1], linewidth=1.6, zorder=1.5)
        ax.plot([], [], color=GREY, linewidth=1, label="embedded, one rate")
        low, high = ax.get_ylim()
        room = max(0.0, _LEAST_AREA - (high - low)) / 2
        ax.set_ylim(low - room, high + room)
        ax.set_title(SHORT.get(name, name))
    one_legend(figure, figure.axes[0])
    return figure


def _surface(results: Results) -> Figure:
    name, record = next(iter(results.items()))
    found = {kind: valley(record, kind, points=121) for kind in _KINDS}
    least = min(float(one.nll.min()) for one in found.values())
    ends = [np.log10(edge(one.scales)) for one in found.values() for edge in (np.min, np.max)]
    scales = np.logspace(min(ends) - 1, max(ends) + 2, 161)
    figure, levels = plots.new_figure(11, 7.6), np.linspace(0, _ABOVE, 13)
    top, bottom = figure.subplots(2, 2, height_ratios=[2.2, 1])
    for ax, below, (kind, one) in zip(top, bottom, found.items(), strict=True):
        height = one.surface(scales).T - least
        filled = ax.contourf(one.rates, scales, height, levels, cmap="cividis_r", extend="max")
        ax.contour(one.rates, scales, height, levels[::2], colors="white", linewidths=0.5)
        ax.plot(one.rates, one.scales, color=COLOURS[1], linestyle="--", linewidth=2.5, label="valley: the best scale")
        ax.axhline(1, color="white", linewidth=2.6, alpha=0.75)
        ax.axhline(1, color="black", linewidth=1.2, linestyle=":", label="scale 1: the variance as it is")
        ax.set(xscale="log", yscale="log", xlabel="dropout rate", ylabel="scale")
        ax.set_title(f"{kind}, {SHORT.get(name, name)}")
        lines = {"along the valley": "scaled", "at scale 1": "unscaled"}
        drawn = {label: curves(record, kind, f"nll_{how}", "validation")[:, 0] for label, how in lines.items()}
        plots.metric_by_rate(record["rates"], drawn, below, ylabel="NLL [nats]", log=True)
        below.set_ylim(least - 0.3, least + _ABOVE + 1)
        below.set_xlim(ax.get_xlim())
        below.legend(fontsize="small", loc="upper center")
        ax.legend(fontsize="small", loc="upper right")
    figure.colorbar(filled, ax=list(top), label="nats above the least NLL of both", pad=0.03)
    return figure


def _panels(figure: Figure, results: Results) -> Iterator[tuple[Axes, str, Mapping[str, Any]]]:
    """One for each set, four in a row."""
    high = -(-len(results) // _WIDE)
    grid = figure.subplots(high, min(_WIDE, len(results)), squeeze=False).flatten()
    for ax in grid[len(results) :]:
        ax.remove()
    for ax, (name, record) in zip(grid, results.items(), strict=False):
        yield ax, name, record


def _grid(results: Results, lines: Callable[[Mapping[str, Any]], dict[str, Any]], label: str) -> Figure:
    wide = min(_WIDE, len(results))
    figure = plots.new_figure(3.6 * wide if wide > 2 else 7.2, 3.2 * -(-len(results) // _WIDE))
    for ax, name, record in _panels(figure, results):
        plots.metric_by_rate(record["rates"], lines(record), ax, ylabel=label, log=True)
        ax.set_title(SHORT.get(name, name))
    one_legend(figure, figure.axes[0])
    return figure


def _label(name: str, measure: str) -> str:
    """A set and a measure, with its unit."""
    return f"{SHORT.get(name, name)}: {measure}\n{_unit(name) if measure == 'RMSE' else '[nats]'}".rstrip()


def _unit(name: str) -> str:
    return f"[{_UNITS[name]}]" if name in _UNITS else ""


def _of_kinds(record: Mapping[str, Any], measure: str) -> dict[str, Any]:
    return {kind: curves(record, kind, measure) for kind in _KINDS}
