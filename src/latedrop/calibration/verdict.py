"""Judge an uncertainty in one sentence, from rows that it was not fitted to.

The measure is one constant variance for all rows that fits the validation errors, with tails of its own where the
variance has them. The gain over it is the difference of their negative log-likelihoods, averaged over rows, in nats.

The grades good, weak and bad follow from the numbers below and from nothing else. A share has to be off by more than
its standard error; fewer than 30 rows are too few to tell, and so are those of which two standard errors of the gain to
either side reach from good to bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import CrossValidation, share_error, standard_error
from latedrop.metrics import rank_correlation
from latedrop.metrics.entries import average
from latedrop.metrics.groups import Group
from latedrop.metrics.tails import Tail
from latedrop.numerals import nats
from latedrop.records import Limits, record

__all__ = [
    *("Finding", "Grade", "Slice", "Verdict", "correlation", "judged", "losses", "off_slices", "said_of_rows"),
]

Grade: TypeAlias = Literal["good", "weak", "bad"]
_Share: TypeAlias = Annotated[float, Limits(0, 1 + 1e-6)]

COVERAGE_GOOD, COVERAGE_BAD = 0.03, 0.08
"""How far the share inside 90 % intervals may be from 0.9: up to the first it is good, beyond the second bad.

At other levels `a` so much times `sqrt(a (1 - a)) / 0.3`.
"""
GAIN_GOOD = 0.05
"""Nats: a gain of less is negligible; good and bad are beyond this and beyond two standard errors."""
RANKING_GOOD, RANKING_BAD = 0.3, 0.1
"""Rank correlation: from the first on it is good, below the second bad."""
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The levels that are judged."""
_LEVEL = 0.9
_FEW_ROWS = 30
_MORE_ROWS = "These rows are too few to tell: judge again on more."
_AS_WELL = "One standard deviation for all rows would do as well."


@dataclass(frozen=True)
class Finding:
    """One of the things that a verdict looks at."""

    about: str  # "coverage", "ranges", "worth" or "ranking"
    grade: Grade
    text: str  # what was found, as part of a sentence
    value: str  # the number that it rests on, with its standard error
    advice: str  # what follows from it, as sentences


def said_of_rows(fitted: str) -> str:
    """Return what to say of the rows of a verdict: how they were kept apart from the fit, or that they were not."""
    said = {"cross-validation": "by cross-validation", "own rows": "that the calibration was fitted to"}
    return said.get(fitted, "not used for fitting")


@record
@dataclass(frozen=True)
class Slice:
    """A range of an input, of the prediction or of its deviation in which 90 % intervals hold something else.

    Attributes:
        by: what it is a range of.
        low, high: the range.
        rows: how many rows are in it.
        coverage: the share of their values inside.
    """

    by: str
    low: float
    high: float
    rows: Annotated[int, Limits(1, 2**31)]
    coverage: Annotated[float, Limits(0, 1 + 1e-6)]

    def __str__(self) -> str:
        return f"{100 * self.coverage:.0f} % where {self.by} is {self.low:.4g} to {self.high:.4g}"


