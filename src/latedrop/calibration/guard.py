"""Compute the guard: how far a row lies outside the reference rows, and how its variance grows with that.

    variance(x) = g(x) · fitted(x) + (g(x) - 1) · constant,      g(x) = max(1, novelty(x)),

where the novelty is the leverage of a row divided by the 95 % quantile of the reference rows (the largest of several
kinds), and the constant is the mean squared error of the validation rows. The variance of the targets bounds this
growth. For classes the temperature grows with the novelty, see `latedrop.calibration.fit_classes`.
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
    """Measure how novel rows are, and widen the variance of those unlike the reference rows.

    Attributes:
        terms: names of the terms whose values measure novelty.
        limits: 95 % quantile of each term over the reference rows, one number per output or one for all.
        constants: mean squared error of the validation rows, one per output or one for all; empty for classes.
        centres: mean of the validation targets, likewise; empty if there is no ceiling.
        spreads: variance of the validation targets, likewise.
        grows: False if only the novelty is measured, and the variance stays as it is.
        most: largest factor, used with few validation rows, which hardly show what is usual; None if there is none.
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
        """Return the novelty `(N,)`: below 1 for 95 % of the reference rows, infinite if a value overflows."""
        novelty = self.ratio([rows.values_of(terms[name]).reshape(len(rows.mean), -1) for name in self.terms])
        return novelty if being_traced() else novelty.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def ratio(self, values: Sequence[Tensor]) -> Tensor:
        """Divide the values `(N, K)` of the terms by their limits; return the largest ratio of each row, `(N,)`."""
        pairs = zip(values, self.limits, strict=True)
        return torch.cat([value / constants(limit).to(value) for value, limit in pairs], 1).amax(1)

    def grown(self, variance: Tensor, novelty: Tensor, mean: Tensor, without: Tensor | None = None) -> Tensor:
        """Widen a variance `(N, ...)` by the novelty `(N,)` of its rows.

        Above g = 1 a forest extrapolates, so the larger of the variance and of `without`, the variance of a fit without
        forest, is widened. The ceiling is `spread + (mean - centre)^2`: the mean squared error of the prediction if the
        target was drawn from the validation targets. The result is also at least `base / g`, so that the ceiling makes
        no jump where g passes 1, and it does not fall below the constant if `base` was above it.
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
    """Return the weighted 95 % quantile of the leverage."""
    leverage = leverage.double().clamp_min(1e-30)
    if weights is None:
        return float(np.quantile(leverage.numpy(), _INSIDE, method="higher"))
    ordered, order = leverage.sort()
    counts = weights[order]
    below = counts.cumsum(0) - counts < _INSIDE * (len(counts) - 1)
    return float(ordered[min(int(below.sum()), len(ordered) - 1)])
