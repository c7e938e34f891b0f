"""Telling strange rows from usual ones by scores: a p-value for each row, and a combination of several scores.

With `s` the score of a new row, large for strange ones, and `u_1, ..., u_n` those of rows known to be usual,

    p = (1 + #{i: u_i >= s}) / (n + 1),

where scores that differ by rounding alone are equal: the same row has other last bits in another batch. If the row is
exchangeable with those, `P(p <= a) <= a`: whoever raises an alarm where `p <= a` has at most that share of false ones
(conformal p-values; Vovk et al. 2005, Bates et al. 2023, "Testing for outliers with conformal p-values").

Several scores are put on one scale, `q = normal quantile of the score's rank among usual rows`. Their combination is
the largest `q`: a row is strange if any score says so. Where strange rows are known it is a sum with weights
`w = S^-1 d`, none below 0, with `S` the mean of the covariances of `q` over usual and over strange rows, and `d` how
far their means are apart (Fisher 1936). Ranks and weights come from other usual rows than p-values do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError
from latedrop.metrics import auroc
from latedrop.metrics.classes import aupr, fpr_at
from latedrop.records import Limits, Via, match, record
from latedrop.stored_tensors import StoredTensor

__all__ = ["COMBINED", "Combination", "Detection", "DetectorScores", "Rising", "p_values", "separation"]

COMBINED = "combined"
"""The name of the combination of scores."""
_SHRINK = 0.1
_LEAST = 20
_ROUNDING = 1e-5  # of a score: what is less is the arithmetic of batches, not the row


def _rising(values: Tensor) -> Tensor:
    match(values.dim() == 1 and len(values) > 0, "shape", "(n,)", tuple(values.shape))
    match(not bool((values.diff() < 0).any()), "data", "numbers in rising order", "others")
    return values


Rising: TypeAlias = Annotated[Tensor, Via(StoredTensor, _rising)]
"""Scores `(n,)` in rising order."""


def p_values(usual: Tensor, scores: Tensor) -> Tensor:
    """`(N,)` for scores `(N,)`, against `usual` `(n,)` in rising order.

    >>> p_values(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 9.0]))
    tensor([1.0000, 0.7500, 0.2500], dtype=torch.float64)
    """
    s = scores.to(usual)
    below = torch.searchsorted(usual.contiguous(), (s - _rounding(usual, s)).contiguous())
    return (1 + len(usual) - below).double() / (len(usual) + 1)


def _rounding(usual: Tensor, scores: Tensor) -> Tensor:
    """`(N,)`, by how much equal scores may differ."""
    return _ROUNDING * torch.maximum(scores.abs().clamp_max(1e30), usual.abs().median())


def check_usual(rows: int) -> None:
    """`DataError` of too few usual rows."""
    if rows < _LEAST:
        raise DataError(f"expected at least {_LEAST} usual rows for a detector, and better a thousand; found {rows}.")


@record
@dataclass(frozen=True)
class Combination:
    """Several scores as one.

    Attributes:
        usual: of every score, those of usual rows in rising order, `(n,)`.
        weights: of every score, none below 0; they sum to 1. None: the largest counts.
    """

    usual: dict[str, Rising] = field(repr=False)
    weights: dict[str, Annotated[float, Limits(0)]] | None = None

    def checked(self) -> Combination:
        """Check names against each other after reading."""
        match(
            self.weights is None or set(self.weights) == set(self.usual), "weights", "those of its scores", self.weights
        )
        return self

    @classmethod
    def fit(cls, usual: Mapping[str, Tensor], strange: Mapping[str, Tensor] | None = None) -> Combination:
        """From the scores of usual rows, and of strange ones where some are known."""
        largest = cls({name: values.double().sort().values for name, values in usual.items()})
        if strange is None:
            return largest
        q, far = largest.places(usual), largest.places(strange)
        if len(far) < 2:
            raise DataError(f"expected at least 2 strange rows to fit a combination to; found {len(far)}.")
        spread = (1 - _SHRINK) * (torch.cov(q.T) + torch.cov(far.T)) / 2 + _SHRINK * torch.eye(q.shape[1])
        weights = torch.linalg.solve(spread, far.mean(0) - q.mean(0)).clamp_min(0)
        if not float(weights.sum()) > 0:  # strange rows score lower than usual ones
            return largest
        return cls(largest.usual, dict(zip(usual, (weights / weights.sum()).tolist(), strict=True)))

    def places(self, scores: Mapping[str, Tensor]) -> Tensor:
        """`(N, scores)`: the normal quantile of each score's rank, growing on slowly beyond all usual rows."""
        found = []
        for name, usual in self.usual.items():
            s = scores[name].double().contiguous()
            off = _rounding(usual, s)
            rank = torch.searchsorted(usual, s - off) + torch.searchsorted(usual, s + off, right=True)
            q = torch.special.ndtri((rank / 2 + 0.5) / (len(usual) + 1))
            far = (s - off - usual[-1]).clamp_min(0) / (usual[-1] - usual.median()).clamp_min(1e-12)
            found.append(q + torch.log1p(far))
        return torch.stack(found, 1)

    def __call__(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The combined score, `(N,)`."""
        q = self.places(scores)
        if self.weights is None:
            return q.amax(1)
        return q @ torch.tensor([self.weights[name] for name in self.usual], dtype=torch.float64)


@dataclass(frozen=True)
class Detection:
    """How strange rows are.

    Attributes:
        scores: of each row by name, `(N,)` each, large for strange rows.
        p_values: the same as p-values: `P(p <= a) <= a` for rows like the usual ones.
        rows: how many usual rows the p-values come from.
    """

    scores: dict[str, Tensor]
    p_values: dict[str, Tensor]
    rows: int

    @property
    def p_value(self) -> Tensor:
        """`(N,)`, that of the combination, or of the only score."""
        return self.p_values[COMBINED if COMBINED in self.p_values else next(iter(self.p_values))]

    def strange(self, alarm: float = 0.05, score: str | None = None) -> Tensor:
        """`(N,)`, True for strange rows; of rows like the usual ones at most the share `alarm` are called so."""
        if type(alarm) not in (int, float) or not 1 / (self.rows + 1) <= alarm < 1:
            raise ArgumentError(
                f"expected a rate of false alarms from {1 / (self.rows + 1):.2g}, as there were {self.rows} usual "
                f"rows, to 1; found {alarm!r}. Pass more rows to detector()."
            )
        if score is not None and score not in self.p_values:
            raise ArgumentError(f"expected a score among {', '.join(self.p_values)}; found {score!r}.")
        return (self.p_value if score is None else self.p_values[score]) <= alarm

    def __repr__(self) -> str:
        return f"Detection of {len(self)} rows by {', '.join(self.scores)}, beside {self.rows} usual rows"

    def __len__(self) -> int:
        return len(self.p_value)


@dataclass(frozen=True)
class DetectorScores:
    """How well a score tells rows apart that are known to be usual or strange.

    Attributes:
        score: its name.
        auroc: the probability that a strange row has the larger score.
        fpr95: share of usual rows called strange by the threshold that finds 95 % of the strange ones.
        aupr: average precision.
        false_alarms: share of usual rows with a p-value up to 0.05.
        found: share of strange rows with one.
    """

    score: str
    auroc: float
    fpr95: float
    aupr: float
    false_alarms: float
    found: float

    def __str__(self) -> str:
        return (
            f"{self.score}: AUROC {self.auroc:.3f}, FPR95 {self.fpr95:.1%}; alarms at p <= 0.05: "
            f"{self.false_alarms:.1%} of usual rows, {self.found:.1%} of strange ones"
        )


def separation(usual: Detection, strange: Detection) -> tuple[DetectorScores, ...]:
    """Of every score, how well it tells strange rows from usual ones."""
    found = []
    for name, inside in usual.scores.items():
        outside = strange.scores[name]
        both = torch.cat([inside, outside]), torch.arange(len(inside) + len(outside)) >= len(inside)
        rates = [float((part.p_values[name] <= 0.05).double().mean()) for part in (usual, strange)]
        pair = outside, inside
        found.append(
            DetectorScores(name, float(auroc(*both)), float(fpr_at(*pair)), float(aupr(*pair)), rates[0], rates[1])
        )
    return tuple(found)
