"""Draw a counted frame: the frame with its faint regions, the density map, and the map of standard deviations.

Regions are outlined along the edges of their cells. Colours suit colour-blind readers: those of Okabe and Ito for
lines, magma and viridis for maps. Rejected and faint regions differ in line style, too. Drawing needs matplotlib.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop.files import write_aside
from latedrop.plots import new_figure, png
from latedrop_crowd.counting import CountedFrame
from latedrop_crowd.mcnn import STRIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_panel", "write_panel"]

_FAINT, _REJECTED, _HEAD = "#E69F00", "#56B4E9", "#009E73"
_WIDTH = 10.0  # inches


def draw_panel(
    frame: CountedFrame,
    *,
    roi: Tensor | npt.NDArray[Any] | None = None,
    heads: npt.NDArray[Any] | None = None,
    enlarge: int = 1,
    stride: int = STRIDE,
) -> Figure:
    """Draw a frame in a large panel, and its two maps in small panels beside it.

    Args:
        frame: a frame from `count_people`.
        roi: cells of the region of interest, bool `(h, w)`; the rest is dimmed.
        heads: annotated heads `(P, 2)` as x, y in pixels of the frame, if known.
        enlarge: factor by which the frame was enlarged for the network.
        stride: side of a cell in pixels of the enlarged frame.
    """
    height, width = frame.image.shape[1:]
    figure = new_figure(_WIDTH, 0.9 + (_WIDTH - 1.2) * 0.64 * height / width)
    grid = figure.add_gridspec(2, 2, width_ratios=(2, 1.25))
    picture = figure.add_subplot(grid[:, 0])
    maps = [figure.add_subplot(grid[row, 1]) for row in range(2)]
    figure.suptitle(_title(frame, heads))
    cells = None if roi is None else np.asarray(roi.cpu() if isinstance(roi, Tensor) else roi, dtype=bool)
    side = stride / enlarge
    unit = f"people per {side:g} x {side:g} pixels"
    for ax in (picture, *maps):
        ax.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[], aspect="equal")
    _draw_frame(picture, frame, cells, side)
    _draw_regions(picture, frame, side, heads)
    deviation = "standard deviation of the density" if frame.mapped else "standard deviations were not computed"
    drawn_maps = (frame.density, "magma", "density"), (frame.std_map, "viridis", deviation)
    for ax, (values, colours, title) in zip(maps, drawn_maps, strict=True):
        # An empty map needs a scale, too.
        top = max(float(values.max()), 1e-6)
        drawn = ax.imshow(values, cmap=colours, vmin=0, vmax=top, extent=_extent(values, side), interpolation="nearest")
        figure.colorbar(drawn, ax=ax, label=unit, shrink=0.85, pad=0.02)
        ax.set_title(title, fontsize="medium")
    return figure


def write_panel(path: str | os.PathLike[str], frame: CountedFrame, **settings: Any) -> None:
    """Write the panel of a frame as PNG; needs matplotlib."""
    write_aside(path, png(draw_panel(frame, **settings)))


def _title(frame: CountedFrame, heads: npt.NDArray[Any] | None) -> str:
    """Return the title: count and interval, count without rejected regions, and what is unusual."""
    text = str(replace(frame, reasons=()))
    number = int(frame.rejected.sum())
    if number:
        text += f"; {frame.count_kept:.1f} without {number} rejected region{'s' if number > 1 else ''}"
    text = text if heads is None else f"{text}; true count {len(heads)}"
    return f"{text}\nunusual: {'; '.join(frame.reasons)}" if frame.reasons else text


def _draw_frame(ax: Axes, frame: CountedFrame, roi: npt.NDArray[np.bool_] | None, side: float) -> None:
    pixels = frame.image.detach().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
    ax.imshow(pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
    if roi is not None:
        veil = np.zeros((*roi.shape, 4))
        veil[..., 3] = 0.55 * ~roi
        ax.imshow(veil, extent=_extent(roi, side), interpolation="nearest")


def _draw_regions(ax: Axes, frame: CountedFrame, side: float, heads: npt.NDArray[Any] | None) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    kinds: tuple[tuple[str, npt.NDArray[np.bool_], str, Any], ...] = (
        ("faint", frame.faint, _FAINT, "-"),
        ("rejected", frame.rejected, _REJECTED, (0, (2, 1))),
    )
    for _, chosen, colour, line in kinds:
        edges = _edges(frame.regions.mask(chosen)) * side - 0.5
        ax.add_collection(LineCollection(list(edges), colors="black", linewidths=2.6))
        ax.add_collection(LineCollection(list(edges), colors=colour, linewidths=1.4, linestyles=line))
    total = len(frame.regions)
    ax.set_title(f"{frame.name}, {total} region{'s' if total != 1 else ''} of density", fontsize="medium")
    handles = [
        Line2D([], [], color=colour, linestyle=line, label=f"{int(chosen.sum())} {name}")
        for name, chosen, colour, line in kinds
    ]
    if heads is not None and len(heads):
        x, y = np.asarray(heads).T
        ax.scatter(x, y, s=14, facecolors="none", edgecolors=_HEAD)
        handles.append(Line2D([], [], color=_HEAD, marker="o", fillstyle="none", linestyle="", label="annotated head"))
    # Below the picture, to hide no part of it.
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, frameon=False, borderaxespad=0.2)


def _edges(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the outline of a mask as E cell sides, `(E, 2, 2)`: x, y of both ends, in cells from the corner."""
    padded = np.pad(mask, 1)
    rows, columns = np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1])
    flat = np.stack([np.stack([columns, rows], 1), np.stack([columns + 1, rows], 1)], 1)
    rows, columns = np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1])
    upright = np.stack([np.stack([columns, rows], 1), np.stack([columns, rows + 1], 1)], 1)
    return np.concatenate([flat, upright]).astype(np.float64)


def _extent(values: npt.NDArray[Any], side: float) -> tuple[float, float, float, float]:
    """Return the extent of a map in pixels of the frame: left, right, bottom, top."""
    h, w = values.shape
    return -0.5, w * side - 0.5, h * side - 0.5, -0.5
