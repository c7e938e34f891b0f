"""Scale, floor and relaxed scale of one rate, fitted to its validation moments, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from latedrop import metrics
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
from latedrop.calibration.verdict import Verdict, crossed, judged
from latedrop.metrics.entries import by_output
from latedrop.model.sites import Rate

__all__ = ["RateFit", "fit_rate", "residuals"]


@dataclass(frozen=True)
class RateFit:
    """What was fitted, with the validation moments that it was fitted to.

    Attributes:
        rate: the rate; an empty mapping where terms have none.
        mean: `(N, ...)`.
        variance: `(N, ...)`, raw, with `least` in the place of zeros.
        target: `(N, ...)`.
        per_output: whether each index of axis 1 has its own scale and floor.
        zeros: how many raw variances were 0.
        least: the smallest positive raw variance, one value or one for each output.
        optimal: scales and floors of least NLL.
        relaxed: those that balance the calibration curve.
    """

    rate: Rate
    mean: Tensor
    variance: Tensor
    target: Tensor
    per_output: bool
    zeros: int
    least: Tensor
    optimal: tuple[Tensor, Tensor]
    relaxed: tuple[Tensor, Tensor]

    def row(self) -> RateRow:
        """The metrics of the raw, the scaled and the relaxed variance."""
        values: dict[str, float] = {}
        for name, variance in self._variances().items():
            values[f"nll_{name}"] = float(metrics.nll(self.mean, variance, self.target))
            values[f"ma_{name}"] = float(metrics.miscalibration_area(self.mean, variance, self.target))
        return RateRow(
            rate=dict(self.rate) if isinstance(self.rate, Mapping) else float(self.rate),
            rmse=float(metrics.rmse(self.mean, None, self.target)),
            nll_ideal=float(metrics.ideal_nll(self.mean, None, self.target, mask=self.mean != self.target)),
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
        return torch.stack([column.mean() for column in squares])

    def verdict(self, *, floor: bool) -> Verdict:
        """What scale and floor are worth on rows left out of their fit; the rate is that of all rows."""
        error = (self.target - self.mean).double()

        def fit(rest: Tensor) -> Callable[[Tensor], Tensor]:
            part = self.mean[rest], self.variance[rest], self.target[rest]
            if floor:
                fitted = fit_floor(*part, per_output=self.per_output)
            else:
                scale = optimal_scale(*part, per_output=self.per_output)
                fitted = scale, torch.zeros_like(scale)
            return lambda held: apply_scale(self.variance[held].double(), *fitted)

        return judged(error, *crossed(error, fit, self.per_output), fitted="cross-validation")

    def path(self) -> tuple[TradeoffPoint, ...]:
        """Steps from the optimal to the relaxed scale."""
        return tradeoff(self.mean, self.variance, self.target, self.optimal, self.relaxed)

    def curves(self) -> dict[str, tuple[float, ...]]:
        """The calibration curves of the raw, the scaled, the relaxed and one constant variance, and their levels."""
        curves: dict[str, tuple[float, ...]] = {}
        constant = torch.zeros_like(self.mean) + along_outputs(self.constant(), self.mean)
        for name, variance in {**self._variances(), "constant": constant}.items():
            levels, observed = metrics.calibration_curve(self.mean, variance, self.target)
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

    def _variances(self) -> dict[str, Tensor]:
        return {
            "unscaled": self.variance,
            "scaled": apply_scale(self.variance, *self.optimal),
            "relaxed": apply_scale(self.variance, *self.relaxed),
        }


def fit_rate(
    rate: Rate,
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    *,
    per_output: bool,
    floor: bool = False,
    optimal: tuple[Tensor, Tensor] | None = None,
) -> RateFit | None:
    """Fit scale, floor (if asked for) and relaxed scale; None where some output does not vary at all.

    `optimal` are scales and floors that were fitted already.
    """
    least = least_positive(variance, per_output)
    if bool(least.isinf().any()):
        return None
    zeros = int((variance == 0).sum())
    variance = lifted(variance, least)
    if optimal is None and floor:
        optimal = fit_floor(mean, variance, target, per_output=per_output)
    elif optimal is None:
        scale = optimal_scale(mean, variance, target, per_output=per_output)
        optimal = (scale, torch.zeros_like(scale))
    total = apply_scale(variance.double(), *optimal)
    factor = relaxed_scale(mean, total, target, per_output=per_output)
    relaxed = (optimal[0] * factor, optimal[1] * factor)
    return RateFit(rate, mean, variance, target, per_output, zeros, least, optimal, relaxed)


def residuals(mean: Tensor, variance: Tensor, target: Tensor, per_output: bool) -> list[Tensor]:
    """Standardised residuals `(target - mean) / std`, flat: one tensor, or one per index of axis 1."""
    z = (target.to(mean) - mean) / variance.sqrt()
    return [column.flatten() for column in by_output(z, per_output)]
