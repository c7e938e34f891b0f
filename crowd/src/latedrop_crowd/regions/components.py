"""The connected regions of a density map, and what tells them apart.

A region is a connected set of cells (8 neighbours) whose density is above a threshold. With `u` the standard deviation
and `d` the density of a cell, its mass is `sum d`, its ratio `sum u / sum d`, and its isolation the distance to the
nearest other region.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import ArgumentError, DataError

__all__ = ["NEAR", "Regions", "find_regions", "near_cells", "to_cells", "usual_threshold"]

Floats: TypeAlias = npt.NDArray[np.float64]

NEAR = 2.0
"""A region is false if no annotated head lies in it or within this many cells of it: two sigmas of a kernel of one cell
(4 pixels), so that the foot of a person's own bump is no false alarm. `near_cells` has it for wider kernels."""
_EIGHT = np.ones((3, 3), dtype=bool)
_SHARE = 0.1  # of a usual peak: where a region ends


@dataclass(frozen=True)
class Regions:
    """The regions of one map; arrays have a row for each, in the order of their labels.

    Attributes:
        labels: `(h, w)`: 0 outside, then 1, 2, ...
        mass: sum of the density, people.
        ratio: sum of the deviations over the mass.
        isolation: cells to the nearest other region, from edge to edge; the diagonal of the map where there is none.
    """

    labels: npt.NDArray[np.int32]
    mass: Floats
    ratio: Floats
    isolation: Floats

    def __len__(self) -> int:
        return len(self.mass)

    def mask(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Cells `(h, w)` of the chosen regions, `(R,)`."""
        cells: npt.NDArray[np.bool_] = np.concatenate([[False], chosen])[self.labels]
        return cells

    def near(self, heads: npt.NDArray[Any], within: float = NEAR) -> npt.NDArray[np.bool_]:
        """Which regions have a head in them or within so many cells, `(R,)`; `heads` `(P, 2)` as x, y in cells."""
        found = np.zeros(len(self) + 1, dtype=bool)
        heads = np.asarray(heads, dtype=np.float64).reshape(-1, 2)
        if not len(heads) or not len(self):
            return found[1:]
        h, w = self.labels.shape
        reach = int(np.ceil(within)) + 1
        step = np.arange(-reach, reach + 1)
        x, y = np.clip(heads[:, 0], 0, w - 1), np.clip(heads[:, 1], 0, h - 1)
        columns = np.rint(x).astype(int)[:, None, None] + step[None, None, :]
        rows = np.rint(y).astype(int)[:, None, None] + step[None, :, None]
        rows, columns = np.broadcast_arrays(rows, columns)
        close = np.hypot(columns - x[:, None, None], rows - y[:, None, None]) <= max(within, np.sqrt(0.5))
        close &= (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
        found[self.labels[rows[close], columns[close]]] = True
        return found[1:]


def to_cells(points: npt.ArrayLike, stride: int = 4) -> Floats:
    """Points `(P, 2)`, x and y in pixels, as cells: the cell in row r and column c has its centre at x = c, y = r.

    >>> to_cells([[1.5, 5.5]])
    array([[0., 1.]])
    """
    return (np.asarray(points, dtype=np.float64).reshape(-1, 2) + 0.5) / stride - 0.5


def near_cells(sigma: float | str, stride: int = 4) -> float:
    """How far from a head a region is still its own: two sigmas of the density kernel (in pixels), at least `NEAR`.

    >>> near_cells(4.0), near_cells(8.0), near_cells("adaptive")
    (2.0, 4.0, 2.0)
    """
    return NEAR if isinstance(sigma, str) else max(NEAR, 2 * sigma / stride)


def usual_threshold(mean: npt.NDArray[Any]) -> float:
    """A tenth of the largest density of a frame, the median over frames `(N, h, w)`."""
    peaks = np.asarray(mean).reshape(len(mean), -1).max(1)
    return max(float(_SHARE * np.median(peaks)), float(np.finfo(np.float32).tiny))


def find_regions(
    density: npt.NDArray[Any], std: npt.NDArray[Any] | None = None, *, threshold: float | None = None
) -> Regions:
    """The connected regions of one map above a threshold, with their features.

    Args:
        density: `(h, w)`, people per cell.
        std: its standard deviation, `(h, w)`; without it ratios are 0.
        threshold: people per cell; `usual_threshold` of this map where None.

    >>> import numpy as np
    >>> map = np.zeros((8, 8))
    >>> map[1:3, 1:3], map[6, 6] = 0.25, 0.1
    >>> regions = find_regions(map, threshold=0.05)
    >>> regions.mass.tolist(), regions.isolation.round(2).tolist()
    ([1.0, 0.1], [5.66, 5.66])
    """
    density = np.asarray(density, dtype=np.float64)
    if density.ndim != 2 or (std is not None and np.shape(std) != density.shape):
        raise DataError(
            f"expected one map (h, w), and deviations of the same shape; found {density.shape} and "
            f"{None if std is None else np.shape(std)}. Pass one frame at a time, without its channel axis."
        )
    threshold = usual_threshold(density[None]) if threshold is None else threshold
    if not threshold > 0:
        raise ArgumentError(f"expected a positive threshold, people per cell; found {threshold!r}.")
    from scipy.ndimage import label

    labels, count = label(density > threshold, structure=_EIGHT)

    def total(values: npt.NDArray[Any]) -> Floats:
        sums = np.bincount(labels.ravel(), np.asarray(values, dtype=np.float64).ravel(), count + 1)
        return np.asarray(sums[1:], dtype=np.float64)

    mass = total(density)
    ratio = np.zeros(count) if std is None else total(std) / mass
    return Regions(labels, mass, ratio, _isolation(labels, count))


def _isolation(labels: npt.NDArray[np.int32], count: int) -> Floats:
    """Cells from each region to the nearest other one, edge to edge; the diagonal of the map where it is alone."""
    gaps = np.full(count, float(np.hypot(*labels.shape)))
    if count < 2:
        return gaps
    from scipy.ndimage import binary_erosion
    from scipy.spatial.distance import cdist

    inside = labels > 0
    # The nearest cells of two regions are on their edges.
    edge = np.argwhere(inside & ~binary_erosion(inside, border_value=1))
    owner = labels[edge[:, 0], edge[:, 1]]
    order = np.argsort(owner, kind="stable")
    edge, owner = edge[order].astype(np.float64), owner[order]
    starts = np.searchsorted(owner, np.arange(1, count + 2))
    for k in range(count):
        own = slice(starts[k], starts[k + 1])
        later = edge[starts[k + 1] :]
        if len(later):
            nearest = cdist(edge[own], later).min(0)
            by_region = np.minimum.reduceat(nearest, starts[k + 1 : -1] - starts[k + 1])
            gaps[k] = min(gaps[k], by_region.min())
            gaps[k + 1 :] = np.minimum(gaps[k + 1 :], by_region)
    return gaps
