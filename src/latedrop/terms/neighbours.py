"""Neighbours: how far the nearest reference rows are in feature space.

With `z` the features standardised over the reference rows, `t(x)` is the mean squared distance `|z - z_i|^2` to the
nearest k of them. A row is not its own neighbour. Trees find them in a time that hardly grows with the number of
reference rows, of which at most `_MOST_ROWS`, evenly spread, are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError
from latedrop.records import record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.term import BatchContext, Term

__all__ = ["Neighbours"]

_MOST_ROWS = 20_000
_FAR = 1e17  # whose square is a number, too


@record
@dataclass(eq=False)
class Neighbours(Term):
    """Mean squared distance to the nearest reference rows.

    Args:
        k: how many.
        own: whether the reference rows were the validation rows.
        points, center, spread: what it has learned: rows in standardised feature space.
    """

    k: int = 10
    _: KW_ONLY
    own: bool = False
    points: StoredTensor | None = field(default=None, repr=False)
    center: StoredTensor | None = field(default=None, repr=False)
    spread: StoredTensor | None = field(default=None, repr=False)
    name: Literal["neighbours"] = "neighbours"
    needs_features: ClassVar[bool] = True
    is_lookup: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ArgumentError(f"expected at least 1 neighbour; found {self.k!r}.")
        shapes = [None if part is None else tuple(part.shape) for part in (self.points, self.center, self.spread)]
        if shapes != [None] * 3 and (not shapes[0] or shapes[0][0] < 1 or shapes[1:] != [shapes[0][1:]] * 2):
            raise ArgumentError(f"expected points (n, d) with their center and spread (d,); found {shapes}.")

    def learned_from(self, reference: Iterable[Tensor], own: bool) -> Neighbours:
        """Return the term with the reference rows, standardised."""
        features = torch.cat([part.cpu().float() for part in reference])
        if len(features) < 3:
            raise DataError(f"expected at least 3 reference rows for neighbours; found {len(features)}.")
        spread, center = torch.std_mean(features, 0)
        spread = torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
        places = torch.linspace(0, len(features) - 1, min(len(features), _MOST_ROWS)).round().long()
        return replace(self, own=own, points=(features[places] - center) / spread, center=center, spread=spread)

    def values(self, rows: BatchContext) -> Tensor:
        """Return the mean squared distance to the nearest reference rows, `(N,)`."""
        return self.distances(rows.features, rows.index)

    def distances(self, features: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the distance of rows with these features, `(N,)`; `index` are their places among the reference."""
        if self.points is None or self.center is None or self.spread is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        z = ((features.cpu().float() - self.center) / self.spread).nan_to_num(nan=_FAR).clamp(-_FAR, _FAR)
        alone = index is not None and self.own and len(self.points) < _MOST_ROWS  # a row has a place of its own
        k = min(self.k + alone, len(self.points))
        distances, places = (np.asarray(part).reshape(len(z), -1) for part in self._tree.query(z.numpy(), k=k))
        if alone:
            same = places == index.cpu().numpy()[:, None]  # type: ignore[union-attr]
            same[~same.any(1), -1] = True  # equal rows may hide it: then the farthest goes
            distances = distances[~same].reshape(len(z), k - 1)
        return torch.as_tensor(distances).square().to(features).mean(1)

    @cached_property
    def _tree(self) -> Any:
        from scipy.spatial import cKDTree

        assert self.points is not None
        return cKDTree(self.points.numpy())
