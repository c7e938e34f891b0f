"""Judgements of a calibrated model by test rows, of numbers output by output, and of classes; and bounds on them.

`evaluate` prints what stands here, a page shows it, and a pipeline states bounds: `coverage90>=0.85, gain>=0`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassVerdict
from latedrop.calibration.cross_validation import standard_error
from latedrop.calibration.fit_classes import ALONE, ClassFit, losses
from latedrop.calibration.seen import fitted_to, warn_of_seen
from latedrop.calibration.targets import as_labels, as_output
from latedrop.calibration.verdict import Finding, Grade, Verdict, off_slices, said_of_rows
from latedrop.data.batches import in_order
from latedrop.errors import ArgumentError
from latedrop.evaluation.evaluation import Evaluation, compare, constant_of, in_use, verdict
from latedrop.metrics import auroc
from latedrop.metrics.classes import accuracy, brier, cross_entropy, ece, selective_risk, set_coverage
from latedrop.metrics.groups import Floats, Group, Inputs, Outcomes, by_deviation, by_input, by_novelty, input_columns
from latedrop.numerals import plain
from latedrop.prediction.prediction import ClassPrediction, Prediction
from latedrop.quantiles import student_quantile

__all__ = [
    *("ClassJudgement", "ClassScores", "JudgedOutput", "Judgement", "Requirement", "RuleScores", "SetScores", "Values"),
    *("findings_of", "judge", "judge_classes", "parsed_requirements"),
]

_MOST_VALUES = 200_000
_WORST = 8
_SHARES = tuple(np.linspace(1.0, 0.1, 19).round(2).tolist())
ERROR_GOOD, ERROR_BAD = 0.03, 0.08
"""Calibration error: up to the first it is good, beyond the second bad."""
GAIN_GOOD = 0.01
"""Nats over one temperature: less is negligible."""
RANKING_GOOD, RANKING_BAD = 0.8, 0.65
"""AUROC of telling right from wrong rows by the confidence."""
_LEVEL = 0.9
_MEASURES = (
    *("coverage90", "width90", "gain", "correlation", "rmse", "mae", "nll", "ma", "rows", "accuracy", "brier", "ece"),
    *("auroc", "selective_risk", "size90", "kept", "kept_error"),
)
"""What can be required, of numbers or of classes; coverage, width and size at any level in percent, from 1 to 99."""
_SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
_ONE = re.compile(rf"\s*(?P<name>[A-Za-z_]+[\d.]*(?:\[.+\])?)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>{_NUMBER})\s*")
_LEVELLED = re.compile(r"(coverage|width|size)(?P<level>[1-9]\d?)")
_BETWEEN = re.compile(r",(?![^\[]*\])")  # no comma inside brackets


@dataclass(frozen=True)
class Requirement:
    """A bound on a measure.

    Attributes:
        measure: its name.
        sign: `>=`, `>`, `<=` or `<`.
        bound: what it is held against.
        found: what was measured; None before that.
    """

    measure: str
    sign: str
    bound: float
    found: float | None = None

    @property
    def met(self) -> bool:
        """Return True if the bound is kept; not where the measure is NaN."""
        return self.found is not None and bool(_SIGNS[self.sign](self.found, self.bound))

    def __str__(self) -> str:
        measured = "" if self.found is None else f"; found {plain(self.found)}"
        return f"required {self.measure} {self.sign} {self.bound:g}{measured}"


def parsed_requirements(text: str, measures: Mapping[str, float] | None = None) -> tuple[Requirement, ...]:
    """Read requirements separated by commas, as in `"coverage90>=0.85, gain>=0"`, with what was measured.

    `ArgumentError` where one cannot be read, or no measure has its name; before the measures are known, too.
    """
    requirements = []
    for part in _BETWEEN.split(text):
        match = _ONE.fullmatch(part)
        if match is None:
            raise ArgumentError(
                f"expected requirements as NAME>=NUMBER (or >, <=, <), separated by commas; found {part.strip()!r}."
            )
        name, kind = match["name"], match["name"].partition("[")[0]
        if not _LEVELLED.fullmatch(kind) and kind not in _MEASURES:
            raise ArgumentError(
                f"expected a measure to require among {', '.join(_MEASURES)}, with coverage, width and size at any "
                f"level from 1 to 99; found {kind!r}."
            )
        if measures is not None and name not in measures:
            outputs = sorted({known.partition("[")[2][:-1] for known in measures if "[" in known})
            of = f"; of one output with its name, as in gain[{outputs[0]}], among {outputs}" if outputs else ""
            raise ArgumentError(
                f"expected a measure of these rows to require; found {name!r}. Known: "
                f"{', '.join(known for known in _MEASURES if known in measures)}{of}. "
                "coverage, width and size take a level in percent."
            )
        measured = None if measures is None else measures[name]
        requirements.append(Requirement(name, match["sign"], float(match["bound"]), measured))
    return tuple(requirements)


@dataclass(frozen=True)
class Values:
    """The values of one output, flat; of very many an even choice."""

    rows: npt.NDArray[np.intp]  # the row that each belongs to
    mean: Floats
    std: Floats
    low: Floats
    high: Floats
    target: Floats
    constant: Floats  # the standard deviations of one constant variance
    of: int  # how many values there are in all


@dataclass(frozen=True)
class JudgedOutput:
    """The judgement of one output, or of all of them, by test rows.

    Attributes:
        name: of the output.
        unit: of the output; empty where it is not known.
        verdict: beside the constant.
        evaluations: of the variance in use, of others from the same calibration, and of the constant.
        label: which of these is in use.
        deciles: rows by predicted deviation; none of several outputs, whose units may differ, nor `worst` and `kept`.
        inputs: rows along each of the inputs that tell most.
        strange: rows like the validation rows, and others; none where novelty is not known.
        worst: the rows furthest from their prediction in predicted deviations.
        kept: shares of rows to keep, the most certain ones.
        kept_rmse: RMSE of these rows.
        ideal_rmse: the same if the errors themselves were known, the least that can be.
        values: for figures.
    """

    name: str
    unit: str
    verdict: Verdict
    evaluations: tuple[Evaluation, ...]
    label: str
    deciles: tuple[Group, ...]
    inputs: tuple[tuple[Group, ...], ...]
    strange: tuple[Group, ...]
    worst: tuple[dict[str, Any], ...]
    kept: tuple[float, ...]
    kept_rmse: tuple[float, ...]
    ideal_rmse: tuple[float, ...]
    values: Values = field(repr=False)

    @property
    def used(self) -> Evaluation:
        """Return the evaluation of what is in use."""
        return next((row for row in self.evaluations if row.label == self.label), self.evaluations[0])

    def measures(self) -> dict[str, float]:
        """Return measures of what is in use by name; `coverage90` and `width90` stand for all levels in percent."""
        used = self.used
        measures: dict[str, float | None] = {name: getattr(used, name) for name in ("rows", "rmse", "mae", "nll", "ma")}
        measures |= {"gain": self.verdict.gain, "correlation": self.verdict.correlation}
        for level, observed, width in zip(used.levels, used.observed, used.widths, strict=True):
            measures |= {f"coverage{100 * level:.4g}": observed, f"width{100 * level:.4g}": width}
        return {name: float(value) for name, value in measures.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; all but the values of every row."""
        record, v = asdict(replace(self, values=None)), self.verdict  # type: ignore[arg-type]
        del record["values"]
        record["verdict"] |= {"correlation_error": v.correlation_error, "grade": v.grade, "text": str(v)}
        record["verdict"]["findings"] = {each.about: asdict(each) for each in v.findings}
        record["inputs"] = {groups[0]["name"]: groups for groups in record["inputs"]}
        record["kept"] = {"share": self.kept, "rmse": record.pop("kept_rmse"), "ideal_rmse": record.pop("ideal_rmse")}
        return record


