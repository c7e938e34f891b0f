"""The worth of a measure of uncertainty on test rows.

An `Evaluation` holds the metrics of one variance, with the calibration curve `pi(a)` that belongs to it; `compare`
makes those of the raw, the scaled and the relaxed variance of a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import share_error, standard_error
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.scale import TradeoffPoint, along_outputs
from latedrop.calibration.seen import fitted_to, warn_of_seen
from latedrop.calibration.targets import Transform, as_output, warn_of_poor_fit
from latedrop.calibration.verdict import Verdict, correlation, judged, losses
from latedrop.data.batches import in_order
from latedrop.errors import ArgumentError
from latedrop.metrics import align_target
from latedrop.metrics.levels import checked_levels, even_levels
from latedrop.metrics.tails import Tail
from latedrop.network.sites import Rate
from latedrop.prediction.prediction import Prediction
from latedrop.quantiles import ConformalScores, student_quantile
from latedrop.records import record

__all__ = [
    *("Evaluation", "compare", "constant_of", "evaluate", "in_model_unit", "in_use", "likelihood", "verdict"),
]


@record
@dataclass(frozen=True)
class Evaluation:
    """The worth of one measure of uncertainty on test rows.

    Attributes:
        label: its name in tables and legends.
        rows: how many test rows.
        rate: the dropout rate; None where there is no dropout.
        scale: what the variance was multiplied by, one per output or one for all; None where there is no dropout.
        rmse: in the target's unit.
        nll: with its constant, in the target's unit; None for intervals that are no Gaussian's.
        ma: miscalibration area.
        level: of the interval that `coverage` and `width` are about.
        coverage: fraction of targets inside it.
        width: its mean width, in the target's unit.
        levels: of the calibration curve, `(L,)`.
        observed: the calibration curve, `(L,)`.
        correlation: rank correlation of standard deviation and size of the error, 0 for a constant; None for intervals.
            Where targets were transformed for training, it is that of the model's unit.
        mae: mean size of the error, in the target's unit.
        coverage_error: standard error of the coverage over rows.
        gain: nats per value by which the NLL is better than that of the constant; None where there is none to compare.
        gain_error: its standard error over rows.
        widths: mean width of the intervals at each level, `(L,)`, in the target's unit.
    """

    label: str
    rows: int
    rate: Rate | None
    scale: tuple[float, ...] | None
    rmse: float
    nll: float | None
    ma: float
    level: float
    coverage: float
    width: float
    levels: tuple[float, ...]
    observed: tuple[float, ...]
    correlation: float | None = None
    mae: float | None = None
    coverage_error: float | None = None
    gain: float | None = None
    gain_error: float | None = None
    widths: tuple[float, ...] = ()


_LEVELS: list[float] = even_levels(99).tolist()


def evaluate(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    *,
    label: str,
    rate: Rate | None = None,
    scale: Sequence[float] | None = None,
    level: float = 0.9,
    interval: Callable[[float], tuple[Tensor, Tensor]] | None = None,
    levels: Sequence[float] = _LEVELS,
    constant: tuple[Tensor, float | None] | None = None,
    degrees: float | None = None,
    unit: Transform | None = None,
    output: int | None = None,
) -> Evaluation:
    """Score `(mean, variance)` against the target, all `(N, ...)`.

    With `interval`, a function from a level to lower and upper ends, the curve, the coverage and the width are
    those of its intervals, and there is no NLL: intervals alone are no density. `constant` is a variance to beat, with
    the degrees of freedom of its tails; `degrees` are those of the variance itself. `unit` is how the targets were
    transformed for training: all else is then in the model's unit, the scores are in that of the targets. `output`
    picks one index of axis 1.

    >>> row = evaluate(torch.zeros(4), torch.ones(4), torch.tensor([0.1, -0.5, 1.0, 3.0]), label="raw")
    >>> row.coverage, round(row.nll, 3)
    (0.75, 2.201)
    """
    levels = checked_levels(levels).tolist()
    truth = align_target(mean, target)
    aim = as_output(mean, truth if unit is None else unit.forward(truth))
    truth, centre = (aim, mean) if unit is None else (truth, unit.moments(mean, variance)[0])
    error = (aim - mean).double()

    def by_row(values: Tensor) -> Tensor:
        return _of(values, output).double().reshape(len(mean), -1).mean(1)

    def mean_of(values: Tensor) -> float:
        return float(by_row(values).mean())

    def central(level: float) -> tuple[Tensor, Tensor]:
        half = student_quantile((1 + level) / 2, degrees) * variance.double().sqrt()
        return mean - half, mean + half

    def judged_at(level: float) -> tuple[Tensor, float]:
        """Return which share of each row the intervals of a level hold, `(N,)`, and their mean width."""
        low, high = (interval or central)(level)
        inside = by_row((low <= aim) & (aim <= high))
        low, high = (low, high) if unit is None else (unit.inverse(low), unit.inverse(high))
        return inside, mean_of(high - low)

    scores: dict[str, Any] = {"nll": None}
    if interval is None:
        by_value = Tail.unit(degrees).nll(error, variance)
        scores["nll"] = mean_of(by_value) - (0.0 if unit is None else mean_of(unit.log_slope(truth)))
        scores["correlation"] = correlation(_of(error, output), _of(variance, output))
        if constant is not None:
            gain = by_row(Tail.unit(constant[1]).nll(error, constant[0].to(error)) - by_value)
            scores |= {"gain": float(gain.mean()), "gain_error": standard_error(gain)}
    inside, width = judged_at(level)
    curve = [(float(share.mean()), wide) for share, wide in map(judged_at, levels)]
    observed, widths = zip(*curve, strict=True)
    return Evaluation(
        label=label,
        rows=len(mean),
        rate=rate,
        scale=None if scale is None else tuple(scale),
        rmse=math.sqrt(mean_of((truth - centre).double().square())),
        ma=float((torch.tensor(observed) - torch.tensor(levels)).abs().mean()),
        level=level,
        coverage=float(inside.mean()),
        width=width,
        levels=tuple(levels),
        observed=observed,
        mae=mean_of((truth - centre).abs()),
        coverage_error=share_error(inside),
        widths=widths,
        **scores,
    )


def compare(
    prediction: Prediction, target: Tensor, *, level: float = 0.9, output: int | None = None
) -> tuple[Evaluation, ...]:
    """Evaluate the raw, scaled and relaxed variance of one prediction, its fitted intervals if any, and the constant.

    Terms have no raw variance; what they fit goes by their name. `output` is one index of axis 1; all outputs together
    where None. RMSE, NLL and width are in the unit of `target`.
    """
    calibration = prediction.calibration
    target = in_order(target, calibration.columns, "targets")
    plain, aim = in_model_unit(prediction, target)
    record = replace(plain.calibration, intervals=None)
    if output is None:
        warn_of_poor_fit(plain.mean, aim, "test rows", per_output=record.per_output, stacklevel=2)
        warn_of_seen(record.seen, plain.mean, aim, stacklevel=2)
    constant = constant_of(plain), record.constant_degrees

    def row(label: str, variance: Tensor, **options: Any) -> Evaluation:
        options |= {"level": level, "output": output, "unit": calibration.target}
        return evaluate(plain.mean, variance, target, label=label, **options)

    def scale_of(scales: tuple[float, ...]) -> tuple[float, ...]:
        return scales if output is None or len(scales) == 1 else (scales[output],)

    rows = []
    for label, variant in _variants(record).items():
        options: dict[str, Any] = {"rate": record.rate, "scale": scale_of(variant.chosen()[0])}
        options |= {"degrees": record.degrees, "constant": constant}
        rows.append(row(label, variant.variance(plain.raw_variance), **options))
    fitted = calibration.intervals
    if fitted is not None:
        # n conformal scores reach levels up to n / (n + 1).
        reach = min(len(s) / (len(s) + 1) for s in fitted.scores) if isinstance(fitted, ConformalScores) else 1.0
        options = {"rate": record.rate, "scale": scale_of(fitted.scale), "interval": plain.interval}
        rows.append(row(fitted.kind, plain.variance, levels=[a for a in _LEVELS if a <= reach], **options))
    rows.append(row("constant", constant[0], degrees=constant[1], constant=constant))
    return tuple(rows)


def in_use(calibration: Calibration) -> str:
    """Return the label that `compare` gives to what a calibration's predictions use."""
    if calibration.intervals is not None:
        return calibration.intervals.kind
    optimal = "scaled" if calibration.terms is None else "terms"
    return {"optimal": optimal, "relaxed": "relaxed"}.get(str(calibration.choice), _name_of(calibration.choice))


