"""What an uncertainty is worth, in one sentence, from rows that it was not fitted to.

The measure is one constant variance for all rows, the validation rows' mean squared error. The gain over it is the mean
over rows of `(log c + e^2 / c - log v - e^2 / v) / 2` nats, with `c` the constant and `v` the variance.

The grades good, weak and bad follow from the numbers below and from nothing else. Where two standard errors to either
side reach from good to bad, the rows are too few to tell, which is weak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import CrossValidation, share_error, standard_error
from latedrop.calibration.tails import Tail
from latedrop.metrics import rank_correlation
from latedrop.metrics.entries import average
from latedrop.numerals import nats
from latedrop.records import Limits, record

__all__ = [
    "Finding",
    "Grade",
    "Verdict",
    "correlation",
    "gains",
    "judged",
    "losses",
]

Grade: TypeAlias = Literal["good", "weak", "bad"]

COVERAGE_GOOD, COVERAGE_BAD = 0.03, 0.08
"""How far the share inside 90 % intervals may be from 0.9: up to the first it is good, beyond the second bad."""
GAIN_GOOD = 0.05
"""Nats: a gain of less is negligible; good and bad are beyond this and beyond two standard errors."""
RANKING_GOOD, RANKING_BAD = 0.3, 0.1
"""Rank correlation: from the first on it is good, below the second bad."""
_LEVEL = 0.9
_MORE_ROWS = "These rows are too few to tell: judge again on more."
_AS_WELL = "One standard deviation for all rows would do as well."


@dataclass(frozen=True)
class Finding:
    """One of the things that a verdict looks at.

    Attributes:
        about: what it is: "coverage", "worth" or "ranking".
        grade: "good", "weak" or "bad".
        text: what was found, as part of a sentence.
        value: the number that it rests on, with its standard error.
        advice: what follows from it, as sentences.
    """

    about: str
    grade: Grade
    text: str
    value: str
    advice: str


@record
@dataclass(frozen=True)
class Verdict:
    """What a variance is worth on rows that it was not fitted to.

    Attributes:
        rows: how many.
        fitted: how they were kept apart: `"cross-validation"` or `"other rows"`.
        gain: nats per value by which it is better than the constant.
        gain_error: standard error of the gain over rows.
        correlation: rank correlation of standard deviation and size of the error.
        coverage: share of values inside their 90 % intervals.
        coverage_error: its standard error over rows.
    """

    rows: Annotated[int, Limits(1, 2**31)]
    fitted: str
    gain: float
    gain_error: Annotated[float, Limits(0)]
    correlation: Annotated[float, Limits(-1 - 1e-6, 1 + 1e-6)]
    coverage: Annotated[float, Limits(0, 1 + 1e-6)]
    coverage_error: Annotated[float, Limits(0, 1)]

    @property
    def better(self) -> bool | None:
        """Whether it is better than a constant; None where the rows cannot tell (within two standard errors)."""
        return None if abs(self.gain) <= 2 * self.gain_error else self.gain > 0

    @property
    def correlation_error(self) -> float:
        """The standard error of the rank correlation, by Fisher's transform with Bonett and Wright's variance."""
        if self.rows < 4:
            return 1.0
        return max(0.0, 1 - self.correlation**2) * math.sqrt((1 + self.correlation**2 / 2) / (self.rows - 3))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Coverage, worth and ranking, each with its grade."""
        return self._coverage(), self._worth(), self._ranking()

    @property
    def grade(self) -> Grade:
        """The worst of the grades for coverage and worth: a sound interval need not tell rows apart."""
        found = {finding.grade for finding in self.findings[:2]}
        return "bad" if "bad" in found else "weak" if "weak" in found else "good"

    @property
    def sentence(self) -> str:
        """The same as a sentence of its own."""
        text = str(self)
        return f"{text[0].upper()}{text[1:]}."

    def __str__(self) -> str:
        return "; ".join(finding.text for finding in self.findings)

    def _coverage(self) -> Finding:
        where = "by cross-validation" if self.fitted == "cross-validation" else "not used for fitting"
        value = f"{100 * self.coverage:.0f} % (± {100 * self.coverage_error:.1f})"
        text = f"{100 * _LEVEL:.0f} % intervals hold {value} of {self.rows:,} row{'s' * (self.rows > 1)} {where}"
        off = self.coverage - _LEVEL
        doubt = 2 * self.coverage_error
        if abs(off) - doubt <= COVERAGE_GOOD and abs(off) + doubt > COVERAGE_BAD:
            return Finding("coverage", "weak", f"{text}: too few rows to tell", value, _MORE_ROWS)
        if abs(off) <= COVERAGE_GOOD:
            return Finding("coverage", "good", text, value, "The intervals can be taken as they are.")
        way = "narrow" if off < 0 else "wide"
        if abs(off) <= COVERAGE_BAD:
            advice = f"Read a 90 % interval as one of about {100 * self.coverage:.0f} %, or calibrate on more rows."
            return Finding("coverage", "weak", f"{text}: somewhat too {way}", value, advice)
        advice = "Do not rely on them. Calibrate on rows like these, or use conformal intervals."
        return Finding("coverage", "bad", f"{text}: far too {way}", value, advice)

    def _worth(self) -> Finding:
        size = f"{nats(abs(self.gain))} nats (± {nats(self.gain_error)})"
        value = f"{'-' if self.gain <= -0.0005 else '+'}{size}"
        if self.better is None and 2 * self.gain_error > GAIN_GOOD:
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
        if value < RANKING_BAD:
            text, advice = "it does not rank the errors", "Do not sort or reject rows by it."
        elif value < RANKING_GOOD:
            text, advice = "it ranks the errors weakly", "Large deviations are a hint, no more."
        else:
            text, advice = "it ranks the errors", "Look first at the rows of large deviation."
        grade: Grade = "bad" if value < RANKING_BAD else "weak" if value < RANKING_GOOD else "good"
        return Finding("ranking", grade, f"{text}: correlation {number}", number, advice)


