"""What probabilities are worth on test rows, beside one temperature for all rows and the model's own softmax."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassVerdict
from latedrop.calibration.class_sets import ClassSets, Rejection
from latedrop.calibration.cross_validation import standard_error
from latedrop.calibration.fit_classes import ALONE, ClassFit, losses
from latedrop.calibration.labels import as_labels
from latedrop.calibration.seen import fitted_to, warn_of_seen
from latedrop.calibration.verdict import Finding, Grade, said_of_rows
from latedrop.errors import ArgumentError
from latedrop.evaluation.requirements import Requirement, checked_requirements, level_of, parsed_requirements
from latedrop.metrics import auroc
from latedrop.metrics.classes import (
    accuracy,
    brier,
    classwise_ece,
    cross_entropy,
    ece,
    selective_risk,
    set_coverage,
    set_size,
)
from latedrop.prediction.prediction import ClassPrediction

__all__ = ["ClassJudgement", "ClassScores", "RuleScores", "SetScores", "findings_of", "judge_classes"]

ERROR_GOOD, ERROR_BAD = 0.03, 0.08
"""Calibration error: up to the first it is good, beyond the second bad."""
GAIN_GOOD = 0.01
"""Nats over one temperature: less is negligible."""
_LEVEL = 0.9
_BINS = 15  # of the calibration error
RANKING_GOOD, RANKING_BAD = 0.8, 0.65
"""AUROC of telling right from wrong rows by the confidence."""


@dataclass(frozen=True)
class ClassScores:
    """The scores of one way from logits to probabilities.

    Attributes:
        label: its name.
        nll: of the labels, in nats.
        brier: the Brier score, from 0 to 2.
        accuracy: share of labels that are the likeliest class.
        ece: expected calibration error, 15 bins of equal mass.
        classwise_ece: the same of every class's probability, averaged over the classes.
        selective_risk: mean error rate over all shares of rows that are kept, the surest first.
    """

    label: str
    nll: float
    brier: float
    accuracy: float
    ece: float
    classwise_ece: float
    selective_risk: float


@dataclass(frozen=True)
class SetScores:
    """What prediction sets at one level hold.

    Attributes:
        level: how often they should hold the label.
        coverage: how often they do.
        coverage_error: standard error of that.
        size: classes in a set, on average.
    """

    level: float
    coverage: float
    coverage_error: float
    size: float


@dataclass(frozen=True)
class RuleScores:
    """What a rule that keeps the surest rows does.

    Attributes:
        risk: what the error rate of kept rows should stay below.
        kept: the share of rows that it keeps.
        errors: the error rate of these; 0 where none is kept.
        errors_error: standard error of that.
    """

    risk: float
    kept: float
    errors: float
    errors_error: float


@dataclass(frozen=True)
class ClassJudgement:
    """What test rows say about a calibrated classifier.

    Attributes:
        verdict: beside one temperature for all rows.
        scores: of what is in use, of one temperature, and of the model's own softmax.
        ranking: AUROC of telling right from wrong rows by the confidence; None where all rows are right, or wrong.
        probabilities: `(N, K)` each, by label.
        labels: `(N,)`.
        strange: share of the rows of a novelty above 1, as 5 % of the reference rows have; None where it is not known.
        sets: of the level that was asked for; None where the calibration has none.
        maker: what makes sets at any level; None where the calibration cannot.
        rule: what the calibration's rule does; None where it has none.
    """

    verdict: ClassVerdict
    scores: tuple[ClassScores, ...]
    ranking: float | None
    probabilities: dict[str, Tensor] = field(repr=False)
    labels: Tensor = field(repr=False)
    strange: float | None = None
    sets: SetScores | None = None
    maker: ClassSets | None = field(default=None, repr=False)
    rule: RuleScores | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Calibration, worth and ranking, each with a grade."""
        return *findings_of(self.verdict), *_ranking(self.ranking), *_sets(self.sets), *_rule(self.rule)

    @property
    def grade(self) -> Grade:
        """That of the calibration; bad where one temperature is better. No more than one temperature is no fault."""
        calibration, worth, *_ = self.findings
        return "bad" if worth.grade == "bad" else calibration.grade

    def sets_at(self, level: float) -> SetScores | None:
        """What sets at a level hold; None where the calibration makes none."""
        if self.maker is None:
            return None
        p = next(iter(self.probabilities.values())).cpu()
        members, y = self.maker.members(p, level), self.labels.cpu()
        coverage = float(set_coverage(members, y))
        return SetScores(level, coverage, (coverage * (1 - coverage) / len(y)) ** 0.5, float(set_size(members)))

    def measures(self, levels: Iterable[float] = ()) -> dict[str, float]:
        """Every measure of what is in use by its name; sets at the level asked for, and at `levels`."""
        used = asdict(self.scores[0])
        del used["label"]
        found = {"rows": float(self.verdict.rows), **used, "gain": self.verdict.gain}
        found |= {} if self.ranking is None else {"auroc": self.ranking}
        found |= {} if self.rule is None else {"kept": self.rule.kept, "kept_error": self.rule.errors}
        asked = {level: self.sets_at(level) for level in levels}
        for sets in (self.sets, *asked.values()):
            if sets is not None:
                found |= {f"coverage{100 * sets.level:.4g}": sets.coverage, f"size{100 * sets.level:.4g}": sets.size}
        return found

    def require(self, text: str) -> tuple[Requirement, ...]:
        """Hold measures against bounds, as in `"accuracy>=0.9, ece<=0.05"`; `met` says whether each is kept."""
        levels = [level_of(item.measure) for item in parsed_requirements(text)]
        return checked_requirements(text, self.measures(level for level in levels if level is not None))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; all but the probabilities of every row."""
        record = {"verdict": {**asdict(self.verdict), "text": str(self.verdict), "grade": self.grade}}
        rest: dict[str, Any] = {"scores": [asdict(row) for row in self.scores], "ranking": self.ranking}
        rest |= {"rows": self.verdict.rows, "strange": self.strange, "sets": self.sets and asdict(self.sets)}
        rest |= {"rule": self.rule and asdict(self.rule)}
        findings = [asdict(found) for found in self.findings]
        return {**record, **rest, "findings": findings, "measures": self.measures()}


def judge_classes(prediction: ClassPrediction, labels: Any, *, level: float | None = None) -> ClassJudgement:
    """Judge predictions by labels `(N,)` of rows used for nothing else.

    `level` is that of prediction sets, where the calibration makes any; by default 0.9, if it has rows enough.
    """
    y = as_labels(labels, prediction.calibration.classes, (len(prediction),)).to(prediction.logits.device)
    alone = ClassFit(prediction.calibration.alone).log_probabilities(prediction.logits)
    own = torch.log_softmax(prediction.logits, 1)
    ways = {prediction.calibration.choice: prediction.log_probabilities}
    ways |= {name: logs for name, logs in ((ALONE, alone), ("the model's softmax", own)) if name not in ways}
    gain = losses(alone, y) - losses(prediction.log_probabilities, y)
    scores = tuple(_scored(label, logs.exp(), y) for label, logs in ways.items())
    right = prediction.label == y
    ranking = None
    if bool(right.any()) and not bool(right.all()):
        ranking = float(auroc(prediction.confidence, right))
    used = scores[0]
    seen = prediction.calibration.seen
    warn_of_seen(seen, prediction.logits, y, stacklevel=2)
    verdict = ClassVerdict(
        rows=len(y),
        fitted="own rows" if fitted_to(seen, prediction.logits, y) else "other rows",
        gain=float(gain.mean()),
        gain_error=standard_error(gain),
        nll=used.nll,
        accuracy=used.accuracy,
        ece=used.ece,
    )
    strange = None if prediction.novelty is None else float((prediction.novelty > 1).double().mean())
    known: dict[str, Any] = {"strange": strange, "maker": prediction.calibration.sets}
    known["rule"] = _ruled(prediction, right, prediction.calibration.rule)
    found = ClassJudgement(verdict, scores, ranking, {k: v.exp() for k, v in ways.items()}, y, **known)
    try:
        return replace(found, sets=found.sets_at(_LEVEL if level is None else level))
    except ArgumentError:
        if level is not None:
            raise
        return found


def _ruled(prediction: ClassPrediction, right: Tensor, rule: Rejection | None) -> RuleScores | None:
    if rule is None:
        return None
    wrong = ~right[prediction.kept(rule)]
    errors = float(wrong.double().mean()) if len(wrong) else 0.0
    return RuleScores(rule.risk, len(wrong) / len(right), errors, (errors * (1 - errors) / max(len(wrong), 1)) ** 0.5)


def findings_of(verdict: ClassVerdict) -> tuple[Finding, Finding]:
    """Calibration and worth, each with a grade."""
    return _calibration(verdict), _worth(verdict)


def _scored(label: str, p: Tensor, y: Tensor) -> ClassScores:
    risk = selective_risk(-p.amax(1), p.argmax(1) != y)
    errors = ece(p, y, mass=True), classwise_ece(p, y, mass=True)
    parts = (cross_entropy(p, y), brier(p, y), accuracy(p, y), *errors, risk)
    return ClassScores(label, *map(float, parts))


def _calibration(v: ClassVerdict) -> Finding:
    where = said_of_rows(v.fitted)
    value = f"{100 * v.ece:.1f} %"
    text = (
        f"probabilities are off by {value} on average over {v.rows:,} rows {where}, accuracy {100 * v.accuracy:.1f} %"
    )
    if v.ece <= ERROR_GOOD:
        return Finding("Do the probabilities hold?", "good", text, value, "They can be taken as they are.")
    if v.ece <= ERROR_BAD:
        advice = "Take them as rough, or calibrate on more rows like these."
        return Finding("Do the probabilities hold?", "weak", text, value, advice)
    if v.ece <= _by_chance(v):
        advice = "So few rows cannot tell: exact probabilities would look like this. Evaluate on more."
        return Finding("Do the probabilities hold?", "weak", text, value, advice)
    advice = "Do not rely on them. Calibrate on rows like these."
    return Finding("Do the probabilities hold?", "bad", text, value, advice)


def _by_chance(v: ClassVerdict) -> float:
    """What the calibration error of exact probabilities would be at most, on average, among so many rows.

    The share of right rows in a bin of n has a standard deviation of at most `sqrt(a (1 - a) / n)`, `a` the accuracy.
    """
    return math.sqrt(2 / math.pi * v.accuracy * (1 - v.accuracy) * _BINS / v.rows)


def _worth(v: ClassVerdict) -> Finding:
    about, size = "Better than one temperature?", f"{abs(v.gain):.4f} nats (± {v.gain_error:.4f})"
    value = f"{'-' if v.gain < 0 else '+'}{size}"
    if v.better is None or abs(v.gain) < GAIN_GOOD:
        text = f"no better than one temperature, {value}" if not v.better else f"better by {size}: negligible"
        return Finding(about, "weak", text, value, "One temperature for all rows would do as well on rows like these.")
    if v.better:
        return Finding(about, "good", f"better than one temperature by {size}", value, "It says which rows to trust.")
    return Finding(about, "bad", f"worse than one temperature by {size}", value, "Calibrate on rows like these.")


def _ranking(ranking: float | None) -> tuple[Finding, ...]:
    if ranking is None:
        return ()
    grade: Grade = "good" if ranking >= RANKING_GOOD else "weak" if ranking >= RANKING_BAD else "bad"
    words = {"good": "it tells", "weak": "it hardly tells", "bad": "it does not tell"}
    advice = {"good": "Reject or check rows of low confidence first.", "weak": "Low confidence is a hint, no more."}
    text = f"{words[grade]} right rows from wrong ones: AUROC {ranking:.2f}"
    return (Finding("Does it tell errors?", grade, text, f"{ranking:.2f}", advice.get(grade, "Do not reject by it.")),)


def _sets(sets: SetScores | None) -> tuple[Finding, ...]:
    if sets is None:
        return ()
    value = f"{100 * sets.coverage:.1f} % (± {100 * sets.coverage_error:.1f})"
    text = f"{100 * sets.level:g} % sets hold {value} of the labels, with {sets.size:.2f} classes on average"
    short, error = sets.level - sets.coverage, sets.coverage_error
    grade: Grade = "good" if short <= 2 * error else "weak" if short <= 0.05 + 2 * error else "bad"
    advice = {"good": "They can be taken as they are."}
    return (Finding("Do the sets hold?", grade, text, value, advice.get(grade, "Make them from rows like these.")),)


def _rule(rule: RuleScores | None) -> tuple[Finding, ...]:
    if rule is None:
        return ()
    about, value = "Does the rule hold?", f"{100 * rule.errors:.2f} % (± {100 * rule.errors_error:.2f})"
    if not rule.kept:
        return (Finding(about, "weak", "the rule keeps no row", "0 %", "Make it from more rows, or allow more risk."),)
    text = f"{100 * rule.kept:.1f} % of the rows are kept, {value} of them wrong; promised: below {100 * rule.risk:g} %"
    over = rule.errors - rule.risk
    grade: Grade = "good" if over <= 0 else "weak" if over <= 2 * rule.errors_error else "bad"
    advice = {"good": "Kept rows can be decided by the model.", "weak": "It may be chance: evaluate on more rows."}
    return (Finding(about, grade, text, value, advice.get(grade, "Make the rule again, from rows like these.")),)
