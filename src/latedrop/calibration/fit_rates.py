"""A scaled variance of one rate for numbers: every rate is fitted, and the best one taken.

The scaled criterion takes the rate with the smallest NLL of `scale(rate) · variance(rate) (+ floor)`, each rate with
its own best scale (Ledda, Fumera, Roli 2023); the unscaled one takes the rate with the smallest NLL of the variance as
it is (Loquercio et al. 2020). To first order all rates are known from one pass, and what is searched is how much each
site counts.

First order leaves out all but small masks, and propagation takes units as independent. A scale hides how far off they
are, so that a few draws on a few validation rows are compared with them:

    ratio = sum of approximated variances / sum of variances over draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from warnings import warn

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import CrossValidation, standard_error
from latedrop.calibration.fit_sites import fit_sites
from latedrop.calibration.measure import MeasuredRates, moments
from latedrop.calibration.methods import PAPER_RATES, FirstOrder, Plan, Sampling, Terms
from latedrop.calibration.record import RateRow
from latedrop.calibration.scale import apply_scale
from latedrop.calibration.scale_fit import ScaleFit, fit_scale, refuse_no_errors
from latedrop.calibration.targets import warn_of_poor_fit
from latedrop.calibration.verdict import losses
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import LatedropWarning, OutputError
from latedrop.metrics.entries import average
from latedrop.network.network import Network
from latedrop.network.sites import Rate, Sites, rates_by_site

__all__ = ["RatesFit", "fit_rates", "ratio_to_draws"]

_MOST_UNTOUCHED = 0.1  # a rate that leaves more rows without any variance has not measured it
_DRAWS, _DROPS = 50, 100  # so many units must be dropped in all for a variance over so many draws to be told
_SMALL = 0.1  # a rate to which first order should hold
_FAR = 3.0
_HARDLY_ANY = 5
_GAIN = 0.02  # nats that are worth a word
_LEVEL = 5  # of warnings, up to the caller of `calibrate`


@dataclass(frozen=True)
class RatesFit:
    """What was fitted to the rates.

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
    if isinstance(method, FirstOrder):
        fits, shares = _fit_sites(measured, method, plan)
    else:
        options: dict[str, Any] = {"per_output": per_output, "floor": method.floor, "unit": plan.target}
        options["weights"] = plan.weights
        pairs = zip(method.rates or PAPER_RATES, measured.means, measured.variances, strict=True)
        fits = [(rate, fit_scale(mean, variance, target, **options)) for rate, mean, variance in pairs]
    usable = [(rate, fit) for rate, fit in fits if fit is not None]
    if not usable:
        _refuse_no_variance(measured.variances[-1], per_output)
    table = tuple(fit.row(rate) for rate, fit in usable)
    touched = [row.zero_variances <= _MOST_UNTOUCHED * target.numel() for row in table]
    able = [i for i, enough in enumerate(touched) if enough or not any(touched)]
    best = min(able, key=lambda i: float(getattr(table[i], f"nll_{method.criterion}")))
    rate, fit = usable[best]
    if table[best].zero_variances or len(table) < len(fits):
        _warn_of_zeros(table, len(fits), target.numel(), drawn=isinstance(method, Sampling))
    warn_of_poor_fit(
        fit.mean, target, "validation rows", per_output=per_output, stacklevel=_LEVEL - 1, hint=plan.target is None
    )
    if isinstance(method, Sampling):
        _warn_of_few_drops(rate, measured.sites, method.draws)
    _warn_of_edge(usable, best, method.criterion)
    return RatesFit(rate, fit, table, shares)


