"""Where to draw, and what series look like; matplotlib is imported only when a new figure is needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from latedrop.errors import LatedropError
from latedrop.plots.arrays import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "GREY", "SKY", "axes_or_new", "band", "new_figure", "style_of"]

# Okabe and Ito's, without the yellow, which white paper swallows.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SKY = np.array([0x56, 0xB4, 0xE9]) / 255
_MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
_LINES = ["-", "--", "-.", ":"]
GREY = "0.45"


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches that pyplot does not know of: no window opens, and there is nothing to close.

    >>> len(new_figure(6, 4).subplots(1, 2))
    2
    """
    figure: Figure = _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")
    return figure


def _matplotlib(part: str) -> Any:
    try:
        return import_module(f"matplotlib.{part}")
    except ImportError as reason:
        raise LatedropError(
            f"expected matplotlib, found none ({reason}); install it with: pip install 'latedrop[plots]'"
        ) from None


def axes_or_new(ax: Axes | None, height: float = 4.8) -> Axes:
    """The axes given, or those of a new figure of this height in inches."""
    if ax is not None:
        return ax
    axes: Axes = _matplotlib("pyplot").figure(figsize=(6.4, height), layout="constrained").add_subplot()
    return axes


def band(ax: Axes, x: Floats, low: Floats, high: Floats, **look: Any) -> None:
    """Fill between two lines, and draw them: legends make room for lines, not for what is filled."""
    ax.fill_between(x, low, high, linewidth=0, zorder=1, **look)
    ax.plot(x, low, x, high, linewidth=0.5, zorder=1, **(look | {"label": None}))


def style_of(index: int) -> dict[str, Any]:
    """Look of the series at `index`: colour and marker come back after 7, the line after 4, all after 28."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "markersize": 5,
    }
