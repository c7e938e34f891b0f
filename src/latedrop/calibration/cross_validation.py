"""Rows that a fit has not seen: folds, standard errors over rows, and which of several candidates leads.

Candidates are compared by a score of every row, from fits to the rows of the other folds. One is in use unless another
leads by more than a standard error of the difference, and by 0.001 nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from latedrop.metrics.entries import average
from latedrop.records import Limits, record

__all__ = [
    *("LEAST_GAIN", "Candidate", "CrossValidated", "CrossValidatedClasses", "CrossValidation", "crossed"),
    *("effective_rows", "leading", "share_error", "standard_error"),
]

LEAST_GAIN = 1e-3
"""Nats by which a candidate has to lead, or nothing is added."""
_FOLDS = 10
_LEAST = 1e-4  # of the mean squared error


@record
@dataclass(frozen=True)
class Candidate:
    """One of the models that were compared.

    Attributes:
        name: what it is made of.
        gain: nats by which it is better than the trivial answer, on rows of other folds.
        gain_error: standard error of that.
    """

    name: str
    gain: float
    gain_error: Annotated[float, Limits(0)]


@dataclass(frozen=True)
class CrossValidated:
    """The validation rows, each predicted by a fit to the rows of other folds.

    These, and not `uq.predict(x_val)`, are what a further rescaling may be fitted to: no fit has seen its own row.

    Attributes:
        mean: `(N, ...)`, in the original unit of the targets, as all of these.
        variance: `(N, ...)`, with the scale of least NLL.
        target: `(N, ...)`.
    """

    mean: Tensor
    variance: Tensor
    target: Tensor

    @property
    def errors(self) -> Tensor:
        """Return standardised errors, `(target - mean) / std`, `(N, ...)`."""
        return (self.target - self.mean) / self.variance.sqrt()

    def __repr__(self) -> str:
        rms = float(self.errors.square().mean().sqrt())
        return f"CrossValidated of {len(self.mean)} rows, mean {tuple(self.mean.shape)}, rms of errors {rms:.3g}"


@dataclass(frozen=True)
class CrossValidatedClasses:
    """The validation rows of a classifier, each predicted by a fit to the rows of other folds.

    Attributes:
        probabilities: `(N, K)`; of maps, those of the pixels that were used.
        labels: `(N,)`, the true classes.
    """

    probabilities: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        right = float((self.probabilities.argmax(1) == self.labels).double().mean())
        return f"CrossValidatedClasses: probabilities {tuple(self.probabilities.shape)}, accuracy {right:.3g}"


@dataclass(frozen=True)
class CrossValidation:
    """Which rows are left out together, and what each row counts.

    Attributes:
        weights: `(N,)`; None where all count the same.
        groups: `(N,)`, rows of one number are alike, as the pixels of an image: they are left out together.
        count: how many folds there are at most.
    """

    weights: Tensor | None = None
    groups: Tensor | None = None
    count: int = _FOLDS

    @classmethod
    def of_runs(cls, rows: int, weights: Tensor | None = None) -> CrossValidation:
        """Leave out runs of a tenth of the rows each, where neighbours are alike."""
        return cls(weights, torch.arange(rows) * min(_FOLDS, rows) // max(1, rows))

    def at(self, rows: Any) -> Tensor | None:
        """Return the weights of some rows."""
        return None if self.weights is None else self.weights[rows]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over rows `(N, ...)`, each counted as often as its weight says."""
        if self.weights is None:
            return values.mean(0)
        weights = self.weights.to(values)
        total: Tensor = torch.tensordot(weights, values, 1)
        return total / weights.sum()

    def folds(self, rows: int) -> Tensor:
        """Return a fold for each row, `(rows,)`: every tenth row, or group, of a fixed shuffle."""
        if self.groups is not None:
            members, place = self.groups.unique(return_inverse=True)
            return replace(self, groups=None).folds(len(members))[place]
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
        fold = torch.empty(rows, dtype=torch.long)
        fold[order] = torch.arange(rows) % min(_FOLDS, rows) % self.count
        return fold

    def splits(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the places of the rows to fit to, and of those that are left out, fold by fold."""
        fold = self.folds(rows)
        for number in fold.unique().tolist():
            yield (fold != number).nonzero()[:, 0], (fold == number).nonzero()[:, 0]

    def worth(self, rows: int) -> float:
        """Return how many independent rows of one weight tell as much: the number of groups, if there are any."""
        return effective_rows(self.weights, rows) if self.groups is None else float(len(self.groups.unique()))

    def candidate(self, name: str, gain: Tensor) -> Candidate:
        """Return a candidate with its gain, the mean over rows `(N,)`."""
        return Candidate(name, float(self.mean(gain)), standard_error(gain, self))


def leading(scores: Mapping[str, Tensor], home: str, left: CrossValidation, among: Iterable[str] | None = None) -> str:
    """Return the candidate in use: `home`, unless another leads by more than a standard error, and by `LEAST_GAIN`.

    `scores` `(N,)` are large where a candidate is good; `among` are those that may be taken.
    """

    def lead(name: str) -> float:
        ahead = scores[name] - scores[home]
        return float(left.mean(ahead)) - max(standard_error(ahead, left), LEAST_GAIN) if bool(ahead.any()) else 0.0

    return max(scores if among is None else among, key=lead)


def standard_error(values: Tensor, left: CrossValidation | None = None) -> float:
    """Return the standard error of the weighted mean of `(N,)`.

    It is `sqrt(m / (m - 1) sum_g (sum_{i in g} w_i (x_i - mean))^2) / sum w`, with m groups g; each row is one of its
    own unless rows are grouped.
    """
    left, values = left or CrossValidation(), values.double()
    weights = torch.ones_like(values) if left.weights is None else left.weights.to(values)
    off = weights * (values - average(values, weights))
    if left.groups is not None:
        members, place = left.groups.unique(return_inverse=True)
        off = off.new_zeros(len(members)).index_add_(0, place, off)
    if len(off) < 2:
        return math.inf
    return float((off.square().sum() * len(off) / (len(off) - 1)).sqrt() / weights.sum())


def effective_rows(weights: Tensor | None, rows: int) -> float:
    """Return how many rows of one weight tell as much: `(sum w)^2 / sum w^2`."""
    return float(rows) if weights is None else float(weights.sum().square() / weights.square().sum())


def share_error(values: Tensor, left: CrossValidation | None = None) -> float:
    """Return the standard error of the mean of shares `(N,)`; where all are 0 or 1, as if one of two more differed."""
    left = left or CrossValidation()
    rows, share = left.worth(len(values)), float(left.mean(values))
    if share in (0.0, 1.0):
        return math.sqrt((rows + 1) / rows) / (rows + 2)
    return standard_error(values, left)


def crossed(
    error: Tensor,
    fit: Callable[[Tensor], Callable[[Tensor], Tensor]],
    per_output: bool,
    left: CrossValidation,
) -> tuple[Tensor, Tensor]:
    """Return variances and constants `(N, ...)` of every row, from fits to the rows of the other folds.

    `fit` is given the places of the rows to fit to, and returns a function from places to variances. With `per_output`
    each index of axis 1 has a constant of its own. Where no row of the other folds has an error, the constant is
    a small number, and the variance too.
    """
    # One mean for each row, of all of its entries or of those of each output.
    axes = tuple(range(2 if per_output else 1, error.dim()))
    squares = error.square().mean(axes, keepdim=True) if axes else error.square()
    variance, constant = torch.empty_like(error), torch.empty_like(error)
    least = _LEAST * squares.mean(0)
    for rest, out in left.splits(len(error)):
        size = replace(left, weights=left.at(rest)).mean(squares[rest])
        constant[out] = torch.maximum(size, least).expand_as(constant[out])
        variance[out] = fit(rest)(out).to(variance) if bool(size.all()) else constant[out]
    return variance, constant
