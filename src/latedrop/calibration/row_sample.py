"""Which validation rows are kept, of more than memory should hold: an even choice, whatever the order and the batches.

A row is kept at level `l` where the last `l` bits of a hash of its number are 0. Whenever more than `most` rows are
kept, the level rises by one, and half of them go. So between half of `most` and `most` rows are kept of any number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.dropout.masks import STEP, mixed

__all__ = ["MOST_ROWS", "RowSample"]

MOST_ROWS = 2**18
"""A variance that is fitted to half as many rows has a standard error of 0.4 %."""


class RowSample:
    """Chooses rows as they come.

    Args:
        most: rows that are kept; None keeps all.

    >>> sample = RowSample(100)
    >>> for _ in range(10):
    ...     chosen, stay = sample.add(60), sample.halved()
    >>> 50 <= sample.kept <= 100
    True
    """

    def __init__(self, most: int | None = MOST_ROWS) -> None:
        self._most, self._mask, self._next = most, 0, 0
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self.kept = 0

    def add(self, rows: int) -> list[int] | None:
        """Which of the next rows are kept, by their places among these; None: all."""
        if self._most is None:
            return None
        found = mixed((np.arange(self._next, self._next + rows, dtype=np.uint64) + np.uint64(1)) * STEP)
        self._next += rows
        places = np.flatnonzero(found & np.uint64(self._mask) == 0)
        self._hashes.append(found[places])
        self.kept += len(places)
        return None if self._mask == 0 else places.tolist()

    def halved(self) -> Tensor | None:
        """Which of all rows that were kept stay, where these are too many: `(kept,)` of bool."""
        if self._most is None or self.kept <= self._most:
            return None
        hashes, stay = np.concatenate(self._hashes), np.ones(self.kept, dtype=bool)
        while stay.sum() > self._most:
            self._mask = 2 * self._mask + 1
            stay = hashes & np.uint64(self._mask) == 0
        self._hashes, self.kept = [hashes[stay]], int(stay.sum())
        return torch.from_numpy(stay)