@dataclass(frozen=True)
class Judgement:
    """The judgement of a calibrated model of numbers by test rows.

    Attributes:
        level: of the intervals that are looked at most.
        rows: how many test rows.
        together: all outputs at once.
        outputs: each of several outputs; the one that there is otherwise.
        novelty: share of the rows of a novelty above 1, as 5 % of the reference rows have; None where it is not known.
    """

    level: float
    rows: int
    together: JudgedOutput
    outputs: tuple[JudgedOutput, ...]
    novelty: float | None

    def measures(self) -> dict[str, float]:
        """Return measures of all outputs together, and of each of several with its name in brackets, as `gain[price]`.

        What depends on a unit (RMSE, MAE, widths) is given only of outputs on their own.
        """
        together = self.together.measures()
        if len(self.outputs) == 1:
            return together
        of_units = ("rmse", "mae", "width", "nll")
        measures = {name: value for name, value in together.items() if not name.startswith(of_units)}
        for output in self.outputs:
            measures |= {f"{name}[{output.name}]": value for name, value in output.measures().items()}
        return measures

    def require(self, text: str) -> tuple[Requirement, ...]:
        """Hold measures against bounds, as in `"coverage90>=0.85, gain>=0"`; `met` says whether each is kept."""
        return parsed_requirements(text, self.measures())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        outputs = {output.name: output.to_dict() for output in self.outputs} if len(self.outputs) > 1 else {}
        record = {**self.together.to_dict(), "level": self.level, "rows": self.rows, "novelty": self.novelty}
        return {**record, "outputs": outputs, "measures": self.measures()}


