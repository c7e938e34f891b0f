"""Standardised quantiles `z(q)` in plain numbers: Gaussian, Student t, isotonic and conformal.

They need neither torch nor numpy, so that intervals can be made where neither is; `calibration.scale` fits them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Literal, TypeAlias

from latedrop.errors import ArgumentError
from latedrop.records import Limits, match, record

__all__ = [
    *("ConformalScores", "IsotonicKnots", "checked_level", "conformal_score", "first_beyond", "normal_quantile"),
    "student_quantile",
]

_LARGEST = 1e300  # of a variance or a residual in a file: what is larger overflows when it is used
_Amounts: TypeAlias = Annotated[tuple[Annotated[float, Limits(0, _LARGEST)], ...], Limits(1)]
_Residuals: TypeAlias = Annotated[tuple[Annotated[float, Limits(-_LARGEST, _LARGEST)], ...], Limits(1)]
_Shares: TypeAlias = Annotated[tuple[Annotated[float, Limits(0, 1)], ...], Limits(1)]


@record
@dataclass(frozen=True)
class IsotonicKnots:
    """Isotonic recalibration.

    Attributes:
        knots: for each output, increasing standardised residuals `z = Phi^{-1}(p)`.
        observed: for each output, the frequency `R(p)` of targets below the predicted p-quantile.
        scale: the scale of the variance that it was fitted with, one per output or one for all.
        floor: its floor.
    """

    knots: Annotated[tuple[_Residuals, ...], Limits(1)]
    observed: tuple[_Shares, ...]
    scale: _Amounts
    floor: _Amounts
    _: KW_ONLY
    kind: Literal["isotonic"] = "isotonic"

    @property
    def outputs(self) -> int:
        """The number of outputs, or 1 for all."""
        return len(self.knots)

    def quantiles(self, q: float) -> list[float]:
        """The standardised quantile of each output."""
        return [_isotonic_quantile(*pair, q) for pair in zip(self.knots, self.observed, strict=True)]

    def checked(self) -> IsotonicKnots:
        """Check lengths and order after reading."""
        lengths = [len(row) for row in self.knots]
        match([len(row) for row in self.observed] == lengths, "observed", "as long as the knots", self.observed)
        _check_rising("knots", self.knots)
        _check_rising("observed", self.observed)
        match(len(self.floor) == len(self.scale), "floor", f"{len(self.scale)} numbers, as scale", self.floor)
        return self


@record
@dataclass(frozen=True)
class ConformalScores:
    """Split-conformal intervals.

    Attributes:
        scores: for each output, the sorted scores `|target - mean| / std`.
        scale: the scale of the variance that they were computed with, one per output or one for all.
        floor: its floor.
    """

    scores: Annotated[tuple[_Amounts, ...], Limits(1)]
    scale: _Amounts
    floor: _Amounts
    _: KW_ONLY
    kind: Literal["conformal"] = "conformal"

    @property
    def outputs(self) -> int:
        """The number of outputs, or 1 for all."""
        return len(self.scores)

    def quantiles(self, q: float) -> list[float]:
        """The standardised quantile of each output: an end of the central interval that ends at q."""
        return [math.copysign(conformal_score(scores, abs(2 * q - 1)), q - 0.5) for scores in self.scores]

    def checked(self) -> ConformalScores:
        """Check lengths and order after reading."""
        _check_rising("scores", self.scores)
        match(len(self.floor) == len(self.scale), "floor", f"{len(self.scale)} numbers, as scale", self.floor)
        return self


def _check_rising(name: str, rows: Sequence[Sequence[float]]) -> None:
    for i, row in enumerate(rows):
        match(all(a <= b for a, b in pairwise(row)), f"{name}[{i}]", "numbers that never fall", row)


def checked_level(level: Any) -> float:
    """A level or a quantile as a float inside (0, 1), or `ArgumentError`."""
    try:
        value = math.nan if isinstance(level, (bool, str)) else float(level)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not 0 < value < 1:
        raise ArgumentError(f"expected a probability inside (0, 1); found {level!r}. A 90 % interval is level 0.9.")
    return value


def normal_quantile(q: float) -> float:
    """`Phi^{-1}(q)`.

    >>> round(normal_quantile(0.975), 4)
    1.96
    """
    return NormalDist().inv_cdf(q) if 0 < q < 1 else math.copysign(math.inf, q - 0.5)


def student_quantile(q: float, degrees: float | None = None) -> float:
    """The quantile of a Student t with a variance of 1; without degrees of freedom, of a Gaussian.

    Degrees of freedom are a whole number above 2.

    >>> round(student_quantile(0.975, 3), 4), round(student_quantile(0.975), 4)
    (1.8374, 1.96)
    """
    if degrees is None or not 0 < q < 1:
        return normal_quantile(q)
    side = min(q, 1 - q)
    low, high = 0.0, 2.0
    while _student_upper(high, degrees) > side:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _student_upper(middle, degrees) > side else (low, middle)
    return math.copysign(low * math.sqrt((degrees - 2) / degrees), q - 0.5)


def _student_upper(t: float, degrees: float) -> float:
    """Return the share of a Student t above `t >= 0`, for whole degrees of freedom.

    It is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    odd = degrees % 2 == 1
    cosine2 = degrees / (degrees + t * t)  # of the angle whose tangent is t / sqrt(degrees)
    sine = math.sqrt(1 - cosine2)
    total = term = sine * cosine2**0.5 if odd else sine
    for k in range(2 if odd else 1, int(degrees) - 2, 2):
        term = term * cosine2 * (k / (k + 1))
        total = total + term
    if odd:
        total = (math.atan(t / degrees**0.5) + (total if degrees > 1 else 0)) * (2 / math.pi)
    return (1 - total) / 2


