"""Neighbours: what the rows nearest in feature space tell.

With `z` the features standardised over the reference rows, `Neighbours` is the mean squared distance `|z - z_i|^2` to
the nearest k of them, and `LocalErrors` the mean squared error of the nearest k validation rows. A row is not its own
neighbour. Trees find them in a time that hardly grows with the number of reference rows, of which at most
`_MOST_ROWS`, evenly spread, are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.terms.term import Learned, Rows, Term

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

    def state(self) -> dict[str, Tensor]:
        """See `Term`."""
        return {"points": self.points, "center": self.center, "spread": self.spread}


class Neighbours(Term):
    """Mean squared distance to the nearest reference rows.

    Args:
        k: how many.
    """

    name: ClassVar[str] = "neighbours"
    needs_features: ClassVar[bool] = True

    def __init__(self, k: int = 10, *, own: bool = False, **points: Tensor) -> None:
        if type(own) is not bool:
            raise ArgumentError(f"expected whether the reference rows were the validation rows; found {own!r}.")
        self.k, self._own = _checked(k), own
        self._nearest = _Nearest(**points) if points else None

    def learned_from(self, reference: Iterable[Tensor], own: bool) -> Neighbours:
        """See `Term`."""
        return Neighbours(self.k, own=own, **_Nearest.of(reference).state())

    def values(self, rows: Rows) -> Tensor:
        """See `Term`."""
        return self.distances(rows.features, rows.index)

    def distances(self, features: Tensor, index: Tensor | None = None) -> Tensor:
        """Of rows with these features, `(N,)`; with `index`, their places among the reference rows."""
        if self._nearest is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        whole = self._own and len(self._nearest.points) < _MOST_ROWS
        return self._nearest.query(features, self.k, index if whole else None)[0].mean(1)

    def state(self) -> Learned:
        """See `Term`."""
        return {"k": self.k, "own": self._own, **(self._nearest.state() if self._nearest else {})}


class LocalErrors(Term):
    """Mean squared error of the nearest validation rows.

    Args:
        k: how many.
    """

    name: ClassVar[str] = "local_errors"
    needs_features: ClassVar[bool] = True

    def __init__(self, k: int = 20, *, squares: Tensor | None = None, **points: Tensor) -> None:
        self.k, self._squares = _checked(k), squares
        self._nearest = _Nearest(**points) if points else None

    def learned_from_errors(self, features: Iterable[Tensor], error: Tensor) -> LocalErrors:
        """The same term, after the validation rows' features and their errors `(N, ...)`."""
        found = _Nearest.of(features)
        kept = torch.linspace(0, len(error) - 1, len(found.points)).round().long()
        return LocalErrors(self.k, squares=error[kept].square().cpu().float(), **found.state())

    def values(self, rows: Rows) -> Tensor:
        """See `Term`."""
        if self._nearest is None or self._squares is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        whole = len(self._nearest.points) < _MOST_ROWS
        places = self._nearest.query(rows.features, self.k, rows.index if whole else None)[1]
        return self._squares[places].mean(1).to(rows.mean)

    def state(self) -> Learned:
        """See `Term`."""
        kept = {} if self._squares is None else {"squares": self._squares}
        return {"k": self.k, **kept, **(self._nearest.state() if self._nearest else {})}


def _checked(k: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ArgumentError(f"expected at least 1 neighbour; found {k!r}.")
    return k
