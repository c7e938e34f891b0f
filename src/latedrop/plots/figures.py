"""Draw curves of calibration, and intervals along an input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from latedrop.errors import ArgumentError
from latedrop.plots.canvas import COLOURS, GREY, SKY, Array, axes_or_new, band, not_empty, same_length, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["calibration_curves", "intervals"]


def calibration_curves(curves: Mapping[str, tuple[Array, Array]], ax: Axes | None = None) -> Axes:
    """Draw observed frequency against interval level, with the bisector on which a calibrated measure lies.

    Args:
        curves: For each label the levels `(L,)` and the observed frequencies `(L,)`, as from
            `metrics.calibration_curve`; of classes mean confidence and accuracy, from `metrics.classes.reliability`.
        ax: Where to draw.

    Example:
        >>> ax = calibration_curves({"raw": ([0.1, 0.5, 0.9], [0.0, 0.2, 0.6])})
        >>> ax.get_xlabel()
        'interval level'
    """
    series = {
        label: same_length({f"the abscissae of {label!r}": x, "its ordinates": y})
        for label, (x, y) in not_empty(curves, "curve").items()
    }
    ax = axes_or_new(ax)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="calibrated", zorder=1)
    for index, (label, (x, y)) in enumerate(series.items()):
        ax.plot(x, y, label=label, markevery=max(1, len(x) // 10), **style_of(index))
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
    """Draw predictions of one variable with their intervals, along the one input they depend on.

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


def _bands(low: Array | Mapping[float, tuple[Array, Array]], high: Array | None) -> dict[str, tuple[Array, Array]]:
    """Return lower and upper ends by label, wide bands first, so that narrow ones are drawn over them."""
    if isinstance(low, Mapping) != (high is None):
        raise ArgumentError(
            "expected low and high as two arrays, or low as a mapping from level to (low, high) and no high; "
            f"found low as {type(low).__name__} and high as {type(high).__name__}"
        )
    if isinstance(low, Mapping):
        levels = sorted(not_empty(low, "band"), reverse=True)
        return {f"{100 * level:.4g} % interval": low[level] for level in levels}
    return {"interval": (low, high)}  # type: ignore[dict-item]
