"""The search over rates.

For every rate the validation data give a mean and a variance. The scaled criterion takes the rate with the smallest NLL
of `scale(rate) · variance(rate) (+ floor)`, each rate with its own best scale (Ledda, Fumera, Roli 2023); the unscaled
one takes the rate with the smallest NLL of the variance as it is (Loquercio et al. 2020). The same random numbers serve
all rates, and each batch is read once. To first order (`method="linear"`) all rates are known from one pass, and what
is searched is how much each site counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.calibration.batches import batches, first_rows, is_pair, row_total
from latedrop.calibration.checks import few_rows, ratio_to_draws, warn_of_edge, warn_of_few_drops, warn_of_ratio
from latedrop.calibration.fit import fit_sites
from latedrop.calibration.measuring import moments
from latedrop.calibration.rate_fit import RateFit, fit_rate
from latedrop.calibration.record import Calibration, RateRow
from latedrop.calibration.seen import marks_of, sketch
from latedrop.calibration.setup import PAPER_RATES, Setup
from latedrop.calibration.targets import as_output, joined, warn_of_poor_fit
from latedrop.calibration.term_search import MeasuredTerms, outputs_last
from latedrop.calibration.term_search import fitted as fitted_terms
from latedrop.calibration.term_search import measured as measured_terms
from latedrop.calibration.weights import fingerprint
from latedrop.dropout.first_order import linearize
from latedrop.dropout.sampling import own_output
from latedrop.errors import DataError, LatedropWarning, OutputError
from latedrop.network.find_sites import find_sites
from latedrop.network.network import Network, check_module
from latedrop.network.sites import Rate, Sites
from latedrop.progress import progress
from latedrop.terminal import listed

__all__ = ["PAPER_RATES", "batches_with_sites", "measured_by_terms", "recorded_terms", "search"]

_log = logging.getLogger(__name__)
_SHOWN = 6
_EXAMPLES = 1024  # rows that sites are found on, at most
_MOST_UNTOUCHED = 0.1  # a rate that leaves more rows without any variance has not measured it


def search(model: nn.Module, data: Any, setup: Setup) -> Calibration:
    """Measure the validation data and record what fits it best."""
    check_module(model)
    _log.info("calibrating %s by method %s", type(model).__name__, setup.method)
    if setup.method == "terms":
        return _told(_by_terms(model, data, setup))
    network = Network(model)
    measured = (_first_order if setup.method == "linear" else _by_rate)(network, data, setup)
    fits, target = measured.fits, measured.target
    if not fits:
        which = f"; outputs {list(measured.constant)} do not" if measured.constant else ""
        raise OutputError(
            f"expected an output that varies under dropout at some rate{which}: it is the same in all draws. Check "
            "with find_sites that the sites reach the output, and that the readout does not round it."
        )
    table = [fit.row() for fit in fits]
    tried = 1 if setup.method == "linear" else len(setup.rates)
    touched = [row.zero_variances <= _MOST_UNTOUCHED * target.numel() for row in table]
    able = [i for i, enough in enumerate(touched) if enough or not any(touched)]
    best = min(able, key=lambda i: float(getattr(table[i], f"nll_{setup.criterion}")))
    if table[best].zero_variances or len(table) < tried:
        _warn_of_zeros(table, tried, target.numel(), drawn=setup.method == "sample")
    chosen = fits[best]
    told: dict[str, Any] = {"per_output": chosen.per_output, "stacklevel": 4, "hint": setup.target is None}
    warn_of_poor_fit(chosen.mean, target, "validation rows", **told)
    if setup.method == "sample":
        warn_of_few_drops(table[best].rate, measured.sites, setup.draws)
    warn_of_edge(fits, chosen, setup.criterion)
    ratio = None
    if setup.method != "sample":
        ratio = ratio_to_draws(network, measured.few, table[best].rate, measured.sites, setup)
        warn_of_ratio(ratio, setup.method)
    record = _record(model, setup, measured, table, best)
    return _told(replace(record, ratio_to_draws=ratio, verdict=chosen.verdict(floor=setup.floor)))


def _told(record: Calibration) -> Calibration:
    if record.terms is not None:
        for candidate in record.terms.candidates:
            _log.debug("%s: %+.4f nats (+- %.4f)", candidate.name, candidate.gain, candidate.gain_error)
        _log.info("the variance is made of %s", record.terms.choice)
    else:
        for row in record.table:
            _log.debug("rate %s: NLL %.4f raw, %.4f scaled", row.rate, row.nll_unscaled, row.nll_scaled)
        _log.info("rate %s, scale %s", record.rate, record.scale)
    _log.info("%d validation rows: %s", record.rows, record.verdict)
    return record


@dataclass(frozen=True)
class _Measured:
    sites: Sites
    target: Tensor
    fits: list[RateFit]
    few: Any
    shares: dict[str, float] | None = None
    constant: tuple[int, ...] = ()


def _by_rate(network: Network, data: Any, setup: Setup) -> _Measured:
    """One pass over the data, every rate on every batch; a fit for each rate whose output varies."""
    rates, sites, few = setup.rates, Sites(setup.sites or ()), None
    means: list[list[Tensor]] = [[] for _ in rates]
    variances: list[list[Tensor]] = [[] for _ in rates]
    targets: list[Tensor] = []
    with closing(batches_with_sites(network.model, data, setup, per_batch=len(rates))) as stream:
        for x, y, sites, tick in stream:
            few = few_rows(x, sites) if few is None else few
            own = own_output(network, x, setup.readout) if setup.mean == "model" else None
            for i, moment in enumerate(moments(network, x, rates, sites, setup.method, setup.sampling, tick)):
                center = moment.mean if own is None else own
                if i == 0:
                    targets.append(as_output(center, y).cpu())
                means[i].append(center.cpu())
                variances[i].append(moment.variance.cpu())
    target = joined(targets, stacklevel=5)
    per_output, weights = setup.has_outputs(target), setup.weights(len(target))
    fits: list[RateFit] = []
    options: dict[str, Any] = {"per_output": per_output, "floor": setup.floor, "unit": setup.target, "weights": weights}
    constant: tuple[int, ...] = ()
    for rate, mean_parts, variance_parts in zip(rates, means, variances, strict=True):
        mean, variance = torch.cat(mean_parts), torch.cat(variance_parts)
        fit = fit_rate(rate, mean, variance, target, **options)
        if fit is not None:
            fits.append(fit)
        else:
            constant = _constant_outputs(variance, per_output)
        mean_parts.clear()
        variance_parts.clear()
    return _Measured(sites, target, fits, few, constant=constant)


def _first_order(network: Network, data: Any, setup: Setup) -> _Measured:
    """One pass over the data, then a fit of the sites' odds."""
    sites, few = Sites(setup.sites or ()), None
    means, by_site, targets = [], [], []
    with closing(batches_with_sites(network.model, data, setup, per_batch=1)) as stream:
        for x, y, sites, tick in stream:
            few = few_rows(x, sites) if few is None else few
            result = linearize(network, x, sites, setup.readout)
            targets.append(as_output(result.mean, y).cpu())
            means.append(result.mean.cpu())
            by_site.append(result.variance_by_site.cpu())
            tick()
    target = joined(targets, stacklevel=5)
    mean, variances = torch.cat(means), torch.cat(by_site)
    per_output = setup.has_outputs(target)
    columns = outputs_last((target - mean).double(), per_output)
    parts = [outputs_last(v.reshape(target.shape), per_output) for v in variances.double().unbind(-1)]
    stacked = torch.stack(parts, -1)
    if not bool(stacked.sum(2).gt(0).any(0).all()):
        return _Measured(sites, target, [], few, constant=_constant_outputs(stacked.sum(2), per_output))
    if not bool(columns.any(0).all()):
        raise DataError(_no_errors())
    weights = setup.weights(len(target))
    counts = None if weights is None else weights.repeat_interleave(len(columns) // len(target))
    options: dict[str, Any] = {"per_site": setup.per_site, "floor": setup.floor, "loss": setup.loss, "weights": counts}
    found = fit_sites(columns, stacked, **options)
    raw = (variances.double() @ found.odds).reshape(target.shape)
    rates = (found.odds / (1 + found.odds)).tolist()
    rate: Rate = {s.name: r for s, r in zip(sites, rates, strict=True)} if setup.per_site else rates[0]
    options = {"per_output": per_output, "unit": setup.target, "weights": weights}
    fit = fit_rate(rate, mean, raw, target, optimal=(found.scales, found.floors), **options)
    part = stacked * found.odds
    shares = (part / part.sum(-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)).mean((0, 1)).tolist()
    named = {site.name: share for site, share in zip(sites, shares, strict=True)}
    return _Measured(sites, target, [fit] if fit is not None else [], few, named)


def _by_terms(model: nn.Module, data: Any, setup: Setup) -> Calibration:
    """One pass over the data, then a fit of the terms; their variance stands where other methods have a raw one."""
    return recorded_terms(model, measured_by_terms(model, data, setup), setup)


def measured_by_terms(model: nn.Module, data: Any, setup: Setup) -> MeasuredTerms:
    """The validation rows with their terms, before any fit."""
    return measured_terms(Network(model), batches_with_sites(model, data, setup, per_batch=1), setup)


def recorded_terms(model: nn.Module, found: MeasuredTerms, setup: Setup) -> Calibration:
    """The record of what fits measured terms best."""
    per_output = found.per_output
    if not bool(outputs_last(found.target != found.mean, per_output).any(0).all()):
        raise DataError(_no_errors())
    told: dict[str, Any] = {"per_output": per_output, "stacklevel": 5, "hint": setup.target is None}
    warn_of_poor_fit(found.mean, found.target, "validation rows", **told)
    terms, variance, verdict = fitted_terms(found, setup)
    one = torch.ones(found.target.shape[1] if per_output else 1, dtype=torch.float64)
    optimal = (one, torch.zeros_like(one))
    options: dict[str, Any] = {"per_output": per_output, "optimal": optimal, "unit": setup.target}
    options["weights"] = setup.weights(len(found.target))
    fit = fit_rate({}, found.mean, variance, found.target, **options)
    assert fit is not None  # the floor is above 0
    record = _record(model, setup, _Measured(found.sites, found.target, [fit], None), [fit.row()], 0)
    return replace(record, terms=terms, verdict=verdict, output_shape=found.shape)


def _record(model: nn.Module, setup: Setup, measured: _Measured, table: list[RateRow], best: int) -> Calibration:
    row, fit, readout = table[best], measured.fits[best], setup.readout
    return Calibration(
        rate=row.rate,
        scales=row.scale,
        relaxed_scales=row.relaxed_scale,
        floors=row.floor,
        relaxed_floors=row.relaxed_floor,
        choice=setup.scale,
        criterion=setup.criterion,
        method=setup.method,
        mean=setup.mean or "model",
        draws=setup.draws if setup.method == "sample" else 0,
        seed=setup.seed,
        shared=setup.shared,
        per_output=fit.per_output,
        rows=len(fit.target),
        output_shape=tuple(fit.target.shape[1:]),
        least_variance=tuple(fit.least.tolist()),
        sites=measured.sites,
        readout=None if callable(readout) else readout,
        custom_readout=getattr(readout, "__qualname__", type(readout).__name__) if callable(readout) else None,
        table=tuple(table),
        path=fit.path(),
        curves=fit.curves(),
        shares=measured.shares,
        intervals=fit.isotonic(setup.scale) if setup.intervals == "isotonic" else None,
        fingerprint=fingerprint(model),
        versions={"torch": torch.__version__},
        constant=tuple(fit.constant().tolist()),
        target=setup.target,
        seen=sketch(marks_of(fit.mean, fit.target)),
        columns=None if setup.columns is None else {key: tuple(names) for key, names in setup.columns.items()},
    )


def batches_with_sites(
    model: nn.Module, data: Any, setup: Setup, per_batch: int
) -> Generator[tuple[Any, Tensor, Sites, Callable[[], Any]], None, None]:
    """Inputs, targets in the model's unit, sites, found on the first inputs, and what to call after every step."""
    sites = None if setup.sites is None else Sites(setup.sites)
    with progress("calibrating", row_total(data), show=setup.progress) as done:
        for x, y in batches(data, model, batch_size=setup.batch_size, unpack=setup.unpack, collate=setup.collate):
            if sites is None:
                # Of a pair more rows than the first batch are there, should it not take every branch.
                pair = setup.unpack is None and is_pair(data)
                examples = first_rows(data, model, _EXAMPLES, setup.collate) if pair else x
                sites = find_sites(model, examples, select=setup.select, kind=setup.kind)
                _log.info("sites found: %s", listed([site.name for site in sites], _SHOWN))
            y = y if setup.target is None else setup.target.forward(y)
            yield x, y, sites, partial(done, len(y) / per_batch)


def _constant_outputs(variance: Tensor, per_output: bool) -> tuple[int, ...]:
    """Which of several outputs have no variance at all; none where that is true of every one."""
    if not per_output:
        return ()
    still = [i for i, column in enumerate(variance.unbind(1)) if not bool(column.any())]
    return tuple(still) if len(still) < variance.shape[1] else ()


def _no_errors() -> str:
    return (
        "expected errors to fit a variance to; found every prediction equal to its target, perhaps of one "
        "output alone. Pass held-out data, not what the model was fitted to."
    )


def _warn_of_zeros(table: list[RateRow], tried: int, values: int, *, drawn: bool) -> None:
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
            stacklevel=5,
        )
