"""What a measure of uncertainty is worth on test rows.

An `Evaluation` holds the metrics of one variance, with the calibration curve `pi(a)` that belongs to it; `compare`
makes those of the raw, the scaled and the relaxed variance of a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.calibration.cross_validation import CrossValidation, share_error, standard_error
from latedrop.calibration.intervals import Conformal
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.scale import TradeoffPoint, along_outputs
from latedrop.calibration.seen import fitted_to, warn_of_seen
from latedrop.calibration.targets import as_output, warn_of_poor_fit
from latedrop.calibration.verdict import Verdict, correlation, judged, losses
from latedrop.data.names import in_order
from latedrop.errors import ArgumentError
from latedrop.metrics import align_target
from latedrop.metrics.entries import Array, average, checked_weights
from latedrop.metrics.levels import even_levels
from latedrop.metrics.tails import Tail
from latedrop.network.sites import Rate
from latedrop.prediction.prediction import Prediction
from latedrop.quantiles import student_quantile
from latedrop.records import record

__all__ = [
    "Evaluation",
    "compare",
    "constant_of",
    "constant_std",
    "evaluate",
    "evaluate_intervals",
    "in_model_unit",
    "in_use",
    "inside",
    "likelihood",
    "unscaled",
    "verdict",
]


@record
@dataclass(frozen=True)
class Evaluation:
    """What one measure of uncertainty is worth on test rows.

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

    def observed_errors(self) -> tuple[float, ...]:
        """Standard errors of the calibration curve, `(L,)`: binomial, times what values of one row have in common."""
        common = 1.0
        if self.coverage_error is not None and 0 < self.coverage < 1 and self.rows > 1:
            common = self.coverage_error / math.sqrt(self.coverage * (1 - self.coverage) / (self.rows - 1))
        return tuple(common * _binomial_error(share, self.rows) for share in self.observed)

    def numbers(self) -> dict[str, Any]:
        """All but the curves, as plain data."""
        return {name: value for name, value in asdict(self).items() if name not in ("levels", "observed", "widths")}


def _binomial_error(share: float, rows: int) -> float:
    if not 0 < share < 1 or rows < 2:
        return share_error(torch.full((rows,), round(share), dtype=torch.float64))
    return math.sqrt(share * (1 - share) / (rows - 1))


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
    weights: Array | None = None,
    constant: tuple[Tensor, float | None] | None = None,
    degrees: float | None = None,
) -> Evaluation:
    """Score `(mean, variance)` against the target, all `(N, ...)`.

    With `interval`, a function from a level to lower and upper ends, the curve, the coverage and the width are
    those of its intervals, and there is no NLL: intervals alone are no density. `weights` `(N,)` say what each row
    counts, but for the rank correlation. `constant` is a variance to beat, with the degrees of freedom of its tails;
    `degrees` are those of the variance itself.

    >>> row = evaluate(torch.zeros(4), torch.ones(4), torch.tensor([0.1, -0.5, 1.0, 3.0]), label="raw")
    >>> row.coverage, round(row.nll, 3)
    (0.75, 2.201)
    """
    target = as_output(mean, target)
    nll = None
    gained: dict[str, float] = {}
    counts = None if weights is None else checked_weights(weights, len(mean))
    left = CrossValidation(weights=counts)
    if interval is None:
        error, deviation = (target - mean).double(), variance.double().sqrt()
        by_value = Tail.unit(degrees).nll(error, variance)
        nll = float(_average(by_value, weights))
        reaches = [student_quantile((1 + a) / 2, degrees) for a in levels]
        observed = torch.tensor([float(_average((error.abs() <= z * deviation).double(), weights)) for z in reaches])
        reach = student_quantile((1 + level) / 2, degrees) * variance.sqrt()
        low, high = mean - reach, mean + reach
        widths = [2 * z * float(_average(deviation, weights)) for z in reaches]
        if constant is not None:
            trivial = Tail.unit(constant[1]).nll(error, constant[0].to(error))
            by_row = (trivial - by_value).reshape(len(mean), -1).mean(1)
            gained = {"gain": float(average(by_row, counts)), "gain_error": standard_error(by_row, left)}
    else:
        ends = [interval(a) for a in levels]
        observed = torch.tensor([inside(*pair, target, weights) for pair in ends])
        widths = [float(_average(above - below, weights)) for below, above in ends]
        low, high = interval(level)
    held = ((low <= target) & (target <= high)).double().reshape(len(target), -1).mean(1)
    return Evaluation(
        label=label,
        rows=len(mean),
        rate=rate,
        scale=None if scale is None else tuple(scale),
        rmse=float(metrics.rmse(mean, None, target, weights=weights)),
        nll=nll,
        ma=float((observed - torch.tensor(levels).to(observed)).abs().mean()),
        level=level,
        coverage=float(average(held, counts)),
        width=float(_average((high - low).double(), weights)),
        levels=tuple(levels),
        observed=tuple(observed.tolist()),
        correlation=None if nll is None else correlation(target - mean, variance),
        mae=float(_average((target - mean).abs().double(), weights)),
        coverage_error=share_error(held, left),
        widths=tuple(widths),
        **gained,
    )


