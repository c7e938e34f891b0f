"""Plots of a calibration: its curves, metrics over rates, the path between two scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from latedrop.errors import DataError
from latedrop.plots.canvas import (
    COLOURS,
    GREY,
    Array,
    Floats,
    as_array,
    axes_or_new,
    band,
    like_path,
    not_empty,
    same_length,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["calibration_curves", "metric_by_rate", "tradeoff"]

# Of a trade-off path: which points, their marker, its size, what they are called.
_PATH: list[tuple[slice, str, int, str | None]] = [
    (slice(1, -1), "o", 16, None),
    (slice(0, 1), "o", 50, "scale"),
    (slice(-1, None), "s", 50, "relaxed scale"),
]


def calibration_curves(curves: Mapping[str, tuple[Array, Array]], ax: Axes | None = None) -> Axes:
    """Observed frequency against interval level, with the bisector on which a calibrated measure lies.

    Args:
        curves: For each label the levels `(L,)` and the observed frequencies `(L,)`, as from
            `metrics.calibration_curve`.
        ax: Where to draw.

    Example:
        >>> ax = calibration_curves({"raw": ([0.1, 0.5, 0.9], [0.0, 0.2, 0.6])})
        >>> ax.get_xlabel()
        'interval level'
    """
    series = {
        label: same_length({f"the levels of {label!r}": levels, "its frequencies": observed})
        for label, (levels, observed) in not_empty(curves, "curve").items()
    }
    ax = axes_or_new(ax)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="calibrated", zorder=1)
    for index, (label, (levels, observed)) in enumerate(series.items()):
        ax.plot(levels, observed, label=label, markevery=max(1, len(levels) // 10), **style_of(index))
    region: dict[str, Any] = {
        "color": GREY,
        "style": "italic",
        "size": "small",
        "transform": ax.transAxes,
        "bbox": {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
    }
    ax.text(0.03, 0.97, "underconfident", ha="left", va="top", **region)
    ax.text(0.97, 0.03, "overconfident", ha="right", va="bottom", **region)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="interval level", ylabel="observed frequency")
    # The square leaves room beside it, and curves may run anywhere inside it.
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small", handlelength=1.8)
    return ax


def metric_by_rate(
    rates: Array,
    values: Mapping[str, Array],
    ax: Axes | None = None,
    *,
    ylabel: str,
    xlabel: str = "dropout rate",
    log: bool = False,
) -> Axes:
    """A metric against the dropout rate, one line for each label.

    Args:
        rates: Dropout rates `(R,)`.
        values: For each label the metric `(R,)`, or `(R, S)` for S repeats: then the line is their mean and
            the band one standard deviation to either side.
        ax: Where to draw.
        ylabel: Name of the metric, and its unit if it has one.
        xlabel: Name of the rate.
        log: Logarithmic axis of rates.

    Example:
        >>> ax = metric_by_rate([0.01, 0.1, 0.5], {"scaled": [1.2, 1.1, 1.4]}, ylabel="NLL", log=True)
        >>> ax.get_xscale()
        'log'
    """
    at = as_array(rates)
    series = {label: as_array(value) for label, value in not_empty(values, "line").items()}
    for label, value in series.items():
        if at.ndim != 1 or value.ndim not in (1, 2) or len(value) != len(at):
            raise DataError(
                f"expected {label!r} of shape ({at.size},) or ({at.size}, S), a row for each rate, "
                f"found {value.shape}; transpose it if the repeats come first"
            )
    ax = axes_or_new(ax)
    order = np.argsort(at, kind="stable")
    for index, (label, value) in enumerate(series.items()):
        rows = value[order].reshape(len(at), -1)
        mean, std = rows.mean(axis=1), rows.std(axis=1)
        style = style_of(index)
        ax.plot(at[order], mean, label=label, **style)
        if value.ndim == 2:
            band(ax, at[order], mean - std, mean + std, color=style["color"], alpha=0.2)
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if log else "linear")
    ax.legend()
    return ax


def tradeoff(
    nll: Array,
    ma: Array,
    ax: Axes | None = None,
    *,
    scale: Array | None = None,
    rmse: Array | None = None,
    xlabel: str = "NLL",
    ylabel: str = "miscalibration area",
    rmse_label: str = "RMSE",
) -> Axes:
    """The path from the scale that is best for the NLL to the relaxed scale, in the plane of NLL and MA.

    Args:
        nll: NLL at each point of the path, `(P,)`; or `(R, P)` for R paths, one for each rate say.
        ma: Miscalibration area, shaped as `nll`.
        ax: Where to draw.
        scale: The scale at each point, shaped as `nll`; written beside the ends of a single path.
        rmse: RMSE at each point, shaped as `nll` or `(R, 1)`; shown by colour.
        xlabel: Name of the first metric.
        ylabel: Name of the second metric.
        rmse_label: Name of what the colour shows.

    Example:
        >>> ax = tradeoff([1.0, 1.1, 1.3], [0.3, 0.1, 0.02], scale=[2.0, 3.0, 4.5])
        >>> [text.get_text() for text in ax.texts]
        ['scale 2', 'relaxed scale 4.5']
    """
    x = np.atleast_2d(as_array(nll))
    if x.ndim != 2 or not x.size:
        raise DataError(f"expected nll of shape (P,) or (R, P), found {x.shape}; pass the points of a path")
    y = like_path("ma", ma, x)
    shade = None if rmse is None else like_path("rmse", rmse, x)
    ends = None if scale is None else like_path("scale", scale, x)[0]
    ax = axes_or_new(ax)
    ax.plot(x.T, y.T, color=GREY, linewidth=1, zorder=1)
    for place, marker, size, label in _PATH:
        look: dict[str, Any] = {"c": COLOURS[0]}
        if shade is not None:
            look = {"c": shade[:, place], "cmap": "cividis", "vmin": shade.min(), "vmax": shade.max()}
        look |= {"edgecolors": GREY, "linewidths": 0.5, "zorder": 2}
        points = ax.scatter(x[:, place], y[:, place], s=size, marker=marker, label=label, **look)
    if shade is not None:
        ax.figure.colorbar(points, ax=ax, label=rmse_label)
    if len(x) > 1:
        ax.legend()
    else:
        _label_ends(ax, x[0], y[0], ends)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.margins(x=0.1, y=0.2)
    return ax


def _label_ends(ax: Axes, x: Floats, y: Floats, scale: Floats | None) -> None:
    """Name the ends of a path that starts at its smallest x and falls: beside its top, below its foot."""
    first, last = ("", "") if scale is None else (f" {scale[0]:.3g}", f" {scale[-1]:.3g}")
    near: dict[str, Any] = {"textcoords": "offset points"}
    ax.annotate(f"scale{first}", (x[0], y[0]), (8, 0), ha="left", va="center", **near)
    ax.annotate(f"relaxed scale{last}", (x[-1], y[-1]), (0, -8), ha="right", va="top", **near)
