"""A scaled variance of one rate for numbers: every rate is fitted, and the best one taken.

The scaled criterion takes the rate with the smallest NLL of `scale(rate) · variance(rate) (+ floor)`, each rate with
its own best scale (Ledda, Fumera, Roli 2023); the unscaled one takes the rate with the smallest NLL of the variance as
it is (Loquercio et al. 2020). To first order one pass serves all rates, and the best scale says which rate it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn
from warnings import warn

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.calibration.cross_validation import CrossValidated, CrossValidation, crossed
from latedrop.calibration.intervals import Isotonic, residuals
from latedrop.calibration.measure import MeasuredRates
from latedrop.calibration.methods import PAPER_RATES, FirstOrder, Plan, Terms
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
from latedrop.calibration.targets import warn_of_poor_fit
from latedrop.calibration.transforms import Transform
from latedrop.errors import LatedropWarning, OutputError
from latedrop.metrics.entries import average, by_output, weights_of
from latedrop.network.sites import Rate

__all__ = ["ScaleFit", "fit_rates", "fit_scale"]

_MOST_UNTOUCHED = 0.1  # a rate that leaves more rows without any variance has not measured it
_NOMINAL_ODDS = 0.01  # of first order where a floor explains everything
_LEVEL = 4  # of warnings, up to the caller of `calibrate`


@dataclass(frozen=True)
class ScaleFit:
    """Scale, floor and relaxed scale of one variance of the validation rows, and what they give.

    Attributes:
        mean, variance, target: `(N, ...)`; the variance is raw, with `least` in the place of zeros.
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
        """Return the metrics of the raw, the scaled and the relaxed variance at a rate, in the original unit."""
        shift, values = self._nll_shift(), {}
        wrong = self.mean != self.target
        ideal = metrics.ideal_nll(self.mean, None, self.target, mask=wrong, weights=self.weights)
        for name, variance in self._variances().items():
            rows = self.mean, variance, self.target
            values[f"nll_{name}"] = float(metrics.nll(*rows, weights=self.weights)) + shift
            values[f"ma_{name}"] = float(metrics.miscalibration_area(*rows, weights=self.weights))
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
        """Return the mean squared error of each output, or of all, `(1,)` or `(K,)`."""
        squares = by_output((self.target - self.mean).double().square(), self.per_output)
        counts = weights_of(self.weights, self.mean, self.per_output)
        return torch.stack([average(column.flatten(), w) for column, w in zip(squares, counts, strict=True)])

    def crossed(self, *, floor: bool) -> tuple[Tensor, Tensor]:
        """Return variances and constants of rows left out of the fit of scale and floor; the rate is that of all."""
        error, left = (self.target - self.mean).double(), CrossValidation(weights=self.weights)

        def fit(rest: Tensor) -> Callable[[Tensor], Tensor]:
            part = self.mean[rest], self.variance[rest], self.target[rest]
            fitted = _likeliest(*part, floor, self.per_output, left.at(rest))
            return lambda out: apply_scale(self.variance[out].double(), *fitted)

        return crossed(error, fit, self.per_output, left)

    def left_out(self, variance: Tensor) -> CrossValidated:
        """Return the rows with variances `(N, ...)` from fits to the rows of other folds."""
        mean, variance, target = self.mean.double(), variance.double(), self.target.double()
        if self.unit is not None:
            (mean, variance), target = self.unit.moments(mean, variance), self.unit.inverse(target)
        return CrossValidated(mean, variance, target)

    def path(self) -> tuple[TradeoffPoint, ...]:
        """Return steps from the optimal to the relaxed scale."""
        steps = tradeoff(self.mean, self.variance, self.target, self.optimal, self.relaxed, weights=self.weights)
        shift = self._nll_shift()
        return tuple(replace(step, nll=step.nll + shift) for step in steps)

    def curves(self) -> dict[str, tuple[float, ...]]:
        """Return the calibration curves of the raw, the scaled, the relaxed and a constant variance, with levels."""
        curves: dict[str, tuple[float, ...]] = {}
        constant = torch.zeros_like(self.mean) + along_outputs(self.constant(), self.mean)
        for name, variance in {**self._variances(), "constant": constant}.items():
            levels, observed = metrics.calibration_curve(self.mean, variance, self.target, weights=self.weights)
            curves |= {"levels": tuple(levels.tolist()), name: tuple(observed.tolist())}
        return curves

    def isotonic(self, choice: Choice) -> Isotonic:
        """Fit isotonic intervals for the scale in use."""
        scale, floor = self.relaxed if choice == "relaxed" else self.optimal
        if isinstance(choice, float):
            scale = torch.full_like(scale, choice)
        z = residuals(self.mean, apply_scale(self.variance, scale, floor), self.target, self.per_output)
        return Isotonic.fit(z, tuple(scale.tolist()), tuple(floor.tolist()))

    def _rmse(self) -> float | tuple[float, ...]:
        """Return a number, or one for each of several outputs, which may have different units."""
        mean, target = self.mean, self.target
        if self.unit is not None:
            mean, _ = self.unit.moments(mean.double(), apply_scale(self.variance.double(), *self.optimal))
            target = self.unit.inverse(target.double())
        rmse = metrics.rmse(mean, None, target, per_output=self.per_output, weights=self.weights)
        return tuple(rmse.tolist()) if self.per_output else float(rmse)

    def _nll_shift(self) -> float:
        """Return by what the NLL in the original unit is larger."""
        if self.unit is None:
            return 0.0
        slopes = self.unit.log_slope(self.unit.inverse(self.target.double()))
        return -float(average(slopes.flatten(), weights_of(self.weights, self.mean, False)[0]))

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
    plan: Plan,
    per_output: bool,
    *,
    optimal: tuple[Tensor, Tensor] | None = None,
) -> ScaleFit | None:
    """Fit scale, floor (if the method has one) and relaxed scale; None where some output does not vary at all.

    `optimal` are scales and floors that were fitted already.
    """
    weights = plan.weights
    least = least_positive(variance, per_output)
    if bool(least.isinf().any()):
        return None
    zeros = int((variance == 0).sum())
    variance = lifted(variance, least)
    if optimal is None:
        optimal = _likeliest(mean, variance, target, plan.has_floor, per_output, weights)
    total = apply_scale(variance.double(), *optimal)
    factor = relaxed_scale(mean, total, target, per_output=per_output, weights=weights)
    relaxed = (optimal[0] * factor, optimal[1] * factor)
    return ScaleFit(mean, variance, target, per_output, zeros, least, optimal, relaxed, plan.target, weights)


