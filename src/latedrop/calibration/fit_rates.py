"""A scaled variance of one rate for numbers: every rate is fitted, and the best one taken.

The scaled criterion takes the rate with the smallest NLL of `scale(rate) · variance(rate) (+ floor)`, each rate with
its own best scale (Ledda, Fumera, Roli 2023); the unscaled one takes the rate with the smallest NLL of the variance as
it is (Loquercio et al. 2020). To first order all rates are known from one pass, and what is searched is how much each
site counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from warnings import warn

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.calibration.cross_validation import CrossValidated, CrossValidation, crossed, standard_error
from latedrop.calibration.fit_sites import fit_sites
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
    refuse_no_errors,
    relaxed_scale,
    tradeoff,
)
from latedrop.calibration.targets import warn_of_poor_fit
from latedrop.calibration.transforms import Transform
from latedrop.calibration.verdict import losses
from latedrop.errors import LatedropWarning, OutputError
from latedrop.metrics.entries import average, by_output, weights_of
from latedrop.network.sites import Rate

__all__ = ["RatesFit", "ScaleFit", "fit_rates", "fit_scale"]

_MOST_UNTOUCHED = 0.1  # a rate that leaves more rows without any variance has not measured it
_GAIN = 0.02  # nats that are worth a word
_LEVEL = 5  # of warnings, up to the caller of `calibrate`


@dataclass(frozen=True)
class ScaleFit:
    """Scale, floor and relaxed scale of one variance of the validation rows, and what they give.

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
        """Return the metrics of the raw, the scaled and the relaxed variance at a rate, in the original unit."""
        options: dict[str, Any] = {"weights": self.weights}
        values: dict[str, float] = {}
        shift = self._nll_shift()
        ideal = metrics.ideal_nll(self.mean, None, self.target, mask=self.mean != self.target, **options)
        for name, variance in self._variances().items():
            both = self.mean, variance, self.target
            values[f"nll_{name}"] = float(metrics.nll(*both, **options)) + shift
            values[f"ma_{name}"] = float(metrics.miscalibration_area(*both, **options))
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
            curves["levels"] = tuple(levels.tolist())
            curves[name] = tuple(observed.tolist())
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
    """Return scale and floor of least NLL."""
    if floor:
        return fit_floor(mean, variance, target, per_output=per_output, weights=weights)
    scale = optimal_scale(mean, variance, target, per_output=per_output, weights=weights)
    return scale, torch.zeros_like(scale)


@dataclass(frozen=True)
class RatesFit:
    """The fit to all rates.

    Attributes:
        rate: the best.
        fit: of scale and floor at that rate.
        table: one row for each rate.
        shares: each site's share of the raw variance; None where the sites are not told apart.
    """

    rate: Rate
    fit: ScaleFit
    table: tuple[RateRow, ...]
    shares: dict[str, float] | None


def fit_rates(measured: MeasuredRates, plan: Plan) -> RatesFit:
    """Fit scale and floor at every rate, and take the best."""
    method, target = plan.method, measured.target
    assert not isinstance(method, Terms)
    per_output, shares = plan.has_outputs(target.shape), None
    options: dict[str, Any] = {"per_output": per_output, "unit": plan.target, "weights": plan.weights}
    fits: list[tuple[Rate, ScaleFit | None]]
    if isinstance(method, FirstOrder):
        rate, raw, optimal, shares = _fit_sites(measured, method, plan)
        fits = [(rate, fit_scale(measured.means[0], raw, target, optimal=optimal, **options))]
    else:
        triples = zip(method.rates or PAPER_RATES, measured.means, measured.variances, strict=True)
        fits = [(rate, fit_scale(m, v, target, floor=method.floor, **options)) for rate, m, v in triples]
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
        fit.mean, target, "validation rows", per_output=per_output, stacklevel=_LEVEL - 1, hint=plan.target is None
    )
    _warn_of_edge(usable, best, method.criterion)
    return RatesFit(rate, fit, table, shares)


def _fit_sites(
    measured: MeasuredRates, method: FirstOrder, plan: Plan
) -> tuple[Rate, Tensor, tuple[Tensor, Tensor], dict[str, float]]:
    """Fit how much each site counts; return rate, raw variance, scales and floors, and the sites' shares."""
    (mean,), (variances,), target, sites = measured.means, measured.variances, measured.target, measured.sites
    per_output = plan.has_outputs(target.shape)
    outputs = target.shape[1] if per_output else 1

    def entries(values: Tensor) -> Tensor:
        """Return `(M, K)`, one column for each output with a scale of its own; a row's entries stay together."""
        return values.double().reshape(len(values), outputs, -1).movedim(1, 2).reshape(-1, outputs)

    error = entries(target - mean)
    stacked = torch.stack([entries(v) for v in variances.unbind(-1)], -1)
    if not bool(stacked.sum(2).gt(0).any(0).all()):
        _refuse_no_variance(stacked.sum(2), per_output)
    if not bool(error.any(0).all()):
        refuse_no_errors()
    counts = None if plan.weights is None else plan.weights.repeat_interleave(len(error) // len(target))
    fitted = fit_sites(error, stacked, per_site=method.per_site, floor=method.floor, weights=counts)
    rates = (fitted.odds / (1 + fitted.odds)).tolist()
    names = [site.name for site in sites]
    rate: Rate = dict(zip(names, rates, strict=True)) if method.per_site else rates[0]
    part = stacked * fitted.odds
    shares = (part / part.sum(-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)).mean((0, 1)).tolist()
    raw = (variances.double() @ fitted.odds).reshape(target.shape)
    return rate, raw, (fitted.scales, fitted.floors), dict(zip(names, shares, strict=True))


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
        stacklevel=_LEVEL,
    )


def _warn_of_edge(fits: Sequence[tuple[Rate, ScaleFit]], best: int, criterion: str) -> None:
    """Warn where the best of several rates is the smallest or the largest, and the NLL still falls towards it."""
    chosen = fits[best]
    ordered = sorted((pair for pair in fits if isinstance(pair[0], float)), key=lambda pair: float(pair[0]))  # type: ignore[arg-type]
    if len(ordered) < 3 or (chosen is not ordered[0] and chosen is not ordered[-1]):
        return
    lowest = chosen is ordered[0]
    beside = ordered[1] if lowest else ordered[-2]
    gain, weights = _losses(beside[1], criterion) - _losses(chosen[1], criterion), chosen[1].weights
    if float(average(gain, weights)) > max(_GAIN, 2 * standard_error(gain, CrossValidation(weights=weights))):
        side, more = ("smallest", "smaller rates with more draws") if lowest else ("largest", "larger rates")
        warn(
            f"the best rate, {chosen[0]:g}, is the {side} that was tried, and the NLL still falls towards it: a better "
            f"one may lie beyond. Try {more}, rates=[...].",
            LatedropWarning,
            stacklevel=_LEVEL,
        )


def _losses(fit: ScaleFit, criterion: str) -> Tensor:
    """Return the NLL of every validation row, but for a constant."""
    variance = fit.variance.double()
    variance = apply_scale(variance, *fit.optimal) if criterion == "scaled" else variance
    return losses(fit.target.double() - fit.mean.double(), variance)
