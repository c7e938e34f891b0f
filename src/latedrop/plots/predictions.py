"""Plots of predictions: their intervals, and errors against predicted deviations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from latedrop.errors import ArgumentError
from latedrop.plots.canvas import COLOURS, SKY, Array, axes_or_new, band, not_empty, same_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["error_against_std", "intervals"]


def intervals(
    x: Array,
    mean: Array,
    low: Array | Mapping[float, tuple[Array, Array]],
    high: Array | None = None,
    ax: Axes | None = None,
    *,
    target: Array | None = None,
    xlabel: str = "x",
    ylabel: str = "prediction",
) -> Axes:
    """Predictions of one variable with their intervals, along the one input they depend on.

    Args:
        x: Inputs `(N,)`, in any order; `(N, 1)` will do, here and below.
        mean: Predictions `(N,)`.
        low: Lower ends `(N,)`; or, for several bands, the lower and the upper ends by level.
        high: Upper ends `(N,)`; None if `low` has them.
        ax: Where to draw.
        target: True values `(N,)`, drawn as points.
        xlabel: Name of the input, and its unit if it has one.
        ylabel: Name of what is predicted, and its unit if it has one.

    Example:
        >>> ax = intervals([0, 1], [2, 3], {0.5: ([1.5, 2.5], [2.5, 3.5]), 0.9: ([1, 2], [3, 4])})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['90 % interval', '50 % interval', 'mean']
    """
    bands = _bands(low, high)
    columns = {"x": x, "mean": mean} | ({} if target is None else {"target": target})
    for label, (below, above) in bands.items():
        columns |= {f"low end of the {label}": below, f"high end of the {label}": above}
    arrays = dict(zip(columns, same_length(columns), strict=True))
    order = np.argsort(arrays["x"], kind="stable")
    arrays = {name: array[order] for name, array in arrays.items()}

    ax = axes_or_new(ax)
    for index, label in enumerate(bands):
        ends = arrays[f"low end of the {label}"], arrays[f"high end of the {label}"]
        # Opaque tints, not layers of alpha: those would add up to darker colours than the legend shows.
        tint = 1 - np.linspace(0.35, 0.85, len(bands))[index] * (1 - SKY)
        band(ax, arrays["x"], *ends, color=tuple(tint), label=label)
    ax.plot(arrays["x"], arrays["mean"], color=COLOURS[0], label="mean")
    if target is not None:
        ax.scatter(arrays["x"], arrays["target"], s=10, c="black", linewidths=0, label="target", zorder=3)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend()
    return ax


def error_against_std(
    std: Array, error: Array, ax: Axes | None = None, *, unit: str | None = None, log: bool = False
) -> Axes:
    """Size of each error against its predicted standard deviation, with lines at one and two of these.

    Of a Gaussian, calibrated uncertainty 68 % of the points lie below the first line, 95 % below the second.

    Args:
        std: Predicted standard deviations `(N,)`.
        error: Errors `(N,)`, with or without sign.
        ax: Where to draw.
        unit: Unit of both.
        log: Logarithmic axes; points with an error or a deviation of 0 are not shown.

    Example:
        >>> ax = error_against_std([0.5, 1.0, 2.0], [0.1, -1.5, 1.0], unit="kW")
        >>> ax.get_ylabel()
        '|error| [kW]'
    """
    spread, size = same_length({"std": std, "error": error})
    size = np.abs(size)
    ax = axes_or_new(ax)
    ax.scatter(spread, size, s=12, color=COLOURS[0], alpha=0.4, linewidths=0, label="example", zorder=2)
    start = spread[spread > 0].min(initial=spread.max()) if log else 0.0
    for times, line in [(1, "--"), (2, ":")]:
        ends = np.array([start, spread.max()])
        ax.plot(ends, times * ends, color=COLOURS[1], linestyle=line, label=f"{times} std", zorder=3)
    if log:
        ax.set(xscale="log", yscale="log")
    else:
        ax.set(xlim=(0, None), ylim=(0, None))
    tail = f" [{unit}]" if unit else ""
    ax.set(xlabel=f"predicted standard deviation{tail}", ylabel=f"|error|{tail}")
    # Looking for the best place goes over every point, which takes long when they are many.
    ax.legend(loc="best" if len(size) <= 10_000 else "upper left")
    return ax


def _bands(low: Array | Mapping[float, tuple[Array, Array]], high: Array | None) -> dict[str, tuple[Array, Array]]:
    """Lower and upper ends by label."""
    if isinstance(low, Mapping) != (high is None):
        raise ArgumentError(
            "expected low and high as two arrays, or low as a mapping from level to (low, high) and no high; "
            f"found low as {type(low).__name__} and high as {type(high).__name__}"
        )
    if isinstance(low, Mapping):
        # Wide bands first, so that narrow ones are drawn over them.
        levels = sorted(not_empty(low, "band"), reverse=True)
        return {f"{100 * level:.4g} % interval": low[level] for level in levels}
    return {"interval": (low, high)}  # type: ignore[dict-item]