def _likeliest(
    mean: Tensor, variance: Tensor, target: Tensor, floor: bool, per_output: bool, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return scale and floor of least NLL."""
    if floor:
        return fit_floor(mean, variance, target, per_output=per_output, weights=weights)
    scale = optimal_scale(mean, variance, target, per_output=per_output, weights=weights)
    return scale, torch.zeros_like(scale)


def fit_rates(
    measured: MeasuredRates, plan: Plan
) -> tuple[Rate, ScaleFit, tuple[RateRow, ...], dict[str, float] | None]:
    """Fit scale and floor at every rate, and take the best.

    Returns:
        The best rate, its fit, a row for each rate, and each site's share of the raw variance to first order; None
        where the sites are not told apart.
    """
    method, target, shares = plan.method, measured.target, None
    per_output = plan.has_outputs(target.shape)
    assert not isinstance(method, Terms)
    fits: list[tuple[Rate, ScaleFit | None]]
    if isinstance(method, FirstOrder):
        fits, shares = [_first_order(measured, plan, per_output)], _site_shares(measured)
    else:
        triples = zip(method.rates or PAPER_RATES, measured.means, measured.variances, strict=True)
        fits = [(rate, fit_scale(mean, variance, target, plan, per_output)) for rate, mean, variance in triples]
    usable = [(rate, fit) for rate, fit in fits if fit is not None]
    if not usable:
        _refuse_no_variance(measured.variances[-1], per_output)
    table = tuple(fit.row(rate) for rate, fit in usable)
    touched = [row.zero_variances <= _MOST_UNTOUCHED * target.numel() for row in table]
    able = [i for i, enough in enumerate(touched) if enough or not any(touched)]
    best = min(able, key=lambda i: float(getattr(table[i], f"nll_{method.criterion}")))
    rate, fit = usable[best]
    if table[best].zero_variances or len(table) < len(fits):
        _warn_of_zeros(table, len(fits), target.numel())
    warn_of_poor_fit(
        fit.mean, target, "validation rows", per_output=per_output, stacklevel=_LEVEL, hint=plan.target is None
    )
    return rate, fit, table, shares


def _first_order(measured: MeasuredRates, plan: Plan, per_output: bool) -> tuple[Rate, ScaleFit | None]:
    """Fit the variance at one rate of all sites: its odds are the (geometric) mean of the outputs' scales."""
    (mean,), (by_site,), target = measured.means, measured.variances, measured.target
    total = by_site.double().sum(-1).reshape(target.shape)
    least = least_positive(total, per_output)
    if bool(least.isinf().any()):
        return 0.0, None
    scales, floors = _likeliest(mean, lifted(total, least), target, plan.has_floor, per_output, plan.weights)
    odds = float(scales[scales > 0].log().mean().exp()) if bool(scales.any()) else _NOMINAL_ODDS
    return odds / (1 + odds), fit_scale(mean, total * odds, target, plan, per_output, optimal=(scales / odds, floors))


def _site_shares(measured: MeasuredRates) -> dict[str, float]:
    """Return the share of every site in the first-order variance, on average over rows and outputs."""
    by_site = measured.variances[0].double().flatten(0, -2)
    shares = by_site / by_site.sum(-1, keepdim=True).clamp_min(torch.finfo(by_site.dtype).tiny)
    return dict(zip([site.name for site in measured.sites], shares.mean(0).tolist(), strict=True))


def _refuse_no_variance(variance: Tensor, per_output: bool) -> NoReturn:
    """Raise where dropout does not move an output; name those of several that have no variance at all."""
    still = [i for i, column in enumerate(variance.unbind(1)) if not bool(column.any())] if per_output else []
    which = f"; outputs {still} do not" if 0 < len(still) < variance.shape[1] else ""
    raise OutputError(
        f"expected an output that varies under dropout at some rate{which}: it is the same in all draws. Check "
        "with find_sites that the sites reach the output, and that the readout does not round it."
    )


def _warn_of_zeros(table: Sequence[RateRow], tried: int, values: int) -> None:
    """Warn of validation values that no draw touched."""
    zeros = [f"{row.zero_variances} at rate {row.rate}" for row in table if row.zero_variances]
    if len(table) < tried:
        zeros.insert(0, f"all {values} at {tried - len(table)} rates, which are left out")
    warn(
        f"of {values} validation values, some have zero variance, as no mask touched them: {'; '.join(zeros)}. They "
        "are lifted to the smallest positive variance, and a rate with more than a tenth of them is not chosen where "
        "another is there; more draws, larger rates or floor=True avoid it.",
        LatedropWarning,
        stacklevel=_LEVEL + 1,
    )
