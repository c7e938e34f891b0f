"""Raise alarms with a bounded probability of a false one: a test martingale on conformal p-values.

While rows are exchangeable a p-value is uniform whatever came before, so a bet `f(p)` with mean 1 does not win on
average. The capital starts at 1; of it, `1 / (n (n + 1))` is put in at row n, and from then on bets at every row:

    active = (active + 1 / (n (n + 1))) · f(p),      capital = mean(active) + 1 / (n + 1).

The second part is not yet in play, so that late changes are found, too. The mean is over the bets
`f(p) = e · p^(e - 1)`, which win where scores are larger than usual, and over outputs or terms. By Ville's inequality
(1939) the capital ever reaches `1 / alarm` with probability at most `alarm`, over the whole stream; see Vovk 2021,
"Testing randomness online".

The p-value of a score is the chance to see one as large among those before it and itself, ties broken by a number `u`,
uniform on [0, 1] and drawn for that row:

    p = (#{earlier > score} + u · #{earlier or this = score}) / (n + 1).

Where all rows are exchangeable the p-values of a sequence are independent and uniform, for any score (Vovk, Gammerman,
Shafer 2005, chapter 8); so they are for a score that is rounded to bins, and counts are all that must be remembered.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log
from typing import Annotated, TypeAlias

import numpy as np

from latedrop.metrics.levels import normal_quantile
from latedrop.records import Limits, record

__all__ = [
    *("ERRORS", "KINDS", "SHARES", "STRANGENESS", "Alarm", "Kind", "Monitor", "Row", "Usual", "counted", "from_curve"),
    *("p_value", "uniform", "usual_of_rows"),
]

Row = int | str
"""The name of a row: the number that `predict` gave it, or your own."""

POWERS = (0.2, 0.4, 0.6, 0.8)
_LOWEST = 1e-12  # of a p-value: what u = 0 would give
_LARGEST = 1e290
_LEVELS = tuple(i / 100 for i in range(1, 100))
_BEYOND = (3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0)
ERRORS = (*(normal_quantile((1 + level) / 2) for level in _LEVELS), *_BEYOND)
"""Ends of bins of `|target - mean| / std`: the levels of a calibration curve, and some beyond."""
STRANGENESS = tuple(2.0 ** (i / 4) for i in range(-16, 41))
SHARES = tuple(i / 32 for i in range(1, 32))
_Counts: TypeAlias = tuple[Annotated[float, Limits(0, 1e12)], ...]
_Bins: TypeAlias = Annotated[_Counts, Limits(len(STRANGENESS) + 1, len(STRANGENESS) + 1)]
_Shares: TypeAlias = Annotated[_Counts, Limits(len(SHARES) + 1, len(SHARES) + 1)]


@record
@dataclass(frozen=True)
class Usual:
    """Counts of validation rows in bins; None if nothing is known.

    Attributes:
        strangeness: of `Prediction.novelty`, in the bins between `STRANGENESS`.
        shares: of each term's share of the variance, in the bins between `SHARES`.
        errors: of `|target - mean| / std`, in the bins between `ERRORS`; not in files, as a calibration curve tells.
    """

    strangeness: _Bins | None = None
    shares: Mapping[str, _Shares] = field(default_factory=dict)
    errors: _Counts | None = None


def counted(
    edges: Sequence[float], scores: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Count the scores in each bin, or add up their weights; scores that are not finite count as the largest."""
    values = np.asarray(scores, np.float64)
    bins = np.where(np.isfinite(values), np.searchsorted(np.asarray(edges, np.float64), values, "right"), len(edges))
    return tuple(np.bincount(bins, weights, len(edges) + 1).astype(np.float64).tolist())


def usual_of_rows(
    strangeness: Sequence[float] | None,
    shares: Mapping[str, Sequence[float]],
    weights: Sequence[float] | None = None,
) -> Usual:
    """Count the validation rows, or add up their weights."""
    known = None if strangeness is None else counted(STRANGENESS, strangeness, weights)
    return Usual(known, {name: counted(SHARES, share, weights) for name, share in shares.items()})