def evaluate_intervals(
    prediction: Prediction,
    target: Tensor,
    *,
    level: float = 0.9,
    output: int | None = None,
    weights: Array | None = None,
) -> Evaluation:
    """Evaluate the isotonic or conformal intervals that a calibration was fitted with."""
    fitted = prediction.calibration.intervals
    if fitted is None:
        raise ArgumentError(
            "expected isotonic or conformal intervals; found Gaussian ones. Use compare(), or calibrate(intervals=...)."
        )
    target = in_order(target, prediction.calibration.columns, "targets")
    if prediction.calibration.target is not None:
        found = evaluate_intervals(*in_model_unit(prediction, target), level=level, output=output, weights=weights)
        return _restored(found, prediction, target, output, weights)
    # n conformal scores reach levels up to n / (n + 1).
    reach = min(len(s) / (len(s) + 1) for s in fitted.scores) if isinstance(fitted, Conformal) else 1.0

    def interval(level: float) -> tuple[Tensor, Tensor]:
        low, high = prediction.interval(level)
        return _of(low, output), _of(high, output)

    return evaluate(
        _of(prediction.mean, output),
        _of(prediction.variance, output),
        _of(as_output(prediction.mean, target), output),
        label=fitted.kind,
        rate=prediction.calibration.rate,
        scale=_scale_of(fitted.scale, output),
        level=level,
        interval=interval,
        levels=[a for a in _LEVELS if a <= reach],
        weights=weights,
    )


def compare(
    prediction: Prediction,
    target: Tensor,
    *,
    level: float = 0.9,
    output: int | None = None,
    weights: Array | None = None,
) -> tuple[Evaluation, ...]:
    """Evaluate the raw, scaled and relaxed variance of one prediction, its fitted intervals if any, and a constant.

    Terms have no raw variance; what they fit goes by their name. `output` is one index of axis 1; all outputs together
    where None. RMSE, NLL and width are in the unit of `target`. `weights` `(N,)` say what each row counts.
    """
    target = in_order(target, prediction.calibration.columns, "targets")
    if prediction.calibration.target is not None:
        rows = compare(*in_model_unit(prediction, target), level=level, output=output, weights=weights)
        return tuple(_restored(row, prediction, target, output, weights) for row in rows)
    record = replace(prediction.calibration, intervals=None)
    variants = _variants(record)
    target = as_output(prediction.mean, target)
    if output is None:
        warn_of_poor_fit(prediction.mean, target, "test rows", per_output=record.per_output, stacklevel=2)
        warn_of_seen(record.seen, prediction.mean, target, stacklevel=2)
    mean, truth = _of(prediction.mean, output), _of(target, output)
    same = None if record.constant is None else (_of(constant_of(prediction), output), record.constant_degrees)
    found = [
        evaluate(
            mean,
            _of(variant.variance(prediction.raw_variance), output),
            truth,
            label=label,
            rate=record.rate,
            scale=_scale_of(variant.chosen()[0], output),
            level=level,
            weights=weights,
            constant=same,
            degrees=record.degrees,
        )
        for label, variant in variants.items()
    ]
    if prediction.calibration.intervals is not None:
        found.append(evaluate_intervals(prediction, target, level=level, output=output, weights=weights))
    if same is not None:
        options: dict[str, Any] = {"label": "constant", "level": level, "weights": weights, "degrees": same[1]}
        found.append(evaluate(mean, same[0], truth, constant=same, **options))
    return tuple(found)


def in_use(calibration: Calibration) -> str:
    """The label that `compare` gives to what a calibration's predictions use."""
    if calibration.intervals is not None:
        return calibration.intervals.kind
    optimal = "scaled" if calibration.terms is None else "terms"
    return {"optimal": optimal, "relaxed": "relaxed"}.get(str(calibration.choice), _own_scale(calibration.choice))


def verdict(
    prediction: Prediction, target: Tensor, *, output: int | None = None, weights: Array | None = None
) -> Verdict:
    """What the variance is worth on test rows beside a constant, the validation rows' mean squared error.

    `output` is one index of axis 1; all outputs together where None. Raises `ArgumentError` for a calibration that does
    not know the constant, as those of latedrop 0.1 do not. Where targets were transformed for training, both are
    compared in the model's unit.
    """
    target = in_order(target, prediction.calibration.columns, "targets")
    if prediction.calibration.target is not None:
        return verdict(*in_model_unit(prediction, target), output=output, weights=weights)
    target = as_output(prediction.mean, target)
    counts = None if weights is None else checked_weights(weights, len(target))
    parts = (target - prediction.mean, prediction.variance, constant_of(prediction))
    error, variance, constant = (_of(part, output) for part in parts)
    record = prediction.calibration
    gain = losses(error, constant, Tail.unit(record.constant_degrees))
    gain = gain - losses(error, variance, Tail.unit(record.degrees))

    def within(level: float) -> Tensor:
        try:
            low, high = prediction.interval(level)
        except ArgumentError:  # more than conformal scores can tell
            return torch.full_like(_of(target, output), level)
        return _of((low <= target) & (target <= high), output)

    left = CrossValidation(weights=counts)
    fitted = "own rows" if fitted_to(record.seen, prediction.mean, target) else "other rows"
    return judged(error, variance, constant, fitted=fitted, inside=within, rows=left, gain=gain)