def _fit_sites(
    measured: MeasuredRates, method: FirstOrder, plan: Plan
) -> tuple[list[tuple[Rate, ScaleFit | None]], dict[str, float]]:
    """Fit how much each site counts, and the rate that this stands for."""
    (mean,), (variances,), target, sites = measured.means, measured.variances, measured.target, measured.sites
    per_output = plan.has_outputs(target.shape)
    outputs = target.shape[1] if per_output else 1

    def entries(values: Tensor) -> Tensor:
        """`(M, K)`, one column for each output that has a scale of its own; the entries of a row stay together."""
        return values.double().reshape(len(values), outputs, -1).movedim(1, 2).reshape(-1, outputs)

    columns = entries(target - mean)
    stacked = torch.stack([entries(v) for v in variances.unbind(-1)], -1)
    if not bool(stacked.sum(2).gt(0).any(0).all()):
        _refuse_no_variance(stacked.sum(2), per_output)
    if not bool(columns.any(0).all()):
        refuse_no_errors()
    weights = plan.weights
    counts = None if weights is None else weights.repeat_interleave(len(columns) // len(target))
    found = fit_sites(columns, stacked, per_site=method.per_site, floor=method.floor, weights=counts)
    raw = (variances.double() @ found.odds).reshape(target.shape)
    rates = (found.odds / (1 + found.odds)).tolist()
    rate: Rate = {s.name: r for s, r in zip(sites, rates, strict=True)} if method.per_site else rates[0]
    options: dict[str, Any] = {"per_output": per_output, "unit": plan.target, "weights": weights}
    fit = fit_scale(mean, raw, target, optimal=(found.scales, found.floors), **options)
    part = stacked * found.odds
    shares = (part / part.sum(-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)).mean((0, 1)).tolist()
    return [(rate, fit)], {site.name: share for site, share in zip(sites, shares, strict=True)}


def _refuse_no_variance(variance: Tensor, per_output: bool) -> NoReturn:
    """Raise where dropout does not move an output; name those of several that have no variance at all."""
    still = [i for i, column in enumerate(variance.unbind(1)) if not bool(column.any())] if per_output else []
    which = f"; outputs {still} do not" if 0 < len(still) < variance.shape[1] else ""
    raise OutputError(
        f"expected an output that varies under dropout at some rate{which}: it is the same in all draws. Check "
        "with find_sites that the sites reach the output, and that the readout does not round it."
    )


def _warn_of_zeros(table: Sequence[RateRow], tried: int, values: int, *, drawn: bool) -> None:
    found = [f"{row.zero_variances} at rate {row.rate}" for row in table if row.zero_variances]
    if len(table) < tried:
        found.insert(0, f"all {values} at {tried - len(table)} rates, which are left out")
    touched, remedy = ("draw touched", "more draws or larger rates avoid") if drawn else ("site moves", "a floor mends")
    if found:
        warn(
            f"of {values} validation values, some have zero variance, as no {touched} them: {'; '.join(found)}. They "
            "are lifted to the smallest positive variance, and a rate with more than a tenth of them is not chosen "
            f"where another is there; {remedy} it.",
            LatedropWarning,
            stacklevel=_LEVEL,
        )


def ratio_to_draws(network: Network, measured: MeasuredRates, rate: Rate, plan: Plan) -> float | None:
    """The approximated variance over that of a few draws; None where these do not vary, or were taken anyway.

    At the chosen rate, or at one at which draws can tell; of first order at 0.1 or less, as it is one for small rates.
    It warns where the two are far apart.
    """
    if isinstance(plan.method, Sampling):
        return None
    x, sites = measured.few, measured.sites
    most = _SMALL if isinstance(plan.method, FirstOrder) else 0.9
    wanted = rates_by_site(sites, rate)
    least = {site.name: min(_SMALL, _DROPS / (_DRAWS * site.count * site.calls)) for site in sites}
    used = {name: min(max(value, least[name]), most) for name, value in wanted.items() if value > 0}
    options = DrawOptions(_DRAWS, 0, plan.readout, engine="loop")
    (drawn,) = sample_rates(network, x, [used], sites, options)
    (found,) = moments(network, x, [used], sites, plan.method.name, options)
    spread = float(drawn.variance.double().sum())
    if spread <= 0:
        return None
    ratio = float(found.variance.double().sum()) / spread
    if not 1 / _FAR <= ratio <= _FAR:
        why = {
            "linear": "the output bends too much for a first order, or something cuts off its gradients",
            "propagate": "units that propagation takes as independent are not, as behind a stack of convolutions",
        }[plan.method.name]
        warn(
            f"the variance of method={plan.method.name!r} is {ratio:.2g} times that of {_DRAWS} draws on a few "
            f"validation rows: {why}. The scale makes up for its size, not for what it says about one row against "
            "another. Compare with method='sample'.",
            LatedropWarning,
            stacklevel=_LEVEL - 1,
        )
    return ratio


def _warn_of_edge(fits: Sequence[tuple[Rate, ScaleFit]], best: int, criterion: str) -> None:
    """Warn where the best of several rates is the smallest or the largest, and the NLL still falls towards it."""
    chosen = fits[best]
    found = sorted((pair for pair in fits if isinstance(pair[0], float)), key=lambda pair: float(pair[0]))  # type: ignore[arg-type]
    if len(found) < 3 or (chosen is not found[0] and chosen is not found[-1]):
        return
    beside = found[1] if chosen is found[0] else found[-2]
    gain, weights = _losses(beside[1], criterion) - _losses(chosen[1], criterion), chosen[1].weights
    if float(average(gain, weights)) > max(_GAIN, 2 * standard_error(gain, CrossValidation(weights=weights))):
        side, more = (
            ("smallest", "smaller rates with more draws") if chosen is found[0] else ("largest", "larger rates")
        )
        warn(
            f"the best rate, {chosen[0]:g}, is the {side} that was tried, and the NLL still falls towards it: a better "
            f"one may lie beyond. Try {more}, rates=[...].",
            LatedropWarning,
            stacklevel=_LEVEL,
        )


def _warn_of_few_drops(rate: Rate, sites: Sites, draws: int) -> None:
    """Warn where the variance rests on a handful of dropped units."""
    rates = rates_by_site(sites, rate)
    drops = draws * sum(site.count * site.calls * rates[site.name] for site in sites)
    if drops < _HARDLY_ANY:
        warn(
            f"at the chosen rate {draws} draws drop {drops:.1f} units in all, on average: the variance rests on these. "
            "Take more draws, larger rates, or method='linear', which is the limit of small rates.",
            LatedropWarning,
            stacklevel=_LEVEL,
        )


def _losses(fit: ScaleFit, criterion: str) -> Tensor:
    """The NLL of every validation row, but for a constant."""
    variance = fit.variance.double()
    variance = apply_scale(variance, *fit.optimal) if criterion == "scaled" else variance
    return losses(fit.target.double() - fit.mean.double(), variance)
