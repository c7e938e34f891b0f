"""Outputs of the validation rows, collected batch by batch in bounded memory.

Of very many rows an even choice is kept, whatever their order and the batches (`RowSample`): a row is kept at level `l`
where the last `l` bits of a hash of its number are 0. Whenever more than `most` rows are kept, the level rises by one,
and half of them go.

Of large outputs not every entry is kept (`Entries`): neighbouring pixels say much the same, and a fit of a few
coefficients needs no more than a million errors. Positions are kept by chance, the same ones in every row; whenever the
entries are more than `MOST`, half of the positions go. So memory grows neither with the size of maps nor with their
number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.calibration.targets import check_shapes
from latedrop.dropout.masks import STEP, mixed
from latedrop.errors import DataError

__all__ = ["MOST", "MOST_ROWS", "Entries", "RowSample"]

MOST = 2**20
MOST_ROWS = 2**15
"""A variance that is fitted to half as many rows has a standard error of 1 %."""


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


class Entries:
    """Columns of outputs, `(N, K, ...)` or `(N, ...)`, by name.

    Args:
        shape: of one row's output.
        axis: of the first position in a column: 2 where axis 1 holds outputs, all of which are kept, else 1.
        most: entries of one column; None keeps all.

    >>> entries = Entries((20, 30), axis=1, most=1000)
    >>> for _ in range(3):
    ...     entries.add({"mean": torch.zeros(4, 20, 30)})
    >>> entries["mean"].shape
    torch.Size([12, 75])
    """

    def __init__(self, shape: tuple[int, ...], axis: int, most: int | None = MOST) -> None:
        self.shape = shape
        self._axis, self._most = axis, most
        self._parts: dict[str, list[Tensor]] = {}
        self._count = torch.Size(shape[axis - 1 :]).numel()
        self._order: Tensor | None = None  # of the positions, once not all of them are kept
        self._held = 0

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """The next rows, of all columns."""
        if self._parts and set(columns) != set(self._parts):
            raise DataError(
                "expected terms to give the same columns for every batch; found "
                f"{sorted(self._parts)} and {sorted(columns)}."
            )
        for name, values in columns.items():
            check_shapes([self.shape, values.shape[1:]])
            self._parts.setdefault(name, []).append(self.of(values).cpu())
        self._held += self._parts[name][-1].numel()
        while self._most is not None and self._held > self._most and self._count > 1:
            self._halve()

    def keep(self, rows: Tensor) -> None:
        """Let go of all rows but these, `(N,)` of bool."""
        before = len(rows)
        self._parts = {name: [torch.cat(parts)[rows]] for name, parts in self._parts.items()}
        self._held = self._held * int(rows.sum()) // before

    def of(self, values: Tensor) -> Tensor:
        """What is kept of columns like those that were added: themselves, where all is."""
        if self._order is None:
            return values
        return values.flatten(self._axis)[..., self._order[: self._count].to(values.device)]

    def like(self) -> Entries:
        """Empty ones, that keep the same entries however many rows come."""
        found = Entries(self.shape, self._axis, most=None)
        found._count, found._order = self._count, self._order
        return found

    def _halve(self) -> None:
        kept, self._count = self._count, self._count // 2
        if self._order is None:
            self._order = torch.randperm(kept, generator=torch.Generator().manual_seed(kept))
            self._parts = {name: [self.of(part) for part in parts] for name, parts in self._parts.items()}
        else:
            self._parts = {
                name: [part[..., : self._count].clone() for part in parts] for name, parts in self._parts.items()
            }
        self._held = self._held * self._count // kept

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(self._parts[name])

    def items(self) -> list[tuple[str, Tensor]]:
        """Names and columns, in their order."""
        return [(name, self[name]) for name in self._parts]
