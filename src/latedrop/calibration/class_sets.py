"""Sets of classes that hold the label as often as they say, and a threshold under which errors are rare.

Each row used for nothing else gives the score of its true class: how little it was expected. A set at level `a`
holds the classes whose scores are at most the `ceil((n + 1) a)`-th smallest; with exchangeable rows it holds the label
with probability `a` at least (Vovk et al. 2005). Scores of a class with probability p, and P the sum over the classes
that are likelier:

    LAC   1 - p                                         (Sadinle, Lei, Wasserman 2019): the smallest sets
    APS   P + u p,  u uniform                           (Romano, Sesia, Candes 2020): even coverage of hard rows
    RAPS  APS + penalty · max(0, rank - free)           (Angelopoulos et al. 2021): no long tails
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.levels import checked_level
from latedrop.quantiles import conformal_score
from latedrop.records import Infinite, Limits, match, record

__all__ = ["ClassSets", "Rejection", "Score", "checked_score", "rejection", "scores_of"]

Score = Literal["lac", "aps", "raps"]
Probability: TypeAlias = Annotated[float, Limits(0, 1)]
_PENALTY, _FREE = 0.01, 5
_THRESHOLDS = tuple(1 - 10 ** (-step / 40) for step in range(240, -1, -1))
"""Thresholds of the confidence, from 1 - 1e-6 to 0; fixed, as tests of thresholds chosen by the rows would not hold."""
_FIRST = 5


def checked_score(score: object) -> Score:
    """Return one of the scores, or raise `ArgumentError`."""
    if score not in get_args(Score):
        raise ArgumentError(f"expected a score of {', '.join(get_args(Score))}; found {score!r}.")
    return score  # type: ignore[return-value]


def scores_of(probabilities: Tensor, score: Score) -> Tensor:
    """Return the score of every class, `(N, K)`; the random numbers of APS come from the row's probabilities."""
    p = probabilities.double()
    if score == "lac":
        return 1 - p
    order = p.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(1)
    sums = p.gather(1, order).cumsum(1).gather(1, rank)  # up to the class itself, and with it
    mixed = (p * torch.arange(1, p.shape[1] + 1, dtype=p.dtype, device=p.device)).sum(1) * 1e6
    uniform = (mixed.sin() * 43758.5453).frac().abs()  # of a row, whatever the other rows of its batch
    scores = sums - p + uniform[:, None] * p
    return scores if score == "aps" else scores + _PENALTY * (rank + 1 - _FREE).clamp_min(0)


@record
@dataclass(frozen=True)
class ClassSets:
    """Makes sets from the sorted scores of the true classes of rows used for nothing else.

    Attributes:
        score: which one.
        scores: one list, or one for each class.
    """

    score: Score
    scores: tuple[tuple[Annotated[float, Limits(-10, 1e6)], ...], ...]

    def checked(self) -> ClassSets:
        """Check the order of the scores after reading."""
        for i, part in enumerate(self.scores):
            match(list(part) == sorted(part), f"scores[{i}]", "scores in rising order", part)
        return self

    @classmethod
    def fit(cls, probabilities: Tensor, labels: Tensor, score: Score, *, per_class: bool) -> ClassSets:
        """Store the scores of the true classes, from probabilities `(N, K)` and labels."""
        true_scores = scores_of(probabilities, score).gather(1, labels[:, None])[:, 0]
        parts = [true_scores[labels == k] for k in range(probabilities.shape[1])] if per_class else [true_scores]
        absent = [str(k) for k, part in enumerate(parts) if per_class and not len(part)]
        if absent:
            raise DataError(
                f"expected rows of every class for sets per class; found none of class {', '.join(absent)}. Pass more "
                "rows to conformal(), or ask for sets of all classes together."
            )
        return cls(score, tuple(tuple(part.sort().values.tolist()) for part in parts))

    def members(self, probabilities: Tensor, level: float) -> Tensor:
        """Return `(N, K)`, True for the classes of each set."""
        level = checked_level(level)
        remedy = "Pass more rows to conformal(), or ask for a lower level."
        words = ", of each class where sets are per class, for sets", remedy
        limits = [conformal_score(scores, level, -math.inf, *words) for scores in self.scores]
        return scores_of(probabilities, self.score).cpu() <= torch.tensor(limits, dtype=torch.float64)


@record
@dataclass(frozen=True)
class Rejection:
    """A rule: keep a row where its confidence is at least the threshold.

    Attributes:
        threshold: of the confidence; infinite where no row may be kept.
        risk: what the error rate of kept rows stays below.
        confidence: the probability, over the rows that the rule was made from, that it does.
        kept: the share of these rows that it keeps.
        errors: the error rate of those.
        rows: how many rows it was made from.
    """

    threshold: Annotated[float, Limits(0, 1), Infinite()]
    risk: Probability
    confidence: Probability
    kept: Probability
    errors: Probability
    rows: Annotated[int, Limits(1)]

    def __str__(self) -> str:
        if self.kept == 0:
            return f"no row can be kept: no threshold has errors below {self.risk:.1%} on {self.rows} rows"
        return (
            f"keep rows of confidence {self.threshold:.4f} and more: {self.kept:.1%} of {self.rows} rows, "
            f"{self.errors:.2%} of them wrong; with probability {self.confidence:.0%} it is less than {self.risk:.1%} "
            "of all rows like these"
        )


def rejection(confidence: Tensor, correct: Tensor, risk: float, probability: float) -> Rejection:
    """Return the most lenient threshold whose error rate is below `risk` with a given probability.

    Thresholds are tested one after the other, from the strictest on, each by the exact binomial test that Clopper and
    Pearson's bound is made of; the first that fails ends it, so that the chance of any wrong one among those that
    passed is at most `1 - probability` (fixed sequence testing, as in Angelopoulos et al. 2021, "Learn then Test").
    """
    if not all(isinstance(share, (int, float)) and 0 < share < 1 for share in (risk, probability)):
        raise ArgumentError(f"expected a risk and a confidence inside (0, 1); found {risk!r} and {probability!r}.")
    n = len(confidence)
    if n == 0:
        raise DataError("expected rows to find a threshold on; found none.")
    sure, wrong = confidence.double(), ~correct
    # With m rows and no error (1 - risk)^m must be small enough. The first test gets more rows, as one chance error
    # among few would end it all.
    least = max(math.ceil(math.log(1 - probability) / math.log(1 - risk)), min(math.ceil(_FIRST / risk), n // 4))
    best: tuple[float, int, int] | None = None
    for threshold in _THRESHOLDS:
        keep = sure >= threshold
        rows, errors = int(keep.sum()), int(wrong[keep].sum())
        if rows < least:
            continue
        if at_most(errors, rows, risk) > 1 - probability:  # so few errors would be no surprise at this risk
            break
        best = threshold, rows, errors
    if best is None:
        return Rejection(math.inf, risk, probability, 0.0, 0.0, n)
    threshold, rows, errors = best
    return Rejection(threshold, risk, probability, rows / n, errors / rows, n)


def at_most(errors: int, rows: int, rate: float) -> float:
    """Return the probability of at most so many errors among so many rows."""
    from scipy.stats import binom

    return float(binom.cdf(errors, rows, rate))
