"""Leverage: how far a row's features lie from those of reference rows, in the directions in which these vary little.

With `h` the features and a 1 appended, d numbers in all, and `G` the mean of `h h'` over the n reference rows,

    t(x) = h' (G + r · tr(G) / d · I)^-1 h,      r = ridge · max(1, d / n)^2.

A linear model fitted to the reference rows has a variance proportional to it. A row that is itself one of the reference
rows is left out: the leverage without it is `(n - 1) / n · t / (1 - t / n)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError
from latedrop.records import record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.term import BatchContext, Term

__all__ = ["Leverage"]

_ROWS = 1024


@record
@dataclass(eq=False)
class Leverage(Term):
    """Leverage of the features that enter the sites.

    Args:
        ridge: added to the mean square of every direction, in units of their average; more where features outnumber
            the reference rows, as most directions then were not seen at all.
        root, rows, own: what it has learned: a root of the inverse above, the number of reference rows, and whether
            they were the validation rows.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> latedrop.calibrate(net, (x, x**2), method=latedrop.Terms(["dropout", Leverage(ridge=0.01)])).predict(
    ...     x
    ... ).std.shape
    torch.Size([64, 1])
    """

    ridge: float = 1e-3
    _: KW_ONLY
    root: StoredTensor | None = field(default=None, repr=False)
    rows: int = 0
    own: bool = False
    name: Literal["leverage"] = "leverage"
    needs_features: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.ridge, bool) or not 0 < self.ridge < 1e6:
            raise ArgumentError(f"expected a ridge above 0; found {self.ridge!r}.")
        if self.rows < 0:
            raise ArgumentError(f"expected how many reference rows there were; found {self.rows!r}.")
        if self.root is not None and (self.root.dim() != 2 or self.root.shape[0] != self.root.shape[1]):
            raise ArgumentError(f"expected a square root of a matrix; found shape {tuple(self.root.shape)}.")

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
        ridge = self.ridge * max(1.0, len(mean) / count) ** 2
        mean.diagonal().add_(ridge * float(mean.diagonal().mean()))
        root = torch.linalg.inv(torch.linalg.cholesky(mean))
        return Leverage(self.ridge, root=root.contiguous(), rows=count, own=own)

    def values(self, rows: BatchContext) -> Tensor:
        """See `Term`."""
        if self.root is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        # In double precision: with more features than rows, a row's own share of its leverage is nearly all of it.
        features = rows.features
        root = self.root.to(features.device, torch.float64)
        weights, last = root[:, :-1].T, root[:, -1]  # the last feature is a one
        # On a CPU a few rows at a time, which stay in its cache.
        parts = features.split(_ROWS if features.device.type == "cpu" else max(1, len(features)))
        value = torch.cat([torch.addmm(last, part.double(), weights).square_().sum(1) for part in parts])
        if self.own and rows.index is not None:
            value = value * (1 - 1 / self.rows) / (1 - value / self.rows).clamp_min(1e-9)
        return value


def _with_one(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)
