"""All that test rows say about a calibrated model, output by output: what `evaluate` prints and a page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.calibration.record import Calibration
from latedrop.calibration.targets import as_output
from latedrop.calibration.verdict import Verdict, off_slices
from latedrop.data.names import in_order
from latedrop.errors import ArgumentError
from latedrop.evaluation.evaluation import Evaluation, compare, constant_std, in_use, verdict
from latedrop.evaluation.requirements import Requirement, checked_requirements
from latedrop.metrics.groups import (
    Floats,
    Group,
    Held,
    Inputs,
    by_deviation,
    by_input,
    by_novelty,
    input_columns,
)
from latedrop.prediction.prediction import Prediction
from latedrop.quantiles import student_quantile

__all__ = ["JudgedOutput", "Judgement", "Values", "judge", "output_names", "output_units"]

_MOST_VALUES = 200_000
_WORST = 8
_SHARES = tuple(np.linspace(1.0, 0.1, 19).round(2).tolist())


@dataclass(frozen=True)
class Values:
    """The values of one output, flat; of very many an even choice.

    Attributes:
        rows: the row that each belongs to.
        mean: predictions.
        std: predicted standard deviations.
        low: lower ends of the intervals.
        high: upper ends.
        target: true values.
        constant: the standard deviations of one constant variance; None where the constant is not known.
        of: how many values there are in all.
    """

    rows: npt.NDArray[np.intp]
    mean: Floats
    std: Floats
    low: Floats
    high: Floats
    target: Floats
    constant: Floats | None
    of: int


@dataclass(frozen=True)
class JudgedOutput:
    """What test rows say about one output, or about all of them.

    Attributes:
        name: of the output.
        unit: of the output; empty where it is not known.
        verdict: None for a calibration that does not know its constant.
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
    verdict: Verdict | None
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
        """The evaluation of what is in use."""
        return next((row for row in self.evaluations if row.label == self.label), self.evaluations[0])

    def measures(self) -> dict[str, float]:
        """Every measure of what is in use by its name; `coverage90` and `width90` stand for all levels in percent."""
        used = self.used
        found: dict[str, float | None] = {"rows": used.rows, "rmse": used.rmse, "mae": used.mae, "nll": used.nll}
        found |= {"ma": used.ma}
        if self.verdict is not None:
            found |= {"gain": self.verdict.gain, "correlation": self.verdict.correlation}
        for level, observed, width in zip(used.levels, used.observed, used.widths, strict=True):
            found |= {f"coverage{100 * level:.4g}": observed, f"width{100 * level:.4g}": width}
        return {name: float(value) for name, value in found.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain data; all but the values of every row."""
        record = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in ("values", "kept")}
        record["verdict"] = verdict_dict(self.verdict)
        record["evaluations"] = [asdict(row) for row in self.evaluations]
        record |= {name: [asdict(group) for group in record[name]] for name in ("deciles", "strange")}
        record["inputs"] = {groups[0].name: [asdict(group) for group in groups] for groups in self.inputs}
        record["kept"] = {"share": self.kept, "rmse": record.pop("kept_rmse"), "ideal_rmse": record.pop("ideal_rmse")}
        return record


@dataclass(frozen=True)
class Judgement:
    """What test rows say about a calibrated model.

    Attributes:
        level: of the intervals that are looked at most.
        rows: how many test rows.
        together: all outputs at once.
        outputs: each of several outputs; the one that there is otherwise.
        novelty: share of the rows beyond nine in ten of the validation rows; None where it is not known.
    """

    level: float
    rows: int
    together: JudgedOutput
    outputs: tuple[JudgedOutput, ...]
    novelty: float | None

    def measures(self) -> dict[str, float]:
        """By name: of all outputs together, and of each of several with its name in brackets, as `gain[price]`.

        What depends on a unit (RMSE, MAE, widths) is given only of outputs on their own.
        """
        found = self.together.measures()
        if len(self.outputs) == 1:
            return found
        found = {name: value for name, value in found.items() if not name.startswith(("rmse", "mae", "width", "nll"))}
        for output in self.outputs:
            found |= {f"{name}[{output.name}]": value for name, value in output.measures().items()}
        return found

    def require(self, text: str) -> tuple[Requirement, ...]:
        """Hold measures against bounds, as in `"coverage90>=0.85, gain>=0"`; `met` says whether each is kept."""
        return checked_requirements(text, self.measures())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
    evaluations: Sequence[Evaluation] | None = None,
    label: str | None = None,
    weights: Any = None,
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
        evaluations: in the place of those of `compare`, for all outputs together.
        label: which of these evaluations is in use.
        weights: what each row counts, `(N,)`, in verdict and scores; groups and figures show rows as they are.
    """
    mean = prediction.mean
    target = as_output(mean, in_order(target, prediction.calibration.columns, "targets"))
    several = _several(mean)
    known = output_names(prediction.calibration, mean.shape[1] if several else 1, names)
    unit = output_units(len(known), units)
    columns = input_columns(inputs, len(mean))
    about = _Rows(prediction, target, level, columns, places, label, weights)
    name, shared = (known[0], unit[0]) if not several else ("all outputs together", "")
    together = about.judged(None, name, shared, evaluations)
    outputs = tuple(about.judged(k, known[k], unit[k]) for k in range(len(known))) if several else (together,)
    strange = prediction.novelty
    share = None if strange is None else float((strange > 1).double().mean())
    return Judgement(level, len(mean), together, outputs, share)


def output_names(calibration: Calibration, count: int, names: Sequence[str] = ()) -> tuple[str, ...]:
    """What the outputs are called: as asked for, as their columns, or numbered."""
    if names:
        if len(names) != count:
            raise ArgumentError(f"expected {count} names of outputs; found {len(names)}: {list(names)}.")
        return tuple(names)
    columns = (calibration.columns or {}).get("targets", ())
    if len(columns) == count:
        return tuple(columns)
    return ("target",) if count == 1 else tuple(f"output {k}" for k in range(count))


def output_units(count: int, units: Sequence[str]) -> list[str]:
    """A unit for each output: as asked for, one for all, or none."""
    if len(units) not in (0, 1, count):
        raise ArgumentError(
            f"expected one unit, or one for each of {count} outputs; found {len(units)}: {list(units)}."
        )
    return list(units) if len(units) == count else [units[0] if units else ""] * count


def verdict_dict(found: Verdict | None) -> dict[str, Any] | None:
    """A verdict as plain data, with its grades and words."""
    if found is None:
        return None
    grades = {finding.about: asdict(finding) for finding in found.findings}
    more = {"correlation_error": found.correlation_error, "grade": found.grade, "text": str(found)}
    return {**asdict(found), **more, "findings": grades}


@dataclass(frozen=True)
class _Rows:
    """What is judged."""

    prediction: Prediction
    target: Tensor
    level: float
    columns: Inputs
    places: Sequence[int | str] | None
    label: str | None
    weights: Any

    def judged(
        self, output: int | None, name: str, unit: str, evaluations: Sequence[Evaluation] | None = None
    ) -> JudgedOutput:
        """One index of axis 1, or all of them."""
        p, known = self.prediction, self.prediction.calibration.constant is not None
        pooled = output is None and _several(p.mean)  # over units that may differ
        rows = evaluations
        if rows is None:
            rows = compare(p, self.target, level=self.level, output=output, weights=self.weights)
        parts = self._parts(output)
        values = self._chosen(parts)
        error = values.target - values.mean
        inside = (values.low <= values.target) & (values.target <= values.high)
        z = student_quantile((1 + self.level) / 2, p.calibration.constant_degrees)
        same = None if values.constant is None else np.abs(error) <= z * values.constant
        blank = np.full_like(error, np.nan)
        held = Held(self.level, values.rows, *((blank, blank) if pooled else (error, values.std)), inside, same)
        strange = None if p.novelty is None else p.novelty.detach().cpu().double().numpy()
        deciles = () if pooled else by_deviation(held)
        inputs = by_input(held, self.columns, {} if pooled else {"prediction": values.mean})
        found = verdict(p, self.target, output=output, weights=self.weights) if known else None
        if found is not None and self.level == 0.9:
            groups = [group for part in (deciles, *inputs) for group in part]
            found = replace(found, slices=off_slices(groups))
        return JudgedOutput(
            name=name,
            unit=unit,
            verdict=found,
            evaluations=tuple(rows),
            label=self.label or in_use(p.calibration),
            deciles=deciles,
            inputs=inputs,
            strange=() if strange is None else by_novelty(held, strange),
            worst=() if pooled else tuple(self._worst(parts, strange)),
            kept=() if pooled else _SHARES,
            kept_rmse=() if pooled else _kept(error, values.std),
            ideal_rmse=() if pooled else _kept(error, np.abs(error)),
            values=values,
        )

    def _parts(self, output: int | None) -> dict[str, Tensor]:
        """Everything about every value of an output, each of one shape `(N, ...)`."""
        p = self.prediction
        low, high = p.interval(self.level)
        parts = {"mean": p.mean, "std": p.std, "low": low, "high": high, "target": self.target}
        if p.calibration.constant is not None:
            parts["constant"] = constant_std(p)
        return {name: part if output is None else part[:, output] for name, part in parts.items()}

    def _chosen(self, parts: Mapping[str, Tensor]) -> Values:
        size = parts["mean"].numel()
        flat = np.linspace(0, size - 1, min(size, _MOST_VALUES)).round().astype(np.intp)
        index = torch.from_numpy(flat)
        found = {name: part.detach().cpu().flatten()[index].double().numpy() for name, part in parts.items()}
        rows, constant = flat // max(1, size // len(parts["mean"])), found.pop("constant", None)
        return Values(rows=rows, **found, constant=constant, of=size)

    def _worst(self, parts: Mapping[str, Tensor], strange: Floats | None) -> list[dict[str, Any]]:
        """The rows furthest from their prediction, in predicted deviations, each once; of all rows."""
        error = (parts["target"] - parts["mean"]).abs().flatten()
        off = error / parts["std"].flatten()
        width = max(1, len(off) // len(self.target))
        first: dict[int, int] = {}
        for index in off.topk(min(len(off), 50 * _WORST)).indices.tolist():
            first.setdefault(index // width, index)
        found = []
        for row, index in list(first.items())[:_WORST]:
            record: dict[str, Any] = {"row": row if self.places is None else self.places[row]}
            record |= {name: float(parts[name].flatten()[index]) for name in ("target", "mean", "low", "high")}
            record["deviations"] = float(off[index])
            if "constant" in parts:
                record["constant_deviations"] = float(error[index] / parts["constant"].flatten()[index])
            if strange is not None:
                record["novelty"] = float(strange[row])
            at = np.array([row])
            record["inputs"] = {name: float(self.columns.at(name, at)[0]) for name in self.columns.columns}
            found.append(record)
        return found


def _several(mean: Tensor) -> bool:
    """Whether each index of axis 1 is an output of its own; a map has one unit."""
    return mean.dim() == 2 and mean.shape[1] > 1


def _kept(error: Floats, by: Floats) -> tuple[float, ...]:
    """RMSE of the rows that are kept, at every share, where those of largest `by` go first."""
    if np.ptp(by) <= 1e-6 * by.max():  # nothing to choose by
        return (float(np.sqrt(np.square(error).mean())),) * len(_SHARES)
    squares = np.square(error)[np.argsort(by, kind="stable")]
    sums = np.cumsum(squares)
    counts = [max(1, round(share * len(squares))) for share in _SHARES]
    return tuple(float(np.sqrt(sums[count - 1] / count)) for count in counts)
