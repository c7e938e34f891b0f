"""A scaled variance of one rate for numbers: every rate is measured and fitted, and the best one taken.

The scaled criterion takes the rate with the smallest NLL of `scale(rate) · variance(rate) (+ floor)`, each rate with
its own best scale (Ledda, Fumera, Roli 2023); the unscaled one takes the rate with the smallest NLL of the variance as
it is (Loquercio et al. 2020). To first order one pass serves all rates, and the best scale says which rate it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop import metrics
from latedrop.calibration.cross_validation import CrossValidated, CrossValidation, crossed
from latedrop.calibration.measure import validation_batches
from latedrop.calibration.methods import PAPER_RATES, FirstOrder, Plan, Sampling, Terms
from latedrop.calibration.record import Choice, RateRow
from latedrop.calibration.scale import (
    Fitted,
    TradeoffPoint,
    along_outputs,
    apply_scale,
    fit_floor,
    isotonic,
    least_positive,
    lifted,
    optimal_scale,
    relaxed_scale,
    residuals,
    tradeoff,
)
from latedrop.calibration.targets import as_output, check_rows, check_shapes, warn_of_poor_fit
from latedrop.data.batches import Labelled
from latedrop.dropout.first_order import linearize
from latedrop.dropout.moments import Moments
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import own_output, sample_rates
from latedrop.errors import LatedropWarning, OutputError
from latedrop.network.network import Network
from latedrop.network.sites import Rate, Sites
from latedrop.propagation.propagate import propagate
from latedrop.quantiles import IsotonicKnots

__all__ = ["FittedRates", "ScaleFit", "draw_options", "fit_rates", "fit_scale", "moments"]

_MOST_UNTOUCHED = 0.1  # a rate that leaves more rows without any variance has not measured it
_NOMINAL_ODDS = 0.01  # of first order where a floor explains everything
_LEVEL = 4  # of warnings, up to the caller of `calibrate`


@dataclass(frozen=True)
class ScaleFit:
    """Scale, floor and relaxed scale of one variance of the validation rows, and what they give."""

    mean: Tensor  # (N, ...), as variance and target, in the model's unit
    variance: Tensor  # raw, with `least` in the place of zeros
    target: Tensor
    plan: Plan
    per_output: bool  # whether each index of axis 1 has its own scale and floor
    zeros: int  # how many raw variances were 0
    least: Tensor  # the smallest positive raw variance, one value or one for each output
    optimal: Fitted  # scales and floors of least NLL
    relaxed: Fitted  # those that balance the calibration curve

    def row(self, rate: Rate) -> RateRow:
        """Return the metrics of the raw, the scaled and the relaxed variance at a rate, in the original unit."""
        shift, values, weights = self._nll_shift(), {}, self.plan.weights
        values["nll_ideal"] = float(metrics.ideal_nll(self.mean, None, self.target, weights=weights)) + shift
        for name, variance in self._variances().items():
            rows = self.mean, variance, self.target
            values[f"nll_{name}"] = float(metrics.nll(*rows, weights=weights)) + shift
            values[f"ma_{name}"] = float(metrics.miscalibration_area(*rows, weights=weights))
        scaled = self.left_out(apply_scale(self.variance.double(), *self.optimal))  # outputs may have different units
        rmse = metrics.rmse(scaled.mean, None, scaled.target, per_output=self.per_output, weights=weights)
        return RateRow(
            rate=dict(rate) if isinstance(rate, Mapping) else float(rate),
            rmse=tuple(rmse.tolist()) if self.per_output else float(rmse),
            scale=tuple(self.optimal[0].tolist()),
            floor=tuple(self.optimal[1].tolist()),
            relaxed_scale=tuple(self.relaxed[0].tolist()),
            relaxed_floor=tuple(self.relaxed[1].tolist()),
            zero_variances=self.zeros,
            **values,
        )

    def constant(self) -> Tensor:
        """Return the mean squared error of each output, or of all, `(1,)` or `(K,)`."""
        squares = (self.target - self.mean).double().square()
        outputs = squares.shape[1] if self.per_output else 1
        return self._left.mean(squares.reshape(len(squares), outputs, -1).mean(2))

    def crossed(self, *, floor: bool) -> tuple[Tensor, Tensor]:
        """Return variances and constants of rows left out of the fit of scale and floor; the rate is that of all."""

        def fit(rest: Tensor) -> Callable[[Tensor], Tensor]:
            part = self.mean[rest], self.variance[rest], self.target[rest]
            fitted = _likeliest(*part, floor, self.per_output, self._left.at(rest))
            return lambda out: apply_scale(self.variance[out].double(), *fitted)

        return crossed((self.target - self.mean).double(), fit, self.per_output, self._left)

    def left_out(self, variance: Tensor) -> CrossValidated:
        """Return the rows with variances `(N, ...)` from fits to the rows of other folds."""
        mean, variance, target, unit = self.mean.double(), variance.double(), self.target.double(), self.plan.target
        if unit is not None:
            (mean, variance), target = unit.moments(mean, variance), unit.inverse(target)
        return CrossValidated(mean, variance, target)

    def path(self) -> tuple[TradeoffPoint, ...]:
        """Return steps from the optimal to the relaxed scale."""
        rows, shift = (self.mean, self.variance, self.target), self._nll_shift()
        steps = tradeoff(*rows, self.optimal, self.relaxed, weights=self.plan.weights)
        return tuple(replace(step, nll=step.nll + shift) for step in steps)

    def curves(self) -> dict[str, tuple[float, ...]]:
        """Return the calibration curves of the raw, the scaled, the relaxed and a constant variance, with levels."""
        curves: dict[str, tuple[float, ...]] = {}
        constant = torch.zeros_like(self.mean) + along_outputs(self.constant(), self.mean)
        for name, variance in {**self._variances(), "constant": constant}.items():
            levels, observed = metrics.calibration_curve(self.mean, variance, self.target, weights=self.plan.weights)
            curves |= {"levels": tuple(levels.tolist()), name: tuple(observed.tolist())}
        return curves

    def isotonic(self, choice: Choice) -> IsotonicKnots:
        """Fit isotonic intervals for the scale in use."""
        scale, floor = self.relaxed if choice == "relaxed" else self.optimal
        if isinstance(choice, float):
            scale = torch.full_like(scale, choice)
        z = residuals(self.mean, apply_scale(self.variance, scale, floor), self.target, self.per_output)
        return isotonic(z, tuple(scale.tolist()), tuple(floor.tolist()))

    @property
    def _left(self) -> CrossValidation:
        return CrossValidation(self.plan.weights)

    def _nll_shift(self) -> float:
        """Return by how much the NLL in the original unit is larger."""
        unit = self.plan.target
        if unit is None:
            return 0.0
        slopes = unit.log_slope(unit.inverse(self.target.double()))
        return -float(self._left.mean(slopes.reshape(len(slopes), -1).mean(1)))

    def _variances(self) -> dict[str, Tensor]:
        return {
            "unscaled": self.variance,
            "scaled": apply_scale(self.variance, *self.optimal),
            "relaxed": apply_scale(self.variance, *self.relaxed),
        }


def fit_scale(
    mean: Tensor, variance: Tensor, target: Tensor, plan: Plan, per_output: bool, *, optimal: Fitted | None = None
) -> ScaleFit:
    """Fit scale, floor (if the method has one) and relaxed scale to a variance that is not 0 everywhere.

    `optimal` are scales and floors that were fitted already.
    """
    weights = plan.weights
    least, zeros = least_positive(variance, per_output), int((variance == 0).sum())
    variance = lifted(variance, least)
    if optimal is None:
        optimal = _likeliest(mean, variance, target, plan.has_floor, per_output, weights)
    total = apply_scale(variance.double(), *optimal)
    factor = relaxed_scale(mean, total, target, per_output=per_output, weights=weights)
    relaxed = (optimal[0] * factor, optimal[1] * factor)
    return ScaleFit(mean, variance, target, plan, per_output, zeros, least, optimal, relaxed)


def _likeliest(
    mean: Tensor, variance: Tensor, target: Tensor, floor: bool, per_output: bool, weights: Tensor | None
) -> Fitted:
    """Return scale and floor of least NLL."""
    if floor:
        return fit_floor(mean, variance, target, per_output=per_output, weights=weights)
    scale = optimal_scale(mean, variance, target, per_output=per_output, weights=weights)
    return scale, torch.zeros_like(scale)


@dataclass(frozen=True)
class FittedRates:
    """The best rate, and all that were tried."""

    sites: Sites
    rate: Rate  # the best one
    fit: ScaleFit  # of the best one
    table: tuple[RateRow, ...]  # a row for each rate
    shares: dict[str, float] | None  # each site's share of the raw variance to first order


def fit_rates(network: Network, data: Labelled, plan: Plan) -> FittedRates:
    """Measure all validation rows at every rate, fit scale and floor, and take the best."""
    method, shares = plan.method, None
    assert not isinstance(method, Terms)
    rates = (0.0,) if isinstance(method, FirstOrder) else method.rates or PAPER_RATES
    sites, target, pairs = _measured(network, data, plan, rates)
    per_output = plan.has_outputs(target.shape)
    if isinstance(method, FirstOrder):
        ((mean, by_site),) = pairs
        shares = _shares(sites, by_site)
        pairs = [(mean, by_site.double().sum(-1).reshape(target.shape))]
    varying = [i for i, (_, variance) in enumerate(pairs) if not least_positive(variance, per_output).isinf().any()]
    if not varying:
        _refuse_no_variance(pairs[-1][1], per_output)
    if isinstance(method, FirstOrder):
        fits = [_first_order(*pairs[0], target, plan)]
    else:
        fits = [(rates[i], fit_scale(*pairs[i], target, plan, per_output)) for i in varying]
    table = tuple(fit.row(rate) for rate, fit in fits)
    touched = [row.zero_variances <= _MOST_UNTOUCHED * target.numel() for row in table]
    able = [i for i, enough in enumerate(touched) if enough or not any(touched)]
    best = min(able, key=lambda i: float(getattr(table[i], f"nll_{method.criterion}")))
    rate, fit = fits[best]
    if table[best].zero_variances or len(table) < len(pairs):
        _warn_of_zeros(table, len(pairs), target.numel())
    warn_of_poor_fit(fit.mean, target, "validation rows", per_output=per_output, stacklevel=_LEVEL - 1)
    return FittedRates(sites, rate, fit, table, shares)


def _measured(
    network: Network, data: Any, plan: Plan, rates: Sequence[Rate]
) -> tuple[Sites, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return sites, targets, and mean and raw variance `(N, ...)` at every rate, with the same random numbers.

    To first order there is one pair, whose variance is `(N, outputs, sites)` per unit of `rate / (1 - rate)`.
    """
    method, sites = plan.method, Sites()
    targets: list[Tensor] = []
    pairs: list[list[tuple[Tensor, Tensor]]] = []
    with closing(validation_batches(network.model, data, plan, per_batch=len(rates))) as stream:
        for x, y, sites, tick in stream:
            if isinstance(method, FirstOrder):
                result = linearize(network, x, sites, plan.readout)
                each = [(result.mean, result.variance_by_site)]
                tick()
            else:
                own = own_output(network, x, plan.readout) if method.mean == "model" else None
                drawn = moments(network, x, rates, sites, method.name, draw_options(plan), tick)
                each = [(rate.mean if own is None else own, rate.variance) for rate in drawn]
            targets.append(as_output(each[0][0], y).cpu())
            pairs.append([(mean.cpu(), variance.cpu()) for mean, variance in each])
    check_rows(sum(map(len, targets)), stacklevel=_LEVEL)
    check_shapes(target.shape[1:] for target in targets)
    by_rate = [zip(*rate, strict=True) for rate in zip(*pairs, strict=True)]
    joined = [(torch.cat(means), torch.cat(variances)) for means, variances in by_rate]
    return sites, torch.cat(targets), joined