def verdict(prediction: Prediction, target: Tensor, *, output: int | None = None) -> Verdict:
    """Judge the variance on test rows beside a constant, the validation rows' mean squared error.

    `output` is one index of axis 1; all outputs together where None. Where targets were transformed for training, both
    are compared in the model's unit.
    """
    target = in_order(target, prediction.calibration.columns, "targets")
    plain, target = in_model_unit(prediction, target)
    record = plain.calibration
    parts = (target - plain.mean, plain.variance, constant_of(plain))
    error, variance, constant = (_of(part, output) for part in parts)
    gain = losses(error, constant, Tail.unit(record.constant_degrees))
    gain = gain - losses(error, variance, Tail.unit(record.degrees))

    def within(level: float) -> Tensor:
        try:
            low, high = plain.interval(level)
        except ArgumentError:  # more than conformal scores can tell
            return torch.full_like(_of(target, output), level)
        return _of((low <= target) & (target <= high), output)

    fitted = "own rows" if fitted_to(record.seen, plain.mean, target) else "other rows"
    return judged(error, variance, constant, fitted=fitted, inside=within, gain=gain)


def likelihood(prediction: Prediction, target: Tensor) -> float:
    """Return the NLL of the targets, in their unit."""
    plain, unit = prediction.in_model_unit(), prediction.calibration.target
    truth = align_target(plain.mean, target)
    error = (truth if unit is None else unit.forward(truth)) - plain.mean
    loss = Tail.unit(plain.calibration.degrees).nll(error, plain.variance).mean()
    return float(loss if unit is None else loss - unit.log_slope(truth).mean())