def judge(
    prediction: Prediction,
    target: Tensor,
    *,
    level: float = 0.9,
    names: Sequence[str] = (),
    units: Sequence[str] = (),
    inputs: Any = None,
    places: Sequence[int | str] | None = None,
) -> Judgement:
    """Judge predictions by targets of rows used for nothing else, both `(N, ...)`.

    Args:
        prediction: of the test rows.
        target: their true values.
        level: of the intervals.
        names: of the outputs; those of the calibration's target columns where there are none.
        units: of the outputs, or one for all.
        inputs: columns to look along, one value per row: a mapping, a DataFrame, or an array `(N, columns)`.
        places: what the rows are called, such as the lines of a file; counted from 0 where None.
    """
    mean, calibration = prediction.mean, prediction.calibration
    several = mean.dim() == 2 and mean.shape[1] > 1  # a map has one unit
    count = mean.shape[1] if several else 1
    if names and len(names) != count:
        raise ArgumentError(f"expected {count} names of outputs; found {len(names)}: {list(names)}.")
    if len(units) not in (0, 1, count):
        raise ArgumentError(
            f"expected one unit, or one for each of {count} outputs; found {len(units)}: {list(units)}."
        )
    columns = (calibration.columns or {}).get("targets", ())
    numbered = ("target",) if count == 1 else tuple(f"output {k}" for k in range(count))
    known = tuple(names) or (tuple(columns) if len(columns) == count else numbered)
    unit = list(units) if len(units) == count else [*units, ""][:1] * count
    rows = _Rows(
        prediction,
        as_output(mean, in_order(target, calibration.columns, "targets")),
        level,
        input_columns(inputs, len(mean)),
        places,
        None if prediction.novelty is None else prediction.novelty.detach().cpu().double().numpy(),
    )
    if several:
        together = rows.judged(None, "all outputs together", "", pooled=True)
        outputs = tuple(rows.judged(k, known[k], unit[k]) for k in range(count))
    else:
        together = rows.judged(None, known[0], unit[0])
        outputs = (together,)
    share = None if rows.novelty is None else float((rows.novelty > 1).mean())
    return Judgement(level, len(mean), together, outputs, share)


