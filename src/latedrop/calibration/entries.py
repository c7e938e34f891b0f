"""Outputs of the validation rows, collected batch by batch in bounded memory.

Of large outputs not every entry is kept: neighbouring pixels say much the same, and a fit of a few coefficients needs
no more than a million errors. Positions are kept by chance, the same ones in every row; whenever the entries are more
than `MOST`, half of the positions go. So memory grows neither with the size of maps nor with their number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from latedrop.calibration.targets import check_shapes
from latedrop.errors import DataError

__all__ = ["MOST", "Entries"]

MOST = 2**20


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