def _isotonic_quantile(knots: Sequence[float], observed: Sequence[float], q: float) -> float:
    """Where the frequency `observed` reaches q: linear between `knots`, in the middle of flat stretches."""
    inside = min(max(q, observed[0]), observed[-1])
    # Beyond the outermost knot the data say nothing: a Gaussian tail goes on from there.
    tail = 0.0 if inside == q else normal_quantile(q) - normal_quantile(inside)
    below, above = bisect_right(observed, inside) - 1, bisect_left(observed, inside)
    if observed[above] <= observed[below]:
        return (knots[below] + knots[above]) / 2 + tail
    step = (knots[above] - knots[below]) * (inside - observed[below]) / (observed[above] - observed[below])
    return knots[below] + step + tail


def conformal_score(
    scores: Sequence[float],
    level: float,
    least: float = 0.0,
    purpose: str = " for an interval",
    remedy: str = "Pass more rows to conformal(...), or ask for a lower level.",
) -> float:
    """The `ceil((n + 1) level)`-th smallest of the n sorted scores; `least` where that is none of them."""
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        needed = math.ceil(level / (1 - level) - 1e-9)
        raise ArgumentError(
            f"expected at least {needed} conformal rows{purpose} at level {level:g}; found {len(scores)}. {remedy}"
        )
    return scores[rank - 1] if rank > 0 else least


def first_beyond(
    losses: Iterable[tuple[float, float]], rows: int, share: float, otherwise: float, purpose: str, remedy: str
) -> float:
    """Return the first value at which losses add up to more than conformal risk control allows.

    Of n rows that is a sum plus 1 of more than `share (n + 1)`; `losses` are pairs of a value and a loss.
    """
    needed = math.ceil(1 / share - 1e-9) - 1
    if rows < needed:
        raise ArgumentError(f"expected at least {needed} {purpose}; found {rows}. {remedy}")
    most, total = share * (rows + 1) - 1 + 1e-9, 0.0
    for value, loss in losses:
        total += loss
        if total > most:
            return value
    return otherwise