@dataclass(frozen=True)
class _Rows:
    """The rows that are judged, with what was asked for."""

    prediction: Prediction
    target: Tensor
    level: float
    columns: Inputs
    places: Sequence[int | str] | None
    novelty: Floats | None

    def judged(self, output: int | None, name: str, unit: str, *, pooled: bool = False) -> JudgedOutput:
        """Judge one index of axis 1, or all of them; `pooled` over units that may differ."""
        p, calibration = self.prediction, self.prediction.calibration
        parts = self._parts(output)
        values = self._values(parts)
        error = values.target - values.mean
        inside = (values.low <= values.target) & (values.target <= values.high)
        z = student_quantile((1 + self.level) / 2, calibration.constant_degrees)
        sizes = (np.full_like(error, np.nan),) * 2 if pooled else (error, values.std)
        by_value = Outcomes(self.level, values.rows, *sizes, inside, np.abs(error) <= z * values.constant)
        deciles = () if pooled else by_deviation(by_value)
        inputs = by_input(by_value, self.columns, {} if pooled else {"prediction": values.mean})
        worth = verdict(p, self.target, output=output)
        if self.level == _LEVEL:
            worth = replace(worth, slices=off_slices([group for part in (deciles, *inputs) for group in part]))
        return JudgedOutput(
            name=name,
            unit=unit,
            verdict=worth,
            evaluations=compare(p, self.target, level=self.level, output=output),
            label=in_use(calibration),
            deciles=deciles,
            inputs=inputs,
            strange=() if self.novelty is None else by_novelty(by_value, self.novelty),
            worst=() if pooled else tuple(self._worst(parts)),
            kept=() if pooled else _SHARES,
            kept_rmse=() if pooled else _kept_rmse(error, values.std),
            ideal_rmse=() if pooled else _kept_rmse(error, np.abs(error)),
            values=values,
        )

    def _parts(self, output: int | None) -> dict[str, Tensor]:
        """Return predictions, ends, targets and constant of an output, each of one shape `(N, ...)`."""
        p, unit = self.prediction, self.prediction.calibration.target
        constant = constant_of(p)
        constant = constant if unit is None else unit.moments(p.output, constant)[1]
        low, high = p.interval(self.level)
        parts = {"mean": p.mean, "std": p.std, "low": low, "high": high, "target": self.target}
        parts["constant"] = constant.sqrt()
        return {name: part if output is None else part[:, output] for name, part in parts.items()}

    def _values(self, parts: Mapping[str, Tensor]) -> Values:
        """Return the values of all rows, or of very many an even choice."""
        size = parts["mean"].numel()
        flat = np.linspace(0, size - 1, min(size, _MOST_VALUES)).round().astype(np.intp)
        index = torch.from_numpy(flat)
        chosen = {name: part.detach().cpu().flatten()[index].double().numpy() for name, part in parts.items()}
        return Values(rows=flat // max(1, size // len(parts["mean"])), **chosen, of=size)

    def _worst(self, parts: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
        """Yield the rows furthest from their prediction, in predicted deviations, each once; of all rows."""
        flat = {name: part.flatten() for name, part in parts.items()}
        error = (flat["target"] - flat["mean"]).abs()
        off, width = error / flat["std"], max(1, len(error) // len(self.target))
        first: dict[int, int] = {}
        for index in off.topk(min(len(off), 50 * _WORST)).indices.tolist():
            first.setdefault(index // width, index)
        for row, index in list(first.items())[:_WORST]:
            record: dict[str, Any] = {"row": row if self.places is None else self.places[row]}
            record |= {name: float(flat[name][index]) for name in ("target", "mean", "low", "high")}
            record["deviations"] = float(off[index])
            record["constant_deviations"] = float(error[index] / flat["constant"][index])
            if self.novelty is not None:
                record["novelty"] = float(self.novelty[row])
            at = np.array([row])
            yield {**record, "inputs": {name: float(self.columns.at(name, at)[0]) for name in self.columns.columns}}


def _kept_rmse(error: Floats, by: Floats) -> tuple[float, ...]:
    """Return the RMSE of the rows that are kept, at every share, where those of largest `by` go first."""
    if np.ptp(by) <= 1e-6 * by.max():  # nothing to choose by
        return (float(np.sqrt(np.square(error).mean())),) * len(_SHARES)
    squares = np.square(error)[np.argsort(by, kind="stable")]
    sums = np.cumsum(squares)
    counts = [max(1, round(share * len(squares))) for share in _SHARES]
    return tuple(float(np.sqrt(sums[count - 1] / count)) for count in counts)


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
class SetScores:
    """The coverage and size of prediction sets at one level.

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
    """The errors among the rows that a rule keeps.

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
    """The judgement of a calibrated classifier by test rows.

    Attributes:
        verdict: beside one temperature for all rows.
        scores: of what is in use, of one temperature, and of the model's own softmax.
        ranking: AUROC of telling right from wrong rows by the confidence; None where all rows are right, or wrong.
        probabilities: `(N, K)` each, by label.
        labels: `(N,)`.
        strange: share of the rows of a novelty above 1, as 5 % of the reference rows have; None where it is not known.
        prediction: what was judged.
        rule: what the calibration's rule does; None where it has none.
        sets: of the level that was asked for; None where the calibration has none.
    """

    verdict: ClassVerdict
    scores: tuple[ClassScores, ...]
    ranking: float | None
    probabilities: dict[str, Tensor] = field(repr=False)
    labels: Tensor = field(repr=False)
    strange: float | None
    prediction: ClassPrediction = field(repr=False)
    rule: RuleScores | None
    sets: SetScores | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return calibration, worth, ranking, sets and rule, each with a grade, as far as they are known."""
        findings = [*findings_of(self.verdict)]
        findings += [] if self.ranking is None else [_ranking(self.ranking)]
        findings += [] if self.sets is None else [_sets(self.sets)]
        findings += [] if self.rule is None else [_rule(self.rule)]
        return tuple(findings)

    @property
    def grade(self) -> Grade:
        """Return the worst grade of calibration, sets and rule; bad where one temperature is better, too."""
        calibration, worth, *_ = self.findings
        promises = [] if self.sets is None else [_sets(self.sets).grade]
        promises += [] if self.rule is None else [_rule(self.rule).grade]
        grades: list[Grade] = [calibration.grade, "bad" if worth.grade == "bad" else "good", *promises]
        return max(grades, key=("good", "weak", "bad").index)

    def sets_at(self, level: float) -> SetScores | None:
        """Score sets at a level; None where the calibration makes none."""
        if self.prediction.calibration.sets is None:
            return None
        members, y = self.prediction.prediction_set(level), self.labels.cpu()
        coverage, size = float(set_coverage(members, y)), float(members.double().sum(1).mean())
        return SetScores(level, coverage, (coverage * (1 - coverage) / len(y)) ** 0.5, size)

    def measures(self, levels: Iterable[float] = ()) -> dict[str, float]:
        """Return every measure of what is in use by its name; sets at the level asked for, and at `levels`."""
        used = asdict(self.scores[0])
        del used["label"]
        measures = {"rows": float(self.verdict.rows), **used, "gain": self.verdict.gain}
        measures |= {} if self.ranking is None else {"auroc": self.ranking}
        measures |= {} if self.rule is None else {"kept": self.rule.kept, "kept_error": self.rule.errors}
        for sets in (self.sets, *map(self.sets_at, levels)):
            if sets is not None:
                percent = f"{100 * sets.level:.4g}"
                measures |= {f"coverage{percent}": sets.coverage, f"size{percent}": sets.size}
        return measures

    def require(self, text: str) -> tuple[Requirement, ...]:
        """Hold measures against bounds, as in `"accuracy>=0.9, ece<=0.05"`; `met` says whether each is kept."""
        named = [_LEVELLED.fullmatch(item.measure) for item in parsed_requirements(text)]
        return parsed_requirements(text, self.measures(int(match["level"]) / 100 for match in named if match))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; all but the probabilities of every row."""
        return {
            "verdict": {**asdict(self.verdict), "text": str(self.verdict), "grade": self.grade},
            "scores": [asdict(row) for row in self.scores],
            "ranking": self.ranking,
            "rows": self.verdict.rows,
            "strange": self.strange,
            "sets": self.sets and asdict(self.sets),
            "rule": self.rule and asdict(self.rule),
            "findings": [asdict(finding) for finding in self.findings],
            "measures": self.measures(),
        }


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
    both = bool(right.any()) and not bool(right.all())
    seen = prediction.calibration.seen
    warn_of_seen(seen, prediction.logits, y, stacklevel=2)
    judgement = ClassJudgement(
        verdict=ClassVerdict(
            rows=len(y),
            fitted="own rows" if fitted_to(seen, prediction.logits, y) else "other rows",
            gain=float(gain.mean()),
            gain_error=standard_error(gain),
            nll=scores[0].nll,
            accuracy=scores[0].accuracy,
            ece=scores[0].ece,
        ),
        scores=scores,
        ranking=float(auroc(prediction.confidence, right)) if both else None,
        probabilities={label: logs.exp() for label, logs in ways.items()},
        labels=y,
        strange=None if prediction.novelty is None else float((prediction.novelty > 1).double().mean()),
        prediction=prediction,
        rule=_ruled(prediction, right),
    )
    try:
        return replace(judgement, sets=judgement.sets_at(_LEVEL if level is None else level))
    except ArgumentError:
        if level is not None:
            raise
        return judgement


def _ruled(prediction: ClassPrediction, right: Tensor) -> RuleScores | None:
    rule = prediction.calibration.rule
    if rule is None:
        return None
    wrong = ~right[prediction.kept()]
    errors = float(wrong.double().mean()) if len(wrong) else 0.0
    return RuleScores(rule.risk, len(wrong) / len(right), errors, (errors * (1 - errors) / max(len(wrong), 1)) ** 0.5)


def _scored(label: str, p: Tensor, y: Tensor) -> ClassScores:
    risk = selective_risk(-p.amax(1), p.argmax(1) != y)
    scores = cross_entropy(p, y), brier(p, y), accuracy(p, y), ece(p, y, mass=True), risk
    return ClassScores(label, *map(float, scores))


def findings_of(verdict: ClassVerdict) -> tuple[Finding, Finding]:
    """Return calibration and worth, each with a grade."""
    return _calibration(verdict), _worth(verdict)


def _calibration(v: ClassVerdict) -> Finding:
    value = f"{100 * v.ece:.1f} %"
    text = f"probabilities are off by {value} on average over {v.rows:,} rows {said_of_rows(v.fitted)}, "
    chance = v.ece_by_chance
    exact = v.ece <= chance <= ERROR_BAD  # among enough rows
    grade: Grade = "good" if exact or v.ece <= ERROR_GOOD else "weak" if v.ece <= max(ERROR_BAD, chance) else "bad"
    advice = {"good": "They can be taken as they are.", "bad": "Do not rely on them. Calibrate on rows like these."}
    weak = "Take them as rough, or calibrate on more rows like these."
    if v.ece > ERROR_BAD:
        weak = "These rows are too few to tell: exact probabilities would show as much by chance. Evaluate on more."
    text += f"by chance up to {100 * chance:.1f} %; accuracy {100 * v.accuracy:.1f} %"
    return Finding("Do the probabilities hold?", grade, text, value, advice.get(grade, weak))


def _worth(v: ClassVerdict) -> Finding:
    about, size = "Better than one temperature?", f"{abs(v.gain):.4f} nats (± {v.gain_error:.4f})"
    value = f"{'-' if v.gain < 0 else '+'}{size}"
    if v.better is None or abs(v.gain) < GAIN_GOOD:
        text = f"no better than one temperature, {value}" if not v.better else f"better by {size}: negligible"
        return Finding(about, "weak", text, value, "One temperature for all rows would do as well on rows like these.")
    if v.better:
        return Finding(about, "good", f"better than one temperature by {size}", value, "It says which rows to trust.")
    return Finding(about, "bad", f"worse than one temperature by {size}", value, "Calibrate on rows like these.")


def _ranking(ranking: float) -> Finding:
    grade: Grade = "good" if ranking >= RANKING_GOOD else "weak" if ranking >= RANKING_BAD else "bad"
    words = {"good": "it tells", "weak": "it hardly tells", "bad": "it does not tell"}
    advice = {"good": "Reject or check rows of low confidence first.", "weak": "Low confidence is a hint, no more."}
    text = f"{words[grade]} right rows from wrong ones: AUROC {ranking:.2f}"
    return Finding("Does it find errors?", grade, text, f"{ranking:.2f}", advice.get(grade, "Do not reject by it."))


def _sets(sets: SetScores) -> Finding:
    value = f"{100 * sets.coverage:.1f} % (± {100 * sets.coverage_error:.1f})"
    text = f"{100 * sets.level:g} % sets hold {value} of the labels, with {sets.size:.2f} classes on average"
    short, error = sets.level - sets.coverage, sets.coverage_error
    grade: Grade = "good" if short <= 2 * error else "weak" if short <= 0.05 + 2 * error else "bad"
    advice = "They can be taken as they are." if grade == "good" else "Use conformal() on rows like these."
    return Finding("Do the sets hold?", grade, text, value, advice)


def _rule(rule: RuleScores) -> Finding:
    about, value = "Does the rule hold?", f"{100 * rule.errors:.2f} % (± {100 * rule.errors_error:.2f})"
    if not rule.kept:
        return Finding(about, "weak", "the rule keeps no row", "0 %", "Use reject() on more rows.")
    text = f"{100 * rule.kept:.1f} % of the rows are kept, {value} of them wrong; promised: below {100 * rule.risk:g} %"
    over = rule.errors - rule.risk
    grade: Grade = "good" if over <= 0 else "weak" if over <= 2 * rule.errors_error else "bad"
    advice = {"good": "The model can decide on kept rows.", "weak": "It may be chance: evaluate on more rows."}
    return Finding(about, grade, text, value, advice.get(grade, "Use reject() on rows like these."))
