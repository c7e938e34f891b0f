"""Scale, floor and relaxed scale of one variance of the validation rows, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.calibration.cross_validation import CrossValidation, crossed
from latedrop.calibration.intervals import Isotonic
from latedrop.calibration.record import Choice, RateRow
from latedrop.calibration.scale import (
    TradeoffPoint,
    along_outputs,
    apply_scale,
    fit_floor,
    least_positive,
    lifted,
    optimal_scale,
    relaxed_scale,
    tradeoff,
)
from latedrop.calibration.transforms import Transform
from latedrop.errors import DataError
from latedrop.metrics.entries import average, by_output, weights_of
from latedrop.network.sites import Rate

__all__ = ["CrossValidated", "CrossValidatedClasses", "ScaleFit", "fit_scale", "refuse_no_errors", "residuals"]


@dataclass(frozen=True)
class CrossValidated:
    """The validation rows, each predicted by a fit to the rows of other folds.

    These, and not `uq.predict(x_val)`, are what a further rescaling may be fitted to: no fit has seen its own row.

    Attributes:
        mean: `(N, ...)`, in the original unit of the targets, as all of these.
        variance: `(N, ...)`, with the scale of least NLL.
        target: `(N, ...)`.
    """

    mean: Tensor
    variance: Tensor
    target: Tensor

    @property
    def errors(self) -> Tensor:
        """Return standardised errors, `(target - mean) / std`, `(N, ...)`."""
        return (self.target - self.mean) / self.variance.sqrt()

    def __repr__(self) -> str:
        rms = float(self.errors.square().mean().sqrt())
        return f"CrossValidated of {len(self.mean)} rows, mean {tuple(self.mean.shape)}, rms of errors {rms:.3g}"


@dataclass(frozen=True)
class CrossValidatedClasses:
    """The validation rows of a classifier, each predicted by a fit to the rows of other folds.

    Attributes:
        probabilities: `(N, K)`; of maps, those of the pixels that were used.
        labels: `(N,)`, the true classes.
    """

    probabilities: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        right = float((self.probabilities.argmax(1) == self.labels).double().mean())
        return f"CrossValidatedClasses: probabilities {tuple(self.probabilities.shape)}, accuracy {right:.3g}"


@dataclass(frozen=True)
class ScaleFit:
    """What was fitted, with the validation moments that it was fitted to.

    Attributes:
        mean: `(N, ...)`.
        variance: `(N, ...)`, raw, with `least` in the place of zeros.
        target: `(N, ...)`.
        per_output: whether each index of axis 1 has its own scale and floor.
        zeros: how many raw variances were 0.
        least: the smallest positive raw variance, one value or one for each output.
        optimal: scales and floors of least NLL.
        relaxed: those that balance the calibration curve.
        unit: how the targets were transformed for training; all of the above is in the model's unit.
        weights: `(N,)`, what each row counts, with mean 1; None where all count the same.
    """

    mean: Tensor
    variance: Tensor
    target: Tensor
    per_output: bool
    zeros: int
    least: Tensor
    optimal: tuple[Tensor, Tensor]
    relaxed: tuple[Tensor, Tensor]
    unit: Transform | None = None
    weights: Tensor | None = None

    def row(self, rate: Rate) -> RateRow:
        """The metrics of the raw, the scaled and the relaxed variance at a rate, in the original unit."""
        values: dict[str, float] = {}
        shift = self._nll_shift()
        ideal = metrics.ideal_nll(self.mean, None, self.target, mask=self.mean != self.target, weights=self.weights)
        for name, variance in self._variances().items():
            values[f"nll_{name}"] = float(metrics.nll(self.mean, variance, self.target, weights=self.weights)) + shift
            values[f"ma_{name}"] = float(
                metrics.miscalibration_area(self.mean, variance, self.target, weights=self.weights)
            )
        return RateRow(
            rate=dict(rate) if isinstance(rate, Mapping) else float(rate),
            rmse=self._rmse(),
            nll_ideal=float(ideal) + shift,
            scale=tuple(self.optimal[0].tolist()),
            floor=tuple(self.optimal[1].tolist()),
            relaxed_scale=tuple(self.relaxed[0].tolist()),
            relaxed_floor=tuple(self.relaxed[1].tolist()),
            zero_variances=self.zeros,
            **values,
        )

    def constant(self) -> Tensor:
        """The mean squared error of each output, or of all, `(1,)` or `(K,)`."""
        squares = by_output((self.target - self.mean).double().square(), self.per_output)
        counted = weights_of(self.weights, self.mean, None, self.per_output)
        return torch.stack([average(column.flatten(), w) for column, w in zip(squares, counted, strict=True)])

    def crossed(self, *, floor: bool) -> tuple[Tensor, Tensor]:
        """Variances and constants of rows left out of the fit of scale and floor; the rate is that of all rows."""
        error, left = (self.target - self.mean).double(), CrossValidation(weights=self.weights)

        def fit(rest: Tensor) -> Callable[[Tensor], Tensor]:
            part = self.mean[rest], self.variance[rest], self.target[rest]
            fitted = _likeliest(*part, floor, self.per_output, left.at(rest))
            return lambda held: apply_scale(self.variance[held].double(), *fitted)

        return crossed(error, fit, self.per_output, left)

    def left_out(self, variance: Tensor) -> CrossValidated:
        """The rows with variances `(N, ...)` from fits to the rows of other folds."""
        mean, variance, target = self.mean.double(), variance.double(), self.target.double()
        if self.unit is not None:
            (mean, variance), target = self.unit.moments(mean, variance), self.unit.inverse(target)
        return CrossValidated(mean, variance, target)

    def path(self) -> tuple[TradeoffPoint, ...]:
        """Steps from the optimal to the relaxed scale."""
        steps = tradeoff(self.mean, self.variance, self.target, self.optimal, self.relaxed, weights=self.weights)
        shift = self._nll_shift()
        return tuple(replace(step, nll=step.nll + shift) for step in steps)

    def curves(self) -> dict[str, tuple[float, ...]]:
        """The calibration curves of the raw, the scaled, the relaxed and one constant variance, and their levels."""
        curves: dict[str, tuple[float, ...]] = {}
        constant = torch.zeros_like(self.mean) + along_outputs(self.constant(), self.mean)
        for name, variance in {**self._variances(), "constant": constant}.items():
            levels, observed = metrics.calibration_curve(self.mean, variance, self.target, weights=self.weights)
            curves["levels"] = tuple(levels.tolist())
            curves[name] = tuple(observed.tolist())
        return curves

    def isotonic(self, choice: Choice) -> Isotonic:
        """Isotonic intervals for the scale in use."""
        scale, floor = self.relaxed if choice == "relaxed" else self.optimal
        if isinstance(choice, float):
            scale = torch.full_like(scale, choice)
        fitted = apply_scale(self.variance, scale, floor)
        z = residuals(self.mean, fitted, self.target, self.per_output)
        return Isotonic.fit(z, tuple(scale.tolist()), tuple(floor.tolist()))

    def _rmse(self) -> float | tuple[float, ...]:
        """A number, or one for each of several outputs, which may have different units."""
        mean, target = self.mean, self.target
        if self.unit is not None:
            mean, _ = self.unit.moments(mean.double(), apply_scale(self.variance.double(), *self.optimal))
            target = self.unit.inverse(target.double())
        found = metrics.rmse(mean, None, target, per_output=self.per_output, weights=self.weights)
        return tuple(found.tolist()) if self.per_output else float(found)

    def _nll_shift(self) -> float:
        """What the NLL in the original unit is larger by."""
        if self.unit is None:
            return 0.0
        slopes = self.unit.log_slope(self.unit.inverse(self.target.double()))
        return -float(average(slopes.flatten(), weights_of(self.weights, self.mean, None, False)[0]))

    def _variances(self) -> dict[str, Tensor]:
        return {
            "unscaled": self.variance,
            "scaled": apply_scale(self.variance, *self.optimal),
            "relaxed": apply_scale(self.variance, *self.relaxed),
        }


def fit_scale(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    *,
    per_output: bool,
    floor: bool = False,
    optimal: tuple[Tensor, Tensor] | None = None,
    unit: Transform | None = None,
    weights: Tensor | None = None,
) -> ScaleFit | None:
    """Fit scale, floor (if asked for) and relaxed scale; None where some output does not vary at all.

    `optimal` are scales and floors that were fitted already; `unit` says how the targets were transformed for training,
    `weights` `(N,)` what each row counts.
    """
    least = least_positive(variance, per_output)
    if bool(least.isinf().any()):
        return None
    zeros = int((variance == 0).sum())
    variance = lifted(variance, least)
    optimal = optimal or _likeliest(mean, variance, target, floor, per_output, weights)
    total = apply_scale(variance.double(), *optimal)
    factor = relaxed_scale(mean, total, target, per_output=per_output, weights=weights)
    relaxed = (optimal[0] * factor, optimal[1] * factor)
    return ScaleFit(mean, variance, target, per_output, zeros, least, optimal, relaxed, unit, weights)


def _likeliest(
    mean: Tensor, variance: Tensor, target: Tensor, floor: bool, per_output: bool, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scale and floor of least NLL."""
    if floor:
        return fit_floor(mean, variance, target, per_output=per_output, weights=weights)
    scale = optimal_scale(mean, variance, target, per_output=per_output, weights=weights)
    return scale, torch.zeros_like(scale)


def residuals(mean: Tensor, variance: Tensor, target: Tensor, per_output: bool) -> list[Tensor]:
    """Standardised residuals `(target - mean) / std`, flat: one tensor, or one per index of axis 1."""
    z = (target.to(mean) - mean) / variance.sqrt()
    return [column.flatten() for column in by_output(z, per_output)]


def refuse_no_errors() -> NoReturn:
    """Raise where there is nothing to fit a variance to."""
    raise DataError(
        "expected errors to fit a variance to; found every prediction equal to its target, perhaps of one "
        "output alone. Pass held-out data, not what the model was fitted to."
    )