def judged(
    error: Tensor,
    variance: Tensor,
    constant: Tensor,
    *,
    fitted: str,
    inside: Tensor | None = None,
    rows: CrossValidation | None = None,
    tail: Tail | None = None,
    gain: Tensor | None = None,
) -> Verdict:
    """The verdict on errors and variances `(N, ...)`; the constant broadcasts with them.

    `inside` `(N, ...)` says what lies in its interval where that is not the one of the tail, Gaussian where None;
    `gain` `(N,)` what was gained where that is known; `rows` what each row counts, but for the rank correlation, and
    which are alike.
    """
    left = rows or CrossValidation()
    error, variance, constant = (part.double() for part in (error, variance, constant.to(error)))
    if inside is None:
        inside = error.abs() <= (tail or Tail()).quantile((1 + _LEVEL) / 2) * variance.sqrt()
    by_row = [gains(error, variance, constant) if gain is None else gain, inside.double().reshape(len(inside), -1).mean(1)]
    return Verdict(
        rows=len(error),
        fitted=fitted,
        gain=float(average(by_row[0], left.weights)),
        gain_error=standard_error(by_row[0], left),
        correlation=correlation(error, _alike(variance, constant) if fitted == "cross-validation" else variance),
        coverage=float(average(by_row[1], left.weights)),
        coverage_error=share_error(by_row[1], left),
    )


def _alike(variance: Tensor, constant: Tensor) -> Tensor:
    """Variances of several folds, in units of each fold's constant, so that they can be ranked together.

    A fit that had to do without a large error is smaller, and is held against that error: a floor alone would rank the
    errors the wrong way round. Rounded, so that equal ones are equal.
    """
    return (variance / constant).float()


def gains(error: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    """By how many nats the variance is better than the constant, per value, of every row `(N,)`."""
    return losses(error, constant) - losses(error, variance)


def losses(error: Tensor, variance: Tensor, tail: Tail | None = None) -> Tensor:
    """The NLL per value of every row `(N,)`; the variance, before its tail, broadcasts with the errors `(N, ...)`."""
    loss = (tail or Tail()).nll(error, variance)
    return loss.reshape(len(loss), -1).mean(1)


def correlation(error: Tensor, variance: Tensor) -> float:
    """Rank correlation of standard deviation and size of the error, averaged over outputs, whose units may differ."""
    several = error.dim() == 2 and error.shape[1] > 1
    return float(rank_correlation(torch.zeros_like(error), variance, error, per_output=several).mean())