def from_curve(levels: Sequence[float], observed: Sequence[float], rows: int) -> tuple[float, ...] | None:
    """Count `ERRORS` from a calibration curve: the share of rows inside the interval of each level.

    Return None if the curve has other levels than the bins. Rows beyond the last level are put into
    the first bin there.
    """
    if [round(level, 6) for level in levels] != [round(level, 6) for level in _LEVELS]:
        return None
    ends = [0.0, *observed, 1.0]
    inside = [rows * max(0.0, high - low) for low, high in pairwise(ends)]
    return (*inside, *[0.0] * (len(ERRORS) + 1 - len(inside)))


def uniform(name: str, number: int) -> float:
    """Return a number in [0, 1) that depends only on a name and the count of earlier ones, also after a restart."""
    digest = hashlib.blake2b(f"{name}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


@record
@dataclass(frozen=True)
class Alarm:
    """A change of a stream.

    Attributes:
        kind: what changed: `"errors"`, `"strangeness"` or `"shares"`.
        row: the row at which it was noticed, as `predict` numbered it or you named it.
        number: how many rows of this kind had been seen, that one included.
    """

    kind: str
    row: Row
    number: Annotated[int, Limits(1)]


@dataclass(frozen=True)
class Kind:
    """Describe the scores that a monitor watches.

    Attributes:
        name: of the kind of alarm; it also seeds the numbers that break ties.
        edges: bounds of the bins of scores.
        both: whether to bet on scores that are smaller than usual, too.
    """

    name: str
    edges: tuple[float, ...]
    both: bool = False


KINDS = {
    kind.name: kind
    for kind in (Kind("errors", ERRORS), Kind("strangeness", STRANGENESS), Kind("shares", SHARES, both=True))
}


def p_value(edges: Sequence[float], counts: list[float], score: float, u: float) -> float:
    """Count a score and return its p-value, which is small if it is larger than most earlier ones."""
    at = bisect_right(edges, score)
    counts[at] += 1
    return (sum(counts[at + 1 :]) + u * counts[at]) / sum(counts)


_Amounts: TypeAlias = list[list[Annotated[float, Limits(0, _LARGEST)]]]


@record
@dataclass
class Monitor:
    """The capital of one kind of alarm; it is stored as it is.

    Attributes:
        counts: scores so far, those of usual rows included, in bins, for each of the scores of a row.
        active: capital in play of each bet, for each of the scores of a row.
        number: how many rows were seen.
        capital: what all bets have come to.
        alarm: the first alarm.
    """

    counts: _Amounts
    active: _Amounts
    number: Annotated[int, Limits(0)]
    capital: Annotated[float, Limits(0)]
    alarm: Alarm | None

    @classmethod
    def of(cls, kind: Kind, usual: Sequence[Sequence[float] | None]) -> Monitor:
        """Return a monitor that begins with counts of usual rows for each score; None where nothing is known."""
        counts = [[0.0] * (len(kind.edges) + 1) if known is None else [*known] for known in usual]
        return cls(counts, [[0.0] * (len(POWERS) * (2 if kind.both else 1)) for _ in usual], 0, 1.0, None)

    def fits(self, kind: Kind, scores: int) -> bool:
        """Return whether it watches so many scores of a kind."""
        other = Monitor.of(kind, [None] * scores)
        return [*map(len, self.counts + self.active)] == [*map(len, other.counts + other.active)]

    def add(self, kind: Kind, scores: Sequence[float], row: Row, alarm: float) -> None:
        """Bet on the scores of one row; `alarm` is the probability of a false one."""
        self.number += 1
        fresh, u = 1 / (self.number * (self.number + 1)), uniform(f"{kind.name} 0", self.number)
        total = 0.0
        for counts, active, score in zip(self.counts, self.active, scores, strict=True):
            p = p_value(kind.edges, counts, score, u)
            bets = _bets(p) + (_bets(1 - p) if kind.both else [])
            active[:] = [min((amount + fresh) * bet, _LARGEST) for amount, bet in zip(active, bets, strict=True)]
            total += sum(active) / len(active)
        self.capital = total / len(self.counts) + 1 / (self.number + 1)
        if self.alarm is None and self.capital >= 1 / alarm:
            self.alarm = Alarm(kind.name, row, self.number)


def _bets(p: float) -> list[float]:
    at = log(max(p, _LOWEST))
    return [power * exp((power - 1) * at) for power in POWERS]
