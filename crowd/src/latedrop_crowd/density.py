r"""Make density maps from heads: the sum of a map is the number of heads.

Each head at `x_i` is drawn as a Gaussian, normalised over the frame and the region of interest, so that its mass is 1
also at the border:

$$
D(p) = \sum_i \frac{g_i(p)}{\sum_{q \in \mathrm{frame} \cap \mathrm{roi}} g_i(q)},
\qquad g_i(p) = \exp\left( -\frac{\|p - x_i\|^2}{2 \sigma^2} \right).
$$

Points are `(x, y)` in pixels from 0: the pixel in row `r` and column `c` is centred at `x = c`, `y = r`, and a point
belongs to the pixel it is nearest to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop.errors import ArgumentError, DataError

__all__ = ["density_map", "heads_inside", "roi_cells"]

Array: TypeAlias = "npt.ArrayLike | Tensor"
Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]


def density_map(
    points: Array,
    shape: Sequence[int],
    sigma: float = 4.0,
    roi: Array | None = None,
    *,
    stride: int = 1,
) -> npt.NDArray[np.float32]:
    """Make the density map of heads, in people per cell; it sums to the number of heads inside frame and `roi`.

    Args:
        points: heads `(P, 2)` as x, y in pixels. Heads outside the frame or the `roi` are ignored.
        shape: height and width of the frame in pixels, `(H, W)`.
        sigma: standard deviation of the kernel of a head in pixels.
        roi: region of interest, bool `(H, W)`, to which kernels are cut; None for the whole frame.
        stride: side of a cell in pixels. The map is `(H // stride, W // stride)`. Remaining pixels at the bottom and
            the right belong to the last cells, so that the sum is unchanged.

    >>> grid = density_map([(10.0, 5.0), (0.0, 0.0), (99.0, 5.0)], (48, 64), sigma=3, stride=4)
    >>> grid.shape, round(float(grid.sum()), 4)  # one of the three is outside the frame
    ((12, 16), 2.0)
    """
    height, width = _check_shape(shape, stride)
    heads = _check_points(points)
    mask = _check_roi(roi, (height, width))
    inside = heads_inside(heads, (height, width), mask)
    if not 0 < sigma < float("inf"):
        raise ArgumentError(f"expected sigma above 0 pixels; found {sigma}. Pass a width such as 4.")
    x, y = heads[inside].T
    # Without a mask each kernel is a product of a row and a column kernel, each normalised to sum 1.
    rows, columns = _along(y, sigma, height), _along(x, sigma, width)
    if mask is None:
        density: Floats = _blocks(rows, stride, axis=1).T @ _blocks(columns, stride, axis=1)
    else:
        mass = ((rows @ mask) * columns).sum(1, keepdims=True)
        full = (rows / mass).T @ columns * mask
        density = _blocks(_blocks(full, stride, axis=0), stride, axis=1)
    return density.astype(np.float32)


def heads_inside(points: Array, shape: Sequence[int], roi: Array | None = None) -> Mask:
    """Return the mask of heads inside the frame and the `roi`, bool `(P,)`.

    >>> heads_inside([(0, 0), (-0.6, 0), (63.4, 47.4)], (48, 64)).tolist()
    [True, False, True]
    """
    height, width = _check_shape(shape, 1)
    heads = _check_points(points)
    mask = _check_roi(roi, (height, width))
    column, row = np.floor(heads + 0.5).T
    inside: Mask = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    if mask is not None:
        inside[inside] = mask[row[inside].astype(int), column[inside].astype(int)]
    return inside


def roi_cells(roi: Array, stride: int = 4) -> Mask:
    """Return the mask of cells with at least one pixel of a region of interest, `(H // stride, W // stride)`.

    Remaining pixels at the bottom and the right belong to the last cells, as in `density_map`.

    >>> roi_cells(np.eye(9), 4).tolist()
    [[True, False], [False, True]]
    """
    pixels = _numbers(roi, "a region of interest")
    if pixels.ndim != 2:
        raise DataError(f"expected a region of interest (H, W); found shape {pixels.shape}. Pass one mask.")
    _check_shape(pixels.shape, stride)
    return _blocks(_blocks((pixels != 0).astype(np.float64), stride, axis=0), stride, axis=1) > 0


def _along(centres: Floats, sigma: float, size: int) -> Floats:
    """Return the kernels of P heads along one axis, `(P, size)`, each with sum 1."""
    squares = (np.arange(size) - centres[:, None]) ** 2
    # Relative to the nearest pixel, so that a kernel much narrower than a pixel does not underflow to 0.
    kernels: Floats = np.exp((squares.min(1, keepdims=True) - squares) / (2 * sigma**2))
    kernels /= kernels.sum(1, keepdims=True)
    return kernels


def _blocks(values: Floats, stride: int, axis: int) -> Floats:
    """Sum over runs of `stride` entries along an axis; the last run also takes the remaining entries."""
    starts = np.arange(values.shape[axis] // stride) * stride
    sums: Floats = np.add.reduceat(values, starts, axis=axis)
    return sums


def _numbers(values: Array, what: str) -> Floats:
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"expected {what} as numbers; {error}. Pass an array or a tensor.") from error


def _check_shape(shape: Sequence[int], stride: int) -> tuple[int, int]:
    if len(shape) != 2 or any(int(side) != side or side < 1 for side in shape):
        raise ArgumentError(f"expected the frame's shape as (H, W) in pixels; found {tuple(shape)}. Pass two integers.")
    if int(stride) != stride or not 1 <= stride <= min(shape):
        raise ArgumentError(
            f"expected a stride between 1 and the frame's shorter side, {min(shape)} pixels; found {stride}. "
            "Pass 4 for the grid of MCNN; enlarge the frame if it is smaller than that."
        )
    return int(shape[0]), int(shape[1])


def _check_points(points: Array) -> Floats:
    heads = _numbers(points, "points")
    if heads.shape == (0,):
        return heads.reshape(0, 2)
    if heads.ndim != 2 or heads.shape[1] != 2:
        raise DataError(f"expected points (P, 2), x and y of each head; found shape {heads.shape}. Pass x, y pairs.")
    if not np.isfinite(heads).all():
        count = int((~np.isfinite(heads).all(1)).sum())
        raise DataError(f"expected finite points; found NaN or inf in {count} of {len(heads)}. Leave these out.")
    return heads


def _check_roi(roi: Array | None, shape: tuple[int, int]) -> Mask | None:
    if roi is None:
        return None
    mask: Mask = _numbers(roi, "a region of interest") != 0
    if mask.shape != shape:
        raise DataError(
            f"expected a region of interest of the frame's {shape[0]} x {shape[1]} pixels; found shape {mask.shape}. "
            "Resize one of the two."
        )
    return mask