def in_model_unit(prediction: Prediction, target: Tensor) -> tuple[Prediction, Tensor]:
    """Return a prediction and its targets, shaped alike, in the unit that the model was trained in."""
    target, unit = align_target(prediction.output, target), prediction.calibration.target
    return prediction.in_model_unit(), as_output(prediction.output, target if unit is None else unit.forward(target))


def _variants(record: Calibration) -> dict[str, Calibration]:
    """Return the variances that are compared, by name."""
    raw = TradeoffPoint((1.0,) * len(record.scales), (0.0,) * len(record.floors), math.nan, math.nan)
    variants = {} if record.terms is not None else {"raw": replace(record, choice=raw)}
    variants["scaled" if record.terms is None else "terms"] = record.with_choice("optimal")
    variants["relaxed"] = record.with_choice("relaxed")
    if not isinstance(record.choice, str):
        variants[_name_of(record.choice)] = record
    return variants


def constant_of(prediction: Prediction) -> Tensor:
    """Return the constant variance to beat, in the shape of the prediction."""
    constant = prediction.calibration.constant
    if constant is None:
        raise ArgumentError(
            "expected a calibration that knows its constant variance; found one without. Calibrate again."
        )
    values = torch.tensor(constant, dtype=torch.float64)
    return torch.zeros_like(prediction.mean) + along_outputs(values, prediction.mean)


def _name_of(choice: Choice) -> str:
    return f"scale {choice:g}" if isinstance(choice, float) else "step between the scales"


def _of(values: Tensor, output: int | None) -> Tensor:
    return values if output is None else values[:, output]