@record
@dataclass(frozen=True)
class Verdict:
    """The worth of a variance on rows that it was not fitted to.

    Attributes:
        rows: how many.
        fitted: how they were kept apart: `"cross-validation"` or `"other rows"`; `"own rows"` where they were not.
        gain: nats per value by which it is better than the constant.
        gain_error: standard error of the gain over rows.
        correlation: rank correlation of standard deviation and size of the error.
        coverage: share of values inside their 90 % intervals.
        coverage_error: its standard error over rows.
        levels: the share of values inside their intervals at each of several levels.
        slices: ranges whose rows the intervals hold less or more often than chance explains, the worst first.
    """

    rows: Annotated[int, Limits(1, 2**31)]
    fitted: str
    gain: float
    gain_error: Annotated[float, Limits(0)]
    correlation: Annotated[float, Limits(-1 - 1e-6, 1 + 1e-6)]
    coverage: Annotated[float, Limits(0, 1 + 1e-6)]
    coverage_error: Annotated[float, Limits(0, 1)]
    levels: tuple[tuple[_Share, _Share], ...] = ()
    slices: tuple[Slice, ...] = ()

    @property
    def better(self) -> bool | None:
        """Return True if it is better than a constant; None where the rows cannot tell (within two standard errors)."""
        return None if abs(self.gain) <= 2 * self.gain_error else self.gain > 0

    @property
    def correlation_error(self) -> float:
        """The standard error of the rank correlation, by Fisher's transform with Bonett and Wright's variance."""
        if self.rows < 4:
            return 1.0
        return max(0.0, 1 - self.correlation**2) * math.sqrt((1 + self.correlation**2 / 2) / (self.rows - 3))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Coverage, ranges where any is off, worth and ranking, each with its grade."""
        ranges = (self._ranges(),) if self.slices else ()
        return self._coverage(), *ranges, self._worth(), self._ranking()

    @property
    def grade(self) -> Grade:
        """The worst of all grades but that of the ranking: a sound interval need not tell rows apart."""
        grades = {finding.grade for finding in self.findings if finding.about != "ranking"}
        return "bad" if "bad" in grades else "weak" if "weak" in grades else "good"

    @property
    def sentence(self) -> str:
        """The verdict as a sentence of its own."""
        text = str(self)
        return f"{text[0].upper()}{text[1:]}."

    def __str__(self) -> str:
        return "; ".join(finding.text for finding in self.findings)

    def _coverage(self) -> Finding:
        value = f"{100 * self.coverage:.0f} % (± {100 * self.coverage_error:.1f})"
        rows = f"{self.rows:,} row{'s' * (self.rows > 1)} {said_of_rows(self.fitted)}"
        text = f"{100 * _LEVEL:.0f} % intervals hold {value} of {rows}"
        level, share, off = self._worst_level()
        way = "narrow" if share < level else "wide"
        if level != _LEVEL and off > COVERAGE_GOOD:
            text += f", but {100 * level:.0f} % intervals hold {100 * share:.0f} %"
            way = f"{way} there"
        if off > COVERAGE_BAD:
            advice = "Do not rely on them. Calibrate on rows like these, or use conformal intervals."
            return Finding("coverage", "bad", f"{text}: far too {way}", value, advice)
        if self.rows < _FEW_ROWS:
            return Finding("coverage", "weak", f"{text}: too few rows to tell", value, _MORE_ROWS)
        if off <= COVERAGE_GOOD:
            advice = "On average over all rows they hold." if self.slices else "The intervals can be taken as they are."
            return Finding("coverage", "good", text, value, advice)
        numbers = f"{'an' if level == 0.8 else 'a'} {100 * level:.0f} % interval as one of {100 * share:.0f} %"
        advice = f"Read {numbers}, or calibrate on more rows."
        return Finding("coverage", "weak", f"{text}: somewhat too {way}", value, advice)

    def _worst_level(self) -> tuple[float, float, float]:
        """Return the level, its share, and how far that is off beyond its standard error, in units of a 90 % level."""
        levels = []
        for level, share in ((_LEVEL, self.coverage), *self.levels):
            unit = math.sqrt(level * (1 - level) / (_LEVEL * (1 - _LEVEL)))
            levels.append((level, share, abs(share - level) / unit - self.coverage_error))
        return max(levels, key=lambda one: one[2])

    def _ranges(self) -> Finding:
        worst = max(self.slices, key=lambda part: abs(part.coverage - _LEVEL))
        off, more = abs(worst.coverage - _LEVEL), len(self.slices) - 1
        grade: Grade = "bad" if off > COVERAGE_BAD else "weak" if off > COVERAGE_GOOD else "good"
        text = f"not everywhere: they hold {worst}"
        text += f", and {more} more range{'s are' if more > 1 else ' is'} off" if more else ""
        advice = "Look at these rows separately: calibrate on more of them, or add an input that explains them."
        return Finding("ranges", grade, text, f"{100 * worst.coverage:.0f} %", advice)

    def _worth(self) -> Finding:
        size = f"{nats(abs(self.gain))} nats (± {nats(self.gain_error)})"
        value, reach = f"{'-' if self.gain <= -0.0005 else '+'}{size}", 2 * self.gain_error
        if self.rows < _FEW_ROWS or (self.gain + reach >= GAIN_GOOD and self.gain - reach <= -GAIN_GOOD):
            text = f"perhaps no better than one constant variance, {value}: too few rows to tell"
            return Finding("worth", "weak", text, value, _MORE_ROWS)
        if self.better is None:
            return Finding("worth", "weak", f"no better than one constant variance, {value}", value, _AS_WELL)
        text = f"{'better' if self.better else 'worse'} than one constant variance by {size}"
        if abs(self.gain) < GAIN_GOOD:
            return Finding("worth", "weak", f"{text}: negligible", value, _AS_WELL)
        if self.better:
            return Finding("worth", "good", text, value, "It is worth having: it says where errors are larger.")
        return Finding("worth", "bad", text, value, "Use one constant instead, or calibrate on rows like these.")

    def _ranking(self) -> Finding:
        value, doubt = self.correlation, 2 * self.correlation_error
        number = f"{value:.2f} (± {self.correlation_error:.2f})"
        if value - doubt < RANKING_BAD and value + doubt >= RANKING_GOOD:
            text = f"too few rows to tell whether it ranks the errors: correlation {number}"
            return Finding("ranking", "weak", text, number, _MORE_ROWS)
        grade: Grade = "bad" if value < RANKING_BAD else "weak" if value < RANKING_GOOD else "good"
        text, advice = {
            "bad": ("it does not rank the errors", "Do not sort or reject rows by it."),
            "weak": ("it ranks the errors weakly", "Large deviations are a hint, no more."),
            "good": ("it ranks the errors", "Look first at rows with a large standard deviation."),
        }[grade]
        return Finding("ranking", grade, f"{text}: correlation {number}", number, advice)


def judged(
    error: Tensor,
    variance: Tensor,
    constant: Tensor,
    *,
    fitted: str,
    inside: Callable[[float], Tensor] | None = None,
    rows: CrossValidation | None = None,
    tail: Tail | None = None,
    gain: Tensor | None = None,
) -> Verdict:
    """Judge errors and variances `(N, ...)`; the constant broadcasts with them.

    Args:
        error: target minus prediction.
        variance: of each value, before its tail.
        constant: the trivial answer.
        fitted: how the rows were kept apart.
        inside: what lies in its interval at a level, `(N, ...)`, where that is not an interval of the tail.
        rows: what each row counts, but for the rank correlation, and which are alike.
        tail: of the errors, Gaussian where None.
        gain: `(N,)`, where it is known; else that of two Gaussians.
    """
    left, tail = rows or CrossValidation(), tail or Tail()
    error, variance, constant = (part.double() for part in (error, variance, constant.to(error)))
    z = error.abs() / variance.sqrt()
    shares = {}
    for level in LEVELS:
        inside_interval = z <= tail.quantile((1 + level) / 2) if inside is None else inside(level)
        shares[level] = inside_interval.double().reshape(len(inside_interval), -1).mean(1)
    gain = losses(error, constant) - losses(error, variance) if gain is None else gain
    # A fit that had to do without a large error is smaller, and is held against that error: a floor alone would rank
    # the errors the wrong way round. So of several folds variances are ranked in units of each fold's constant,
    # rounded, so that equal ones are equal.
    ranked = (variance / constant).float() if fitted == "cross-validation" else variance
    return Verdict(
        rows=len(error),
        fitted=fitted,
        gain=float(average(gain, left.weights)),
        gain_error=standard_error(gain, left),
        correlation=correlation(error, ranked),
        coverage=float(average(shares[_LEVEL], left.weights)),
        coverage_error=share_error(shares[_LEVEL], left),
        levels=tuple((level, float(average(share, left.weights))) for level, share in shares.items()),
    )


def off_slices(groups: Iterable[Group]) -> tuple[Slice, ...]:
    """Return the groups of 90 % intervals that are off by more than chance explains, and by more than is good."""
    off = dict.fromkeys(group for group in groups if group.off and abs(group.coverage - _LEVEL) > COVERAGE_GOOD)
    return tuple(Slice(group.name, group.low, group.high, group.rows, group.coverage) for group in off)


def losses(error: Tensor, variance: Tensor, tail: Tail | None = None) -> Tensor:
    """Return the NLL per value of every row `(N,)`, of errors `(N, ...)` and variances before their tail."""
    loss = (tail or Tail()).nll(error, variance)
    return loss.reshape(len(loss), -1).mean(1)


def correlation(error: Tensor, variance: Tensor) -> float:
    """Return the rank correlation of deviation and size of the error, averaged over outputs, whose units may differ."""
    several = error.dim() == 2 and error.shape[1] > 1
    return float(rank_correlation(torch.zeros_like(error), variance, error, per_output=several).mean())
