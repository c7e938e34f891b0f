"""Where people were over a time: sums of a source's density maps, one for each step of five minutes."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from latedrop_crowd.console.store import Store

__all__ = ["STEP", "Heat"]

STEP = 300.0  # seconds
_WIDEST = 64  # cells: finer than that nobody sees, and a week of maps stays a few megabytes

Cells = npt.NDArray[np.float64]


class Heat:
    """Adds the maps of one source up; those of finished steps are in the store.

    Args:
        store: what is remembered.
        source: its name.
    """

    def __init__(self, store: Store, source: str) -> None:
        self._store, self._source = store, source
        self._begin, self._frames, self._sum = 0.0, 0, np.zeros((0, 0))

    def add(self, density: Cells, time: float) -> None:
        """Take the map of a frame `(h, w)` at that time."""
        side = -(-density.shape[1] // _WIDEST)
        coarse = density
        for axis in (0, 1):
            coarse = np.add.reduceat(coarse, np.arange(0, coarse.shape[axis], side), axis=axis)
        begin = time // STEP * STEP
        if begin != self._begin or coarse.shape != self._sum.shape:
            self.flush()
            self._begin, self._frames, self._sum = begin, 0, np.zeros(coarse.shape)
        self._sum = self._sum + np.clip(coarse, 0, None)
        self._frames += 1

    def flush(self) -> None:
        """Put the step under way into the store."""
        if self._frames:
            cells = zlib.compress((self._sum / self._frames).astype("<f2").tobytes())
            self._store.add_map(self._source, self._begin, self._frames, self._sum.shape, cells)
        self._frames = 0

    def mean(self, since: float, until: float) -> tuple[Cells, int]:
        """People per cell, the mean over the frames of all steps that a time touches, and how many frames these are.

        Of maps of several sizes, those of the newest size count.
        """
        under_way = self._frames > 0 and since < self._begin + STEP and self._begin <= until
        maps = [(self._sum, self._frames)] if under_way else []
        for row in self._store.maps(self._source, since - STEP, until):
            shape = (row["height"], row["width"])
            cells = np.frombuffer(zlib.decompress(row["cells"]), "<f2").astype(np.float64).reshape(shape)
            maps.append((cells * row["frames"], row["frames"]))
        alike = [(cells, frames) for cells, frames in maps if cells.shape == maps[0][0].shape]
        frames = sum(number for _, number in alike)
        total = np.sum([cells for cells, _ in alike], axis=0) if alike else np.zeros((0, 0))
        return total / max(1, frames), frames
