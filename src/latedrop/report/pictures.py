"""The overview of a demo as a PNG file, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from latedrop import metrics, plots
from latedrop.evaluation.evaluation import Evaluation, constant_of, in_use, unscaled
from latedrop.prediction.prediction import Prediction
from latedrop.report.svg import spread
from latedrop.report.tables import with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["overview", "png"]

_BARS = 40
_RAW, _SCALED = "#0072B2", "#D55E00"


def overview(
    prediction: Prediction, target: Tensor, evaluations: Sequence[Evaluation], *, unit: str = "", level: float = 0.9
) -> Figure:
    """Two panels: the calibration curves, and some test rows with their raw and their calibrated intervals."""
    figure = plots.new_figure(11, 4.5)
    curves, bars = figure.subplots(1, 2, width_ratios=[1.2, 1])
    _draw_curves(curves, evaluations)
    _draw_bars(bars, prediction, metrics.align_target(prediction.mean, target), unit, level)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw_curves(ax: Axes, evaluations: Sequence[Evaluation]) -> None:
    # Other measures share the page, but not this figure: it is about this variance, its scale, and the constant.
    own = ("terms", "relaxed", "constant")
    chosen = [row for row in evaluations if row.nll is not None and (row.rate is not None or row.label in own)]
    chosen = chosen or list(evaluations)
    plots.calibration_curves({row.label: (row.levels, row.observed) for row in chosen}, ax)


def _draw_bars(ax: Axes, prediction: Prediction, target: Tensor, unit: str, level: float) -> None:
    """Raw intervals over the calibrated ones, for a few test rows evenly spaced by prediction."""
    raw, first = replace(prediction, calibration=unscaled(prediction.calibration)), "raw"
    if prediction.calibration.terms is not None:
        raw, first = _with_constant(prediction), "constant"
    some = np.argsort(_flat(prediction.mean), kind="stable")[spread(prediction.mean.numel(), _BARS)]
    ends = (*raw.interval(level), *prediction.interval(level))
    raw_low, raw_high, low, high, truth = (_flat(value)[some] for value in (*ends, target))
    x = np.arange(len(some))
    missed = (truth < low) | (truth > high)
    percent = f"{100 * level:.4g} %"
    name = in_use(prediction.calibration)
    ax.vlines(x, low, high, color=_SCALED, linewidth=5, alpha=0.4, label=f"{name}, {percent}")
    ax.vlines(x, raw_low, raw_high, color=_RAW, linewidth=2.5, label=f"{first}, {percent}")
    ax.scatter(x[~missed], truth[~missed], s=12, color="black", zorder=3, label="target")
    ax.scatter(x[missed], truth[missed], s=32, color="black", marker="x", zorder=3, label=f"target, missed by {name}")
    ax.set(xlabel="test rows, in order of their prediction", ylabel=with_unit("target", unit), xticks=[])
    bottom, top = ax.get_ylim()
    ax.set_ylim(top=top + 0.16 * (top - bottom))
    ax.legend(loc="upper left", fontsize="small", ncols=2)


def _with_constant(prediction: Prediction) -> Prediction:
    """Return these means with the constant variance."""
    return replace(prediction, raw_variance=constant_of(prediction), calibration=unscaled(prediction.calibration))


def _flat(values: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return values.detach().cpu().double().flatten().numpy()
