"""Figures 1 to 3 of the UCI study, drawn from its JSON: measures of the test rows against the dropout rate.

Lines are means over splits, bands one standard deviation to either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from latedrop import plots
from latedrop.studies.pages import one_legend
from latedrop.studies.uci.tables import SHORT, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "figures"]

CAPTIONS = {
    "figure1": "RMSE and unscaled NLL against the rate, injected and embedded; the NLL also on [0.05, 0.5].",
    "figure2": "Scaled NLL against the rate, and the ideal NLL, that of the variance e^2, which no method reaches. "
    "The scaled injected curve is flat: with one site before the output layer it does not depend on the rate.",
    "figure3": "Miscalibration area against the rate, unscaled and scaled.",
}
_KINDS = ("injected", "embedded")
_WIDE = 4


def figures(results: Results) -> dict[str, Figure]:
    """The figures by name.

    Raises:
        LatedropError: matplotlib is not installed.
    """
    return {"figure1": _first(results), "figure2": _second(results), "figure3": _third(results)}


def _first(results: Results) -> Figure:
    figure = plots.new_figure(11, 2.4 * len(results))
    grid = figure.subplots(len(results), 3, squeeze=False)
    for row, (name, record) in zip(grid, results.items(), strict=True):
        rates, title = record["rates"], SHORT.get(name, name)
        shown = [index for index, rate in enumerate(rates) if rate >= 0.05]
        for ax, measure, label in ((row[0], "rmse", "RMSE"), (row[1], "nll_unscaled", "unscaled NLL")):
            plots.metric_by_rate(rates, _curves(record, measure), ax, ylabel=f"{title}: {label}", log=True)
        row[1].set_yscale("symlog")
        row[1].autoscale(axis="y")
        large = {kind: [values[index] for index in shown] for kind, values in _curves(record, "nll_unscaled").items()}
        plots.metric_by_rate([rates[index] for index in shown], large, row[2], ylabel=f"{title}: unscaled NLL")
    one_legend(figure, figure.axes[0])
    return figure


def _second(results: Results) -> Figure:
    def curves(record: Mapping[str, Any]) -> dict[str, Any]:
        found = {f"{kind}, scaled": record[kind]["test"]["nll_scaled"] for kind in _KINDS}
        return found | {f"{kind}, ideal": record[kind]["test"]["nll_ideal"] for kind in _KINDS}

    return _grid(results, curves, "NLL")


def _third(results: Results) -> Figure:
    def curves(record: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"{kind}, {how}": record[kind]["test"][f"ma_{how}"] for how in ("unscaled", "scaled") for kind in _KINDS
        }

    return _grid(results, curves, "miscalibration area")


def _grid(results: Results, curves: Any, label: str) -> Figure:
    high = -(-len(results) // _WIDE)
    figure = plots.new_figure(3.6 * min(_WIDE, len(results)), 3.2 * high)
    grid = figure.subplots(high, min(_WIDE, len(results)), squeeze=False).flatten()
    for ax, (name, record) in zip(grid, results.items(), strict=False):
        plots.metric_by_rate(record["rates"], curves(record), ax, ylabel=label, log=True)
        ax.set_title(SHORT.get(name, name))
    for ax in grid[len(results) :]:
        ax.remove()
    one_legend(figure, figure.axes[0])
    return figure


def _curves(record: Mapping[str, Any], measure: str) -> dict[str, Any]:
    return {kind: record[kind]["test"][measure] for kind in _KINDS}
