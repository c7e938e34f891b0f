"""Leverage: how far a row's features lie from those of reference rows, in the directions in which these vary little.

With `h` the features and a 1 appended, d numbers in all, and `G` the mean of `h h'` over the n reference rows,

    t(x) = h' (G + ridge · tr(G) / d · I)^-1 h.

A linear model fitted to the reference rows has a variance proportional to it. A row that is itself one of the reference
rows is left out: the leverage without it is `(n - 1) / n · t / (1 - t / n)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop.terms.term import Learned, Rows, Term

__all__ = ["Leverage"]


class Leverage(Term):
    """Leverage of the features that enter the sites.

    Args:
        ridge: added to the mean square of every direction, in units of their average.
    """

    name: ClassVar[str] = "leverage"
    needs_features: ClassVar[bool] = True

    def __init__(self, ridge: float = 1e-3, *, root: Tensor | None = None, rows: int = 0, own: bool = False) -> None:
        self.ridge = ridge
        self._root, self._rows, self._own = root, rows, bool(own)

    def learned_from(self, reference: Iterable[Tensor], own: bool) -> Leverage:
        """See `Term`."""
        total: Tensor | None = None
        count = 0
        for features in reference:
            h = _with_one(features).double()
            part = h.T @ h
            total = part if total is None else total + part
            count += len(h)
        if total is None or count < 2:
            raise DataError(f"expected at least 2 reference rows; found {count}.")
        mean = total / count
        mean.diagonal().add_(self.ridge * float(mean.diagonal().mean()))
        root = torch.linalg.inv(torch.linalg.cholesky(mean))
        return Leverage(self.ridge, root=root.contiguous(), rows=count, own=own)

    def values(self, rows: Rows) -> Tensor:
        """See `Term`."""
        if self._root is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        # In double precision: with more features than rows, a row's own share of its leverage is nearly all of it.
        h = _with_one(rows.features).double()
        value = (h @ self._root.to(h).T).square().sum(1)
        if self._own and rows.index is not None:
            value = value * (1 - 1 / self._rows) / (1 - value / self._rows).clamp_min(1e-9)
        return value

    def state(self) -> Learned:
        """See `Term`."""
        return {"ridge": self.ridge, "root": self._root, "rows": self._rows, "own": self._own}


def _with_one(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)