def likelihood(prediction: Prediction, target: Tensor) -> float:
    """The NLL of the targets, in their unit."""
    plain, truth = in_model_unit(prediction, target)
    loss = Tail.unit(plain.calibration.degrees).nll(truth - plain.mean, plain.variance)
    return float(loss.mean()) + _nll_shift(prediction, target, None)


def in_model_unit(prediction: Prediction, target: Tensor) -> tuple[Prediction, Tensor]:
    """A prediction and its targets in the unit that the model was trained in."""
    target, unit = align_target(prediction.output, target), prediction.calibration.target
    return prediction.in_model_unit(), target if unit is None else unit.forward(target)


def constant_std(prediction: Prediction) -> Tensor:
    """The standard deviation of the constant variance, in the unit and shape of the prediction."""
    unit, plain = prediction.calibration.target, prediction.in_model_unit()
    variance = constant_of(plain)
    return (variance if unit is None else unit.moments(plain.mean, variance)[1]).sqrt()


def _restored(
    row: Evaluation, prediction: Prediction, target: Tensor, output: int | None, weights: Array | None
) -> Evaluation:
    """The scores of one variance in the original unit of the targets, from those in the model's."""
    unit, plain = prediction.calibration.target, prediction.in_model_unit()
    assert unit is not None
    variants = _variants(replace(plain.calibration, intervals=None))
    variance = variants[row.label].variance(plain.raw_variance) if row.label in variants else plain.variance
    if row.label == "constant":
        variance = constant_of(plain)
    center = _of(unit.moments(plain.mean, variance)[0], output)
    truth = _of(align_target(prediction.output, target), output)

    degrees = plain.calibration.constant_degrees if row.label == "constant" else plain.calibration.degrees

    def width(level: float) -> float:
        half = student_quantile((1 + level) / 2, degrees) * variance.sqrt()
        low, high = (plain.mean - half, plain.mean + half) if row.nll is not None else plain.interval(level)
        return float(_average(_of(unit.inverse(high) - unit.inverse(low), output), weights))

    return replace(
        row,
        rmse=float(metrics.rmse(center, None, truth, weights=weights)),
        mae=float(_average((truth - center).abs().double(), weights)),
        nll=None if row.nll is None else row.nll + _nll_shift(prediction, target, output, weights),
        width=width(row.level),
        widths=tuple(width(level) for level in row.levels),
    )


def _nll_shift(prediction: Prediction, target: Tensor, output: int | None, weights: Array | None = None) -> float:
    """What the NLL in the original unit is larger by than in the model's: minus the mean of `log f'(y)`."""
    unit = prediction.calibration.target
    if unit is None:
        return 0.0
    return -float(_average(_of(unit.log_slope(align_target(prediction.output, target)), output), weights))


def _variants(record: Calibration) -> dict[str, Calibration]:
    """The variances that are compared, by name."""
    variants = {} if record.terms is not None else {"raw": unscaled(record)}
    variants["scaled" if record.terms is None else "terms"] = record.with_choice("optimal")
    variants["relaxed"] = record.with_choice("relaxed")
    if not isinstance(record.choice, str):
        variants[_own_scale(record.choice)] = record
    return variants


def constant_of(prediction: Prediction) -> Tensor:
    """The constant variance to beat, in the shape of the prediction."""
    known = prediction.calibration.constant
    if known is None:
        raise ArgumentError(
            "expected a calibration that knows its constant variance; found an older one. Calibrate again."
        )
    values = torch.tensor(known, dtype=torch.float64)
    return torch.zeros_like(prediction.mean) + along_outputs(values, prediction.mean)


def unscaled(record: Calibration) -> Calibration:
    """The same calibration with the raw variance: scale 1, no floor, Gaussian intervals."""
    ones, zeros = (1.0,) * len(record.scales), (0.0,) * len(record.floors)
    return replace(record, choice=TradeoffPoint(ones, zeros, math.nan, math.nan), intervals=None)


def inside(low: Tensor, high: Tensor, target: Tensor, weights: Array | None = None) -> float:
    """Fraction of targets between two ends, both included; `weights` `(N,)` say what each row counts."""
    return float(_average(((low <= target) & (target <= high)).double(), weights))


def _average(values: Tensor, weights: Array | None) -> Tensor:
    """Of `(N, ...)`, each row counted as its weight says."""
    by_row = values.reshape(len(values), -1).mean(1)
    return average(by_row, None if weights is None else checked_weights(weights, len(values)))


def _own_scale(choice: Choice) -> str:
    return f"scale {choice:g}" if isinstance(choice, float) else "step between the scales"


def _of(values: Tensor, output: int | None) -> Tensor:
    return values if output is None else values[:, output]


def _scale_of(scales: tuple[float, ...], output: int | None) -> tuple[float, ...]:
    return scales if output is None or len(scales) == 1 else (scales[output],)
