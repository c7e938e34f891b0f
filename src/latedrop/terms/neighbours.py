"""Neighbours: what the rows nearest in feature space tell.

With `z` the features standardised over the reference rows, `Neighbours` is the mean squared distance `|z - z_i|^2` to
the nearest k of them, and `LocalErrors` the mean squared error of the nearest k validation rows. A row is not its own
neighbour. Trees find them in a time that hardly grows with the number of reference rows, of which at most
`_MOST_ROWS`, evenly spread, are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.records import record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.term import BatchContext, Term

__all__ = ["LocalErrors", "Neighbours"]

_MOST_ROWS = 20_000
_FAR = 1e17  # whose square is a number, too


class _Nearest:
    """Reference rows in standardised feature space, with a tree to find the nearest."""

    def __init__(self, points: Tensor, center: Tensor, spread: Tensor) -> None:
        self.points, self.center, self.spread = points, center, spread

    @classmethod
    def of(cls, reference: Iterable[Tensor]) -> _Nearest:
        features = torch.cat([part.cpu().float() for part in reference])
        if len(features) < 3:
            raise DataError(f"expected at least 3 reference rows for neighbours; found {len(features)}.")
        spread, center = torch.std_mean(features, 0)
        spread = torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
        kept = torch.linspace(0, len(features) - 1, min(len(features), _MOST_ROWS)).round().long()
        return cls((features[kept] - center) / spread, center, spread)

    def query(self, features: Tensor, k: int, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """Squared distances and places of the nearest `(N, k)`; a row at its own `index` is left out."""
        z = ((features.cpu().float() - self.center) / self.spread).nan_to_num(nan=_FAR).clamp(-_FAR, _FAR)
        k = min(k, len(self.points) - (index is not None))
        distances, places = self._tree.query(z.numpy(), k=k + (index is not None))
        distances, places = (np.asarray(part).reshape(len(z), -1) for part in (distances, places))
        if index is not None:
            own = places == index.cpu().numpy()[:, None]
            own[~own.any(1), -1] = True  # equal rows may hide it: then the farthest goes
            distances, places = (part[~own].reshape(len(z), k) for part in (distances, places))
        return torch.as_tensor(distances).square().to(features), torch.as_tensor(places)

    @cached_property
    def _tree(self) -> Any:
        try:
            from scipy.spatial import cKDTree
        except ImportError as error:
            raise LatedropError(
                "expected scipy for neighbours; it is not installed. Run: pip install 'latedrop[neighbours]'"
            ) from error
        return cKDTree(self.points.numpy())


@dataclass(eq=False)
class _Looking(Term):
    """A term that looks for the nearest `k` of some rows, which are its `points` in standardised feature space."""

    k: int
    _: KW_ONLY
    points: StoredTensor | None = field(default=None, repr=False)
    center: StoredTensor | None = field(default=None, repr=False)
    spread: StoredTensor | None = field(default=None, repr=False)
    needs_features: ClassVar[bool] = True
    is_lookup: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ArgumentError(f"expected at least 1 neighbour; found {self.k!r}.")
        shapes = [None if part is None else tuple(part.shape) for part in (self.points, self.center, self.spread)]
        if shapes != [None] * 3 and (not shapes[0] or shapes[0][0] < 1 or shapes[1:] != [shapes[0][1:]] * 2):
            raise ArgumentError(f"expected points (n, d) with their center and spread (d,); found {shapes}.")

    @cached_property
    def nearest(self) -> _Nearest:
        """The points, with a tree to find them by."""
        if self.points is None or self.center is None or self.spread is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        return _Nearest(self.points, self.center, self.spread)


@record
@dataclass(eq=False)
class Neighbours(_Looking):
    """Mean squared distance to the nearest reference rows.

    Args:
        k: how many.
        own: whether the reference rows were the validation rows.
        points, center, spread: what it has learned.
    """

    k: int = 10
    _: KW_ONLY
    own: bool = False
    name: Literal["neighbours"] = "neighbours"

    def learned_from(self, reference: Iterable[Tensor], own: bool) -> Neighbours:
        """See `Term`."""
        found = _Nearest.of(reference)
        return replace(self, own=own, points=found.points, center=found.center, spread=found.spread)

    def values(self, rows: BatchContext) -> Tensor:
        """See `Term`."""
        return self.distances(rows.features, rows.index)

    def distances(self, features: Tensor, index: Tensor | None = None) -> Tensor:
        """Of rows with these features, `(N,)`; with `index`, their places among the reference rows."""
        whole = self.own and len(self.nearest.points) < _MOST_ROWS
        return self.nearest.query(features, self.k, index if whole else None)[0].mean(1)


@record
@dataclass(eq=False)
class LocalErrors(_Looking):
    """Mean squared error of the nearest validation rows.

    Args:
        k: how many.
        squares: `(n, ...)`, the squared errors of the validation rows that it has learned.
        points, center, spread: where these lie.
    """

    k: int = 20
    _: KW_ONLY
    squares: StoredTensor | None = field(default=None, repr=False)
    name: Literal["local_errors"] = "local_errors"
    needs_errors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.squares is not None and self.squares.shape[:1] != (
            () if self.points is None else self.points.shape[:1]
        ):
            raise ArgumentError(f"expected a squared error for each of the points; found {tuple(self.squares.shape)}.")

    def learned_from_errors(self, rows: BatchContext, error: Tensor) -> LocalErrors:
        """See `Term`."""
        found = _Nearest.of([rows.features])
        kept = torch.linspace(0, len(error) - 1, len(found.points)).round().long()
        squares = error[kept].square().cpu().float()
        return replace(self, squares=squares, points=found.points, center=found.center, spread=found.spread)

    def values(self, rows: BatchContext) -> Tensor:
        """See `Term`."""
        whole = len(self.nearest.points) < _MOST_ROWS
        places = self.nearest.query(rows.features, self.k, rows.index if whole else None)[1]
        if self.squares is None:
            raise DataError("expected a term that has seen the validation errors; found one that has not.")
        return self.squares[places].mean(1).to(rows.mean)
