"""A claim, and how it is decided from the numbers; a theorem, and how far the numbers are from it.

A claim has an effect and a threshold. On each set the effect, a mean over splits or blocks, is tested against the
threshold with Student's t, to both sides. The p values of all sets of a claim are corrected after Holm. The claim holds
on a set where the corrected p is at most 5 % and the effect is beyond the threshold, fails where it is at most 5 % and
the effect is on the other side, and is otherwise not decided. An effect without a spread is decided by its number, and
pages say so.

What is true by algebra is no evidence: it is a theorem, with a proof in a line and the largest deviation found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from studies.significance import LEVEL, holm, split_error, student_p, student_quantile

__all__ = ["Claim", "Effect", "Outcome", "Record", "Theorem", "Values", "Verdict", "decide", "theorem_table"]

Record: TypeAlias = Mapping[str, Any]
Values: TypeAlias = npt.NDArray[np.float64]
Verdict: TypeAlias = Literal["holds", "fails", "not decided"]


@dataclass(frozen=True)
class Effect:
    """A number, and how sure it is.

    Attributes:
        value: the effect.
        error: its standard error; None where it has no spread.
        freedom: degrees of freedom of the error; None: as of a normal.
        ends: an interval of 95 % that was measured with it; None: from the error.
    """

    value: float
    error: float | None = None
    freedom: int | None = None
    ends: tuple[float, float] | None = None

    @classmethod
    def mean(cls, values: Values, overlap: float = 0.0) -> Effect:
        """The mean of splits or blocks `(J,)`; `overlap` is `n_test / n_train` where they share rows."""
        return cls(float(values.mean()), split_error(values, overlap), len(values) - 1)

    @classmethod
    def measured(cls, value: float, low: float, high: float) -> Effect:
        """With an interval of 95 % from elsewhere; its half width is as many standard errors as a normal's.

        Where the interval has no width nothing varied, and the effect has no spread.
        """
        if low == high:
            return cls(value)
        return cls(value, (high - low) / 2 / student_quantile(1 - LEVEL, None), None, (low, high))

    @property
    def interval(self) -> tuple[float, float]:
        """95 %; the number itself where it has no spread."""
        if self.ends is not None or self.error is None:
            return self.ends or (self.value, self.value)
        reach = student_quantile(1 - LEVEL, self.freedom) * self.error if self.error else 0.0
        return self.value - reach, self.value + reach

    def p(self, threshold: float) -> float | None:
        """Two-sided, of the threshold being the truth; None where the effect has no spread."""
        if self.error is None:
            return None
        off = self.value - threshold
        return student_p(off / self.error if self.error else math.copysign(math.inf, off) if off else 0.0, self.freedom)


@dataclass(frozen=True)
class Claim:
    """One statement.

    Attributes:
        text: what is claimed.
        effect: what is measured, in words.
        measure: the effect on a set; None where the set does not say.
        above: it holds where the effect is above this; None: where it is below `below`.
        below: the other threshold.
        source: whose claim it is.
    """

    text: str
    effect: str
    measure: Callable[[Record], Effect | None]
    above: float | None = None
    below: float | None = None
    source: str = "paper"

    @property
    def limit(self) -> float:
        """The threshold."""
        return self.above if self.above is not None else self.below or 0.0

    @property
    def threshold(self) -> str:
        """Effect and threshold as a sentence."""
        side = f"{'above' if self.above is not None else 'below'} {self.limit:g}"
        return f"Effect: {self.effect}; the claim is that it is {side}."

    def beyond(self, value: float) -> bool:
        """Whether a number is where the claim puts it."""
        return value > self.limit if self.above is not None else value < self.limit


@dataclass(frozen=True)
class Outcome:
    """What a set says of a claim: the verdict, the effect, and p after Holm; None of them where it does not say."""

    verdict: Verdict | None = None
    effect: Effect | None = None
    p: float | None = None

    @property
    def said_p(self) -> str:
        """The p value as text; empty where there is none."""
        return "" if self.p is None else f"{self.p:.2g}" if self.p >= 1e-4 else "< 0.0001"


def decide(claim: Claim, results: Mapping[str, Record]) -> dict[str, Outcome]:
    """The outcome on every set; all tests of a claim are one family."""
    effects = {name: claim.measure(record) for name, record in results.items()}
    raw = {name: effect.p(claim.limit) for name, effect in effects.items() if effect is not None}
    tested = {name: p for name, p in raw.items() if p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    found = {}
    for name, effect in effects.items():
        if effect is None:
            found[name] = Outcome()
            continue
        decided = corrected.get(name, 0.0) <= LEVEL
        word: Verdict = ("holds" if claim.beyond(effect.value) else "fails") if decided else "not decided"
        found[name] = Outcome(word, effect, corrected.get(name))
    return found


@dataclass(frozen=True)
class Theorem:
    """What is true by algebra.

    Attributes:
        text: what it says.
        proof: in a line.
        deviation: how far the numbers of a set are from it; None where it does not apply.
    """

    text: str
    proof: str
    deviation: Callable[[Record], float | None]


def theorem_table(theorems: tuple[Theorem, ...], results: Mapping[str, Record]) -> list[str]:
    """Markdown: each theorem, its proof, and the largest deviation over the sets."""
    lines = ["| theorem | proof | largest deviation found |", "| --- | --- | ---: |"]
    for theorem in theorems:
        found = [off for record in results.values() if (off := theorem.deviation(record)) is not None]
        said = f"{max(found):.1g}" if found else "not measured"
        lines.append(f"| {theorem.text} | {theorem.proof} | {said} |")
    return lines