def moments(
    model: nn.Module | Network,
    x: Any,
    rates: Sequence[Rate],
    sites: Sites,
    method: str,
    options: DrawOptions,
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """Return mean and raw variance of `x`, which was placed, at each rate; `tick` is called after each.

    Calibration and prediction measure in the same way, so that a scale fitted to one holds for the other. Methods other
    than `"sample"` use the readout of the options alone; terms are not measured here.
    """
    if method == "sample":
        return sample_rates(model, x, rates, sites, options, tick)
    if method == "linear":
        result = linearize(model, x, sites, options.readout)
        return [Moments(result.mean, result.variance(rate), 0) for rate in rates]
    propagated = []
    for rate in rates:
        propagated.append(propagate(model, x, rate, sites, options.readout))
        tick()
    return propagated


def draw_options(plan: Plan) -> DrawOptions:
    """Return how draws of a method are run; methods without draws need the readout alone."""
    method = plan.method
    if not isinstance(method, Sampling):
        return DrawOptions(2, method.seed, plan.readout)
    return DrawOptions(method.draws, method.seed, plan.readout, method.chunk, method.shared, engine=plan.engine)


def _first_order(mean: Tensor, total: Tensor, target: Tensor, plan: Plan) -> tuple[Rate, ScaleFit]:
    """Fit the variance at one rate of all sites: its odds are the (geometric) mean of the outputs' scales."""
    per_output = plan.has_outputs(target.shape)
    positive = lifted(total, least_positive(total, per_output))
    scales, floors = _likeliest(mean, positive, target, plan.has_floor, per_output, plan.weights)
    odds = float(scales[scales > 0].log().mean().exp()) if bool(scales.any()) else _NOMINAL_ODDS
    return odds / (1 + odds), fit_scale(mean, total * odds, target, plan, per_output, optimal=(scales / odds, floors))


def _shares(sites: Sites, by_site: Tensor) -> dict[str, float]:
    """Return each site's share of the first-order variance `(..., sites)`, on average over rows and outputs."""
    each = by_site.double().flatten(0, -2)
    each = each / each.sum(-1, keepdim=True).clamp_min(torch.finfo(each.dtype).tiny)
    return dict(zip([site.name for site in sites], each.mean(0).tolist(), strict=True))


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
