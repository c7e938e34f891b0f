"""The guard: how far a row lies outside the reference rows, and what that does to a variance.

    variance(x) = g(x) · fitted(x) + (g(x) - 1) · constant,      g(x) = max(1, novelty(x)),

where the novelty is the leverage of a row in units of what 95 % of the reference rows stay below, the largest of
several kinds, and the constant is the mean squared error of the validation rows. The variance grows no further than
what the targets alone say. Of classes the novelty makes the temperature grow, see `latedrop.calibration.fit_classes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.data.arrays import constants
from latedrop.records import Limits, match, record
from latedrop.terms import BatchContext, Term
from latedrop.torch_private import being_traced

__all__ = ["LARGEST", "Guard", "upper_quantile"]

LARGEST = torch.finfo(torch.float32).max
"""The novelty of rows beyond; none is larger."""
_INSIDE = 0.95
_Amounts: TypeAlias = tuple[Annotated[float, Limits(0, 1e30)], ...]
_Limits: TypeAlias = Annotated[tuple[Annotated[float, Limits(1e-30, 1e30)], ...], Limits(1)]


@record
@dataclass(frozen=True)
class Guard:
    """Tells how novel rows are, and lets the variance grow for those unlike the reference rows.

    Attributes:
        terms: the names of those whose values tell.
        limits: for each of them what 95 % of the reference rows stay below, one number per output or one for all.
        constants: the validation rows' mean squared error, one per output or one for all; empty of classes.
        centres: the mean of the validation targets, likewise; empty where there is no ceiling.
        spreads: their variance.
        grows: False where rows are only told apart, and the variance stays.
        most: the largest factor; None where there is none. Few validation rows cannot tell what is usual.
    """

    terms: Annotated[tuple[str, ...], Limits(1)]
    limits: tuple[_Limits, ...]
    constants: _Amounts = ()
    centres: tuple[Annotated[float, Limits(-1e30, 1e30)], ...] = ()
    spreads: _Amounts = ()
    grows: bool = True
    most: Annotated[float, Limits(1, 1e30)] | None = None

    @classmethod
    def of(cls, terms: Sequence[str], leverage: Tensor, usual: Tensor | None, weights: Tensor | None = None) -> Guard:
        """Set the limits from the leverage of reference rows, `(m, terms, K)`, or else of validation rows."""
        values, counts = (leverage, weights) if usual is None else (usual, None)
        limits = (tuple(upper_quantile(v, counts) for v in each.unbind(1)) for each in values.unbind(1))
        return cls(tuple(terms), tuple(limits))

    def checked(self) -> Guard:
        """Check lengths against each other after reading."""
        match(len(set(self.terms)) == len(self.terms), "terms", "different names", self.terms)
        match(len(self.limits) == len(self.terms), "limits", f"{len(self.terms)} rows, as terms", self.limits)
        match(len(self.spreads) == len(self.centres), "spreads", "as many as centres", self.spreads)
        return self

    def novelty(self, rows: BatchContext, terms: Mapping[str, Term]) -> Tensor:
        """Return novelty `(N,)`: below 1 for rows like 95 % of the reference rows, infinite beyond all numbers."""
        novelty = self.ratio([rows.values_of(terms[name]).reshape(len(rows.mean), -1) for name in self.terms])
        return novelty if being_traced() else novelty.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def ratio(self, values: Sequence[Tensor]) -> Tensor:
        """Return `(N,)`, the largest of all values `(N, K)` of the terms in units of their limits."""
        pairs = zip(values, self.limits, strict=True)
        return torch.cat([value / constants(limit).to(value) for value, limit in pairs], 1).amax(1)

    def grown(self, variance: Tensor, novelty: Tensor, mean: Tensor, without: Tensor | None = None) -> Tensor:
        """Return the variance `(N, ...)` of rows with this novelty, `(N,)`, and this mean.

        A row far outside is no narrower than a constant would be there. Where g is above 1 a forest knows nothing, so
        that the larger of the variance and of `without`, that of a fit without it, grows. It becomes no wider than
        `spread + (mean - centre)^2`, how far off the prediction is on average if the target is any of those known,
        unless it was at the limit: divided by g, the variance is about what it was there, so that it does not jump.
        Nor is it made smaller than the constant.
        """
        if not self.grows:
            return variance
        factor = novelty.clamp(1, self.most).reshape(-1, *[1] * (variance.dim() - 1)).to(variance)
        along = [-1, *[1] * (variance.dim() - 2)]
        constant = constants(self.constants).to(variance).reshape(along)
        base = variance if without is None else torch.where(factor > 1, torch.maximum(variance, without), variance)
        grown = factor * base + (factor - 1) * constant
        if not self.centres:
            return grown
        centre, spread = (constants(part).to(variance).reshape(along) for part in (self.centres, self.spreads))
        ceiling = spread + (mean.to(variance) - centre).square()
        least = torch.maximum(base / factor, torch.minimum(base, constant.expand_as(base)))
        return torch.minimum(grown, torch.maximum(least, ceiling))


def upper_quantile(leverage: Tensor, weights: Tensor | None = None) -> float:
    """Return the leverage that rows of 95 % of the weight stay below."""
    leverage = leverage.double().clamp_min(1e-30)
    if weights is None:
        return float(np.quantile(leverage.numpy(), _INSIDE, method="higher"))
    ordered, order = leverage.sort()
    counts = weights[order]
    below = counts.cumsum(0) - counts < _INSIDE * (len(counts) - 1)
    return float(ordered[min(int(below.sum()), len(ordered) - 1)])
