"""What probabilities are worth on test rows, beside one temperature for all rows and the model's own softmax."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.classes.fit import ALONE, ClassFit, losses
from latedrop.calibration.classes.labels import as_labels
from latedrop.calibration.classes.prediction import ClassPrediction
from latedrop.calibration.classes.record import ClassVerdict
from latedrop.calibration.verdict import Finding, Grade, standard_error
from latedrop.errors import DataError
from latedrop.metrics import auroc
from latedrop.metrics.classes import accuracy, brier, cross_entropy, ece, selective_risk

__all__ = ["ClassJudgement", "ClassScores", "judge_classes"]

ERROR_GOOD, ERROR_BAD = 0.03, 0.08
"""Calibration error: up to the first it is good, beyond the second bad."""
GAIN_GOOD = 0.01
"""Nats over one temperature: less is negligible."""
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
        selective_risk: mean error rate over all shares of rows that are kept, the surest first.
    """

    label: str
    nll: float
    brier: float
    accuracy: float
    ece: float
    selective_risk: float


@dataclass(frozen=True)
class ClassJudgement:
    """What test rows say about a calibrated classifier.

    Attributes:
        verdict: beside one temperature for all rows.
        scores: of what is in use, of one temperature, and of the model's own softmax.
        ranking: AUROC of telling right from wrong rows by the confidence; None where all rows are right, or wrong.
        probabilities: `(N, K)` each, by label.
        labels: `(N,)`.
        strange: share of the rows beyond nine in ten of the validation rows; None where it is not known.
    """

    verdict: ClassVerdict
    scores: tuple[ClassScores, ...]
    ranking: float | None
    probabilities: dict[str, Tensor] = field(repr=False)
    labels: Tensor = field(repr=False)
    strange: float | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Calibration, worth and ranking, each with a grade."""
        return _calibration(self.verdict), _worth(self.verdict), *_ranking(self.ranking)

    @property
    def grade(self) -> Grade:
        """That of the calibration; bad where one temperature is better. No more than one temperature is no fault."""
        calibration, worth, *_ = self.findings
        return "bad" if worth.grade == "bad" else calibration.grade

    def to_dict(self) -> dict[str, Any]:
        """Plain data; all but the probabilities of every row."""
        record = {"verdict": {**asdict(self.verdict), "text": str(self.verdict), "grade": self.grade}}
        rest: dict[str, Any] = {"scores": [asdict(row) for row in self.scores], "ranking": self.ranking}
        return {**record, **rest, "findings": [asdict(found) for found in self.findings], "strange": self.strange}


def judge_classes(prediction: ClassPrediction, labels: Any) -> ClassJudgement:
    """Judge predictions by labels `(N,)` of rows that served for nothing else."""
    y = as_labels(labels, prediction.calibration.classes).to(prediction.logits.device)
    if len(y) != len(prediction):
        raise DataError(f"expected one label for each of the {len(prediction)} predictions; found {len(y)}.")
    alone = ClassFit(prediction.calibration.alone).log_probabilities(prediction.logits, None, None)
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
    verdict = ClassVerdict(
        rows=len(y),
        fitted="other rows",
        gain=float(gain.mean()),
        gain_error=standard_error(gain),
        nll=used.nll,
        accuracy=used.accuracy,
        ece=used.ece,
    )
    strange = None if prediction.strangeness is None else float((prediction.strangeness > 1).double().mean())
    return ClassJudgement(verdict, scores, ranking, {k: v.exp() for k, v in ways.items()}, y, strange)


def _scored(label: str, p: Tensor, y: Tensor) -> ClassScores:
    risk = selective_risk(-p.amax(1), p.argmax(1) != y)
    parts = (cross_entropy(p, y), brier(p, y), accuracy(p, y), ece(p, y, mass=True), risk)
    return ClassScores(label, *map(float, parts))


def _calibration(v: ClassVerdict) -> Finding:
    where = "by cross-validation" if v.fitted == "cross-validation" else "not used for fitting"
    value = f"{100 * v.ece:.1f} %"
    text = (
        f"probabilities are off by {value} on average over {v.rows:,} rows {where}, accuracy {100 * v.accuracy:.1f} %"
    )
    if v.ece <= ERROR_GOOD:
        return Finding("Do the probabilities hold?", "good", text, value, "They can be taken as they are.")
    if v.ece <= ERROR_BAD:
        advice = "Take them as rough, or calibrate on more rows like these."
        return Finding("Do the probabilities hold?", "weak", text, value, advice)
    advice = "Do not rely on them. Calibrate on rows like these."
    return Finding("Do the probabilities hold?", "bad", text, value, advice)


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
