"""A claim, how the numbers decide it, and the page of claims that every study has.

A claim has an effect and a threshold. On each set the effect, a mean over splits, repeats or blocks, is tested against
the threshold with Student's t, to both sides, and the p values of all sets of a claim are corrected after Holm (1979):
the k-th smallest of m counts `m - k + 1` times. The claim holds on a set where the corrected p is at most 5 % and the
effect is beyond the threshold, fails where p is as small and the effect is on the other side, and is otherwise not
decided. An effect without a spread is decided by its number, and pages mark it with a star.

Where the cuts of a set share rows in a way that no standard error is right for, sets count as one each: the mean of
their effects is tested, and the p values of all claims are one family (`pooled`).

Splits of one set share rows too, so the plain standard error of their mean is too small. With J splits of `n_train` and
`n_test` rows, Nadeau and Bengio (2003, "Inference for the generalization error") take

    error^2 = var · (1 / J + n_test / n_train),

and Student's t with J - 1 degrees of freedom. What is true by algebra is no evidence: it is a theorem, with a proof in
a line and the largest deviation found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from studies.pages import SHORT, table

Record: TypeAlias = Mapping[str, Any]
Values: TypeAlias = npt.NDArray[np.float64]
Verdict: TypeAlias = Literal["holds", "fails", "not decided"]

LEVEL = 0.05
"""Chance of any wrong verdict within a family of tests."""


def split_error(values: npt.ArrayLike, overlap: float = 0.0) -> float:
    """Return the standard error of the mean of splits or blocks `(J,)`; infinite where there is only one.

    Args:
        values: one for each.
        overlap: `n_test / n_train` of splits that share rows; 0 for blocks that share none.

    >>> split_error([1.0, 3.0]), split_error([1.0, 3.0], overlap=1.5)
    (1.0, 2.0)
    """
    array: npt.NDArray[Any] = np.asarray(values, dtype=np.float64)
    return math.sqrt(float(array.var(ddof=1)) * (1 / len(array) + overlap)) if len(array) > 1 else math.inf


def student_p(t: float, freedom: int | None) -> float:
    """Return the two-sided p value of a t statistic, of a normal where `freedom` is None; 1 without any."""
    return 1.0 if freedom == 0 or math.isnan(t) else float(2 * _student(freedom).sf(abs(t)))


def student_quantile(level: float, freedom: int | None) -> float:
    """Return the t within which a share `level` lies to both sides of 0; infinite without degrees of freedom.

    >>> round(student_quantile(0.95, 19), 4), round(student_quantile(0.95, None), 4)
    (2.093, 1.96)
    """
    return math.inf if freedom == 0 else float(_student(freedom).isf((1 - level) / 2))


def _student(freedom: int | None) -> Any:
    return stats.norm if freedom is None else stats.t(freedom)


def holm(p: Sequence[float]) -> list[float]:
    """Correct p values after Holm, in their own order: each may be compared with the level as it is.

    >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p), 0.0
    for place, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - place) * p[index]))
        corrected[index] = largest
    return corrected


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
        """Take the mean of splits or blocks `(J,)`; `overlap` is `n_test / n_train` where they share rows."""
        return cls(float(values.mean()), split_error(values, overlap), len(values) - 1)

    @classmethod
    def measured(cls, value: float, low: float, high: float) -> Effect:
        """Take an interval of 95 % from elsewhere: as wide as a normal's. Without width, nothing varied."""
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
        """Return the two-sided p value of the threshold being the truth; None where the effect has no spread."""
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
        above: it holds where the effect is above the limit; else below.
        limit: the threshold.
        source: whose claim it is.
    """

    text: str
    effect: str
    measure: Callable[[Record], Effect | None]
    above: bool
    limit: float
    source: str = "paper"

    @property
    def threshold(self) -> str:
        """Effect and threshold as a sentence."""
        side = f"{'above' if self.above else 'below'} {self.limit:g}"
        return f"Effect: {self.effect}; the claim is that it is {side}."

    def beyond(self, value: float) -> bool:
        """Whether a number is where the claim puts it."""
        return value > self.limit if self.above else value < self.limit


@dataclass(frozen=True)
class Outcome:
    """Hold the verdict of a set on a claim, the effect, and p after Holm; all None where the set does not say."""

    verdict: Verdict | None = None
    effect: Effect | None = None
    p: float | None = None

    @property
    def said_p(self) -> str:
        """The p value as text; empty where there is none."""
        return "" if self.p is None else f"{self.p:.2g}" if self.p >= 1e-4 else "< 0.0001"

    def interval(self, write: Callable[[float], str]) -> str:
        """The interval of the effect as text; empty where it has no spread."""
        return "" if self.effect is None or self.effect.error is None else " to ".join(map(write, self.effect.interval))


@dataclass(frozen=True)
class Decision:
    """Hold the outcomes of all sets for a claim.

    Attributes:
        claim: the statement.
        outcomes: by set.
        pooled: of the mean over the sets, where sets count as one each and have no verdict of their own.
    """

    claim: Claim
    outcomes: Mapping[str, Outcome]
    pooled: Outcome | None = None

    def sets(self, verdict: str) -> tuple[str, ...]:
        """Return the sets with a verdict."""
        return tuple(name for name, outcome in self.outcomes.items() if outcome.verdict == verdict)

    @property
    def effects(self) -> list[float]:
        """The effect on every set that has it."""
        return [outcome.effect.value for outcome in self.outcomes.values() if outcome.effect is not None]

    @property
    def agreeing(self) -> str:
        """How many sets lie where the claim puts them."""
        return f"{sum(map(self.claim.beyond, self.effects))} of {len(self.effects)}"

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.pooled is not None:
            return self.pooled.verdict or "not measured"
        holds, fails, total = len(self.sets("holds")), len(self.sets("fails")), len(self.effects)
        if total <= 1:
            return "not measured" if not total else "holds" if holds else "fails" if fails else "not decided"
        if total in (holds, fails):
            return f"{'holds' if holds else 'fails'} on all {total}"
        if not holds and not fails:
            return f"not decided on any of {total}"
        return f"holds on {holds}, fails on {fails} of {total}"


Measured: TypeAlias = "Values | float | Effect | None"
"""What a measure returns: a number for each split or block, one without a spread, or an effect; None for neither."""


def read_claims(
    study: str, measures: Collection[Callable[..., Measured]], overlap: Callable[[Record], float] = lambda record: 0.0
) -> dict[str, tuple[Claim, ...]]:
    """Read the claims of a study by their heading, from the tables of `claims.md` in its folder.

    Args:
        study: its name.
        measures: the functions that the tables name; they take a record and the arguments that stand there.
        overlap: of a record, `n_test / n_train` of splits that share rows.
    """
    functions = {function.__name__: function for function in measures}
    groups: dict[str, list[Claim]] = {}
    for line in (Path(__file__).parent / study / "claims.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            claims = groups.setdefault(line[3:], [])
        elif line.startswith("| ") and not line.startswith(("| claim ", "| --- ")):
            text, effect, how, limit, source = (cell.strip() for cell in line.strip("|").split("|"))
            name, _, words = how.partition(": ")
            side, threshold = limit.split()
            measure = _effect_by(functions[name], words.split("; ") if words else [], overlap)
            claims.append(Claim(text, effect, measure, side == ">", float(threshold), source))
    return {heading: tuple(claims) for heading, claims in groups.items()}


def _effect_by(
    function: Callable[..., Measured], words: Sequence[str], overlap: Callable[[Record], float]
) -> Callable[[Record], Effect | None]:
    def effect(record: Record) -> Effect | None:
        value = function(record, *words)
        if value is None or isinstance(value, Effect):
            return value
        return Effect.mean(value, overlap(record)) if isinstance(value, np.ndarray) else Effect(value)

    return effect


def decide(claim: Claim, results: Mapping[str, Record]) -> Decision:
    """Decide a claim on every set; all tests of a claim are one family."""
    effects = {name: claim.measure(record) for name, record in results.items()}
    raw = {name: effect.p(claim.limit) for name, effect in effects.items() if effect is not None}
    tested = {name: p for name, p in raw.items() if p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    return Decision(claim, {name: _outcome(claim, effect, corrected.get(name)) for name, effect in effects.items()})


def decide_pooled(claims: Sequence[Claim], results: Mapping[str, Record]) -> list[Decision]:
    """Decide claims by the mean over the sets; the tests of all claims that two sets speak of are one family."""
    triples = []
    for claim in claims:
        outcomes = {name: Outcome(None, claim.measure(record)) for name, record in results.items()}
        decision = Decision(claim, outcomes)
        mean = Effect.mean(np.array(decision.effects)) if len(decision.effects) > 1 else None
        triples.append((claim, outcomes, mean))
    tests = iter(holm([mean.p(claim.limit) or 0.0 for claim, _, mean in triples if mean is not None]))
    return [
        Decision(claim, outcomes, Outcome() if mean is None else _outcome(claim, mean, next(tests)))
        for claim, outcomes, mean in triples
    ]


def _outcome(claim: Claim, effect: Effect | None, p: float | None) -> Outcome:
    if effect is None:
        return Outcome()
    decided = p is None or p <= LEVEL
    return Outcome(("holds" if claim.beyond(effect.value) else "fails") if decided else "not decided", effect, p)


class Theorem(NamedTuple):
    """A statement that is true by algebra, its proof in a line, and how far the numbers of a set are from it."""

    text: str
    proof: str
    deviation: Callable[[Record], float | None]  # None where it does not apply


def theorem_table(theorems: Sequence[Theorem], results: Mapping[str, Record]) -> list[str]:
    """Markdown: each theorem, its proof, and the largest deviation over the sets."""
    rows = []
    for text, proof, deviation in theorems:
        off = [value for record in results.values() if (value := deviation(record)) is not None]
        rows.append((text, proof, f"{max(off):.1g}" if off else "not measured"))
    return table(("theorem", "proof", "largest deviation found"), rows, 2)


def number(value: float) -> str:
    """Write an effect with three decimals; with two digits where it is tiny.

    >>> number(0.25), number(0.00042), number(187.31), number(float("inf"))
    ('0.250', '0.00042', '187.3', 'unbounded')
    """
    if not math.isfinite(value):
        return "unbounded"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.3f}"


def claims_section(
    groups: Mapping[str, Sequence[Decision]],
    *,
    by_set: bool = False,
    names: Mapping[str, str] = SHORT,
    write: Callable[[float], str] = number,
) -> list[str]:
    """Markdown: every claim with its verdict, in groups with a heading; then every effect on every set.

    Args:
        groups: decisions by heading; they are numbered through.
        by_set: show the verdict of every set in the summary, in the place of the median effect.
        names: of sets, where they differ from those of the results.
        write: how an effect is written.
    """
    lines, effects, places = [], ["## Every effect"], count(1)
    for heading, decisions in groups.items():
        rows = []
        for one in decisions:
            place = next(places)
            rows.append((place, one.claim.text, one.claim.source, f"**{one.verdict}**", *_shown(one, by_set, write)))
            effects += ["", f"### {place}. {one.claim.text}", "", one.claim.threshold, "", *_effects(one, names, write)]
        sets = [names.get(name, name) for name in decisions[0].outcomes] if decisions else []
        columns = ["mean effect, 95 % interval", "p after Holm", "sets that agree"]
        if not decisions or decisions[0].pooled is None:
            columns = sets if by_set else ["effect, median over sets"]
        lines += [f"## {heading}", "", *table(("", "claim", "by", "verdict", *columns), rows, 4), ""]
    return [*lines, *effects]


def _effects(decision: Decision, names: Mapping[str, str], write: Callable[[float], str]) -> list[str]:
    """The effect on every set, its interval, p and verdict; of the mean over the sets too where it counts."""
    rows: list[tuple[str, ...]] = []
    everything = dict(decision.outcomes)
    if decision.pooled is not None and decision.pooled.effect is not None:
        everything["mean over the sets"] = decision.pooled
    for name, one in everything.items():
        value = "" if one.effect is None else write(one.effect.value)
        verdict = "not measured" if one.effect is None else one.verdict or ""
        rows.append((names.get(name, name), value, one.interval(write), one.said_p, verdict))
    return table(("set", "effect", "95 % interval", "p after Holm", "verdict"), rows, 1)


def _shown(decision: Decision, by_set: bool, write: Callable[[float], str]) -> list[str]:
    """The last cells of a claim's row in the summary."""
    pooled = decision.pooled
    if pooled is not None:
        if pooled.effect is None:
            return ["", "", ""]
        return [f"{write(pooled.effect.value)} ({pooled.interval(write)})", pooled.said_p, decision.agreeing]
    if not by_set:
        return [write(float(np.median(decision.effects))) if decision.effects else ""]
    return [
        "-" if one.verdict is None else one.verdict if one.p is not None else f"{one.verdict} \\*"
        for one in decision.outcomes.values()
    ]
