"""Where to draw, what series look like, and arrays of one shape; matplotlib is imported only for a new figure."""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, LatedropError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    *("COLOURS", "GREY", "SKY", "Array", "Floats", "axes_or_new", "band", "new_figure"),
    *("not_empty", "png", "same_length", "style_of"),
]

Array = Tensor | npt.ArrayLike
Floats = npt.NDArray[np.float64]

# Okabe and Ito's, without the yellow, which white paper swallows.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SKY = np.array([0x56, 0xB4, 0xE9]) / 255
_MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
_LINES = ["-", "--", "-.", ":"]
GREY = "0.45"


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches that pyplot does not know of: no window opens, nothing has to be closed.

    >>> len(new_figure(6, 4).subplots(1, 2))
    2
    """
    figure: Figure = _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")
    return figure


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _matplotlib(part: str) -> Any:
    try:
        return import_module(f"matplotlib.{part}")
    except ImportError as reason:
        raise LatedropError(
            f"expected matplotlib, found none ({reason}); install it with: pip install 'latedrop[plots]'"
        ) from None


def axes_or_new(ax: Axes | None) -> Axes:
    """Return the axes given, or those of a new figure."""
    if ax is not None:
        return ax
    axes: Axes = _matplotlib("pyplot").figure(figsize=(6.4, 4.8), layout="constrained").add_subplot()
    return axes


def band(ax: Axes, x: Floats, low: Floats, high: Floats, **look: Any) -> None:
    """Fill between two lines, and draw them: legends make room for lines, not for what is filled."""
    ax.fill_between(x, low, high, linewidth=0, zorder=1, **look)
    ax.plot(x, low, x, high, linewidth=0.5, zorder=1, **(look | {"label": None}))


def style_of(index: int) -> dict[str, Any]:
    """Return the look of the series at `index`: colour and marker come back after 7, the line after 4, all after 28."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "markersize": 5,
    }


def not_empty(series: Mapping[Any, Any], noun: str) -> Mapping[Any, Any]:
    """Return the series, of which there has to be one."""
    if not series:
        raise ArgumentError(f"expected at least one {noun}, found none; pass a mapping from label to values")
    return series


def same_length(columns: Mapping[str, Array]) -> list[Floats]:
    """Return the columns as arrays, all `(N,)`; what a network with one output gives, `(N, 1)`, is flattened."""
    arrays: dict[str, Floats] = {}
    for name, values in columns.items():
        array = np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)
        arrays[name] = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    first = next(iter(arrays))
    for name, array in arrays.items():
        if array.ndim != 1 or not len(array) or len(array) != len(arrays[first]):
            raise DataError(
                f"expected one axis of one length, not empty, for {', '.join(arrays)}; "
                f"found {name} of shape {array.shape}, {first} of shape {arrays[first].shape}; trim it"
            )
    return list(arrays.values())
