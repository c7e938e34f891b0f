"""Conformal p-values with a memory of fixed size: what was seen is counted in bins.

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
from typing import Annotated, TypeAlias

import numpy as np

from latedrop.metrics.levels import normal_quantile
from latedrop.records import Limits, record

__all__ = ["ERRORS", "SHARES", "STRANGENESS", "Bag", "Usual", "counted", "from_curve", "uniform", "usual_of_rows"]

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
    """Counts of validation rows in bins; None where nothing is known.

    Attributes:
        strangeness: of `Prediction.novelty`, in the bins between `STRANGENESS`.
        shares: of each term's share of the variance, in the bins between `SHARES`.
        errors: of `|target - mean| / std`, in the bins between `ERRORS`; not in files, as a calibration curve tells.
    """

    strangeness: _Bins | None = None
    shares: Mapping[str, _Shares] = field(default_factory=dict)
    errors: _Counts | None = None


class Bag:
    """How many scores lie in each bin; `edges` are the ends between bins, rising."""

    def __init__(self, edges: Sequence[float], counts: Sequence[float] | None = None) -> None:
        self.edges = edges
        self.counts = [0.0] * (len(edges) + 1) if counts is None else list(counts)
        self._total = sum(self.counts)

    def add(self, score: float, u: float) -> float:
        """Put a score into the bag; its p-value, small where it is larger than most before it."""
        at = bisect_right(self.edges, score)
        self.counts[at] += 1
        self._total += 1
        return (sum(self.counts[at + 1 :]) + u * self.counts[at]) / self._total


def counted(
    edges: Sequence[float], scores: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """How many scores lie in each bin, or how much they weigh; what is not finite counts as the largest."""
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
    """Counts of `ERRORS` from a calibration curve: the share of rows inside the interval of each level.

    None where the curve has other levels than the bins. Rows beyond the last level are put into
    the first bin there.
    """
    if [round(level, 6) for level in levels] != [round(level, 6) for level in _LEVELS]:
        return None
    ends = [0.0, *observed, 1.0]
    inside = [rows * max(0.0, high - low) for low, high in pairwise(ends)]
    return (*inside, *[0.0] * (len(ERRORS) + 1 - len(inside)))


def uniform(name: str, number: int) -> float:
    """A number in [0, 1) that depends on nothing but a name and how many came before; the same after a restart."""
    digest = hashlib.blake2b(f"{name}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
