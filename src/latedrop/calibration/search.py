"""The search over rates.

For every rate the validation data give a mean and a variance. The scaled criterion takes the rate with the smallest NLL
of `scale(rate) · variance(rate) (+ floor)`, each rate with its own best scale (Ledda, Fumera, Roli 2023); the unscaled
one takes the rate with the smallest NLL of the variance as it is (Loquercio et al. 2020). The same random numbers serve
all rates, and each batch is read once. To first order (`method="linear"`) all rates are known from one pass, and what
is searched is how much each site counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop import metrics
from latedrop.calibration.batches import Unpack, batch_count, batches
from latedrop.calibration.fit import Loss, fit_sites
from latedrop.calibration.intervals import Isotonic
from latedrop.calibration.record import Calibration, Choice, Method, RateRow, checked_choice
from latedrop.calibration.scale import (
    TradeoffPoint,
    apply_scale,
    fit_floor,
    least_positive,
    lifted,
    optimal_scale,
    relaxed_scale,
    tradeoff,
)
from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError
from latedrop.metrics.entries import by_output
from latedrop.model.forward import Readout, plain_names
from latedrop.model.sites import Kind, Rate, Select, Site, Sites, find_sites, odds_by_site
from latedrop.variance.first_order import linearize
from latedrop.variance.propagation import propagate
from latedrop.variance.sampling import ENGINES, Engine, Moments, own_output, sample_rates

__all__ = ["PAPER_RATES", "Setup", "fingerprint", "moments", "residuals", "search"]

PAPER_RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
_FEW_ROWS = 10
_MOST_UNTOUCHED = 0.1  # a rate that leaves more rows without any variance has not measured it


@dataclass(frozen=True)
class Setup:
    """How the variance is measured and fitted; the fields are the arguments of `calibrate`."""

    method: Method = "sample"
    rates: Sequence[Rate] = PAPER_RATES
    draws: int = 100
    criterion: Literal["scaled", "unscaled"] = "scaled"
    mean: Literal["draws", "model"] | None = None
    floor: bool = False
    per_site: bool = False
    loss: Loss = "nll"
    per_output: bool | None = None
    scale: Choice = "optimal"
    isotonic: bool = False
    sites: Sequence[Site] | None = None
    select: Select = None
    kind: Kind = "element"
    readout: Readout = None
    seed: int = 0
    shared: bool = True
    batch_size: int = 256
    chunk: int | None = None
    engine: Engine = "auto"
    unpack: Unpack | None = None
    progress: bool = True

    def checked(self) -> Setup:
        """Itself, or `ArgumentError`."""
        _one_of("method", self.method, ("sample", "linear", "propagate"))
        _one_of("criterion", self.criterion, ("scaled", "unscaled"))
        _one_of("mean", self.mean, ("draws", "model", None))
        _one_of("loss", self.loss, ("nll", "crps"))
        _one_of("engine", self.engine, ENGINES)
        checked_choice(self.scale)
        if self.sites is not None and self.select is not None:
            raise ArgumentError("expected sites= or select=, found both. Select when you call find_sites.")
        if self.method != "linear" and (self.per_site or self.loss != "nll"):
            raise ArgumentError(
                f"expected method='linear' with per_site=True or loss='crps'; found method={self.method!r}. "
                "Rates that differ by site can be tried with rates=[{pattern: rate, ...}, ...]."
            )
        if self.method == "linear" and self.mean == "draws":
            raise ArgumentError(
                "expected mean='model' with method='linear', which draws nothing; found mean='draws'. Leave it out."
            )
        return self

    def by_output(self, target: Tensor) -> bool:
        """Whether each index of axis 1 of outputs like `target` has its own scale."""
        wanted = target.dim() != 3 if self.per_output is None else self.per_output
        return wanted and target.dim() > 1 and target.shape[1] > 1

    @property
    def center(self) -> str:
        """Where predictions are centred, `"draws"` or `"model"`."""
        return self.mean or ("model" if self.method == "linear" else "draws")


def search(model: nn.Module, data: Any, setup: Setup) -> Calibration:
    """Measure the validation data and record the best rate, scale and floor."""
    setup = setup.checked()
    measured = (_first_order if setup.method == "linear" else _by_rate)(model, data, setup)
    fits, target, shares = measured.fits, measured.target, measured.shares
    if not fits:
        which = f"; outputs {list(measured.constant)} do not" if measured.constant else ""
        raise OutputError(
            f"expected an output that varies under dropout at some rate{which}: it is the same in all draws. Check "
            "with find_sites that the sites reach the output, and that the readout does not round it."
        )
    table = [fit.row(rate) for rate, fit in fits]
    tried = 1 if setup.method == "linear" else len(setup.rates)
    touched = [row.zero_variances <= _MOST_UNTOUCHED * target.numel() for row in table]
    able = [i for i, enough in enumerate(touched) if enough or not any(touched)]
    best = min(able, key=lambda i: float(getattr(table[i], f"nll_{setup.criterion}")))
    row, fit, readout = table[best], fits[best][1], setup.readout
    if row.zero_variances or len(table) < tried:
        _warn_of_zeros(table, tried, target.numel())
    choice = checked_choice(setup.scale)
    return Calibration(
        rate=row.rate,
        scales=row.scale,
        relaxed_scales=row.relaxed_scale,
        floors=row.floor,
        relaxed_floors=row.relaxed_floor,
        choice=choice,
        criterion=setup.criterion,
        method=setup.method,
        mean=setup.center,
        draws=setup.draws if setup.method == "sample" else 0,
        seed=setup.seed,
        shared=setup.shared,
        per_output=fit.per_output,
        rows=len(target),
        output_shape=tuple(target.shape[1:]),
        least_variance=tuple(fit.least.tolist()),
        sites=measured.sites,
        readout=None if callable(readout) else readout,
        custom_readout=getattr(readout, "__qualname__", type(readout).__name__) if callable(readout) else None,
        table=tuple(table),
        path=fit.path(),
        curves=fit.curves(),
        shares=shares,
        intervals=fit.isotonic(choice) if setup.isotonic else None,
        fingerprint=fingerprint(model),
        versions={"torch": torch.__version__},
    )


def moments(
    model: nn.Module,
    x: Any,
    rates: Sequence[Rate],
    sites: Sites,
    *,
    method: str,
    readout: Readout,
    draws: int,
    seed: int,
    shared: bool,
    chunk: int | None,
    engine: Engine = "auto",
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """Mean and raw variance of `x`, which was placed, at each rate, by one of the three methods."""
    if method == "sample":
        return sample_rates(model, x, rates, sites, draws, seed, readout, chunk, shared, engine=engine, tick=tick)
    if method == "linear":
        result = linearize(model, x, sites, readout)
        return [Moments(result.mean, result.variance(odds_by_site(sites, rate)), 0) for rate in rates]
    found = []
    for rate in rates:
        found.append(propagate(model, x, rate, sites, readout))
        tick()
    return found


def residuals(mean: Tensor, variance: Tensor, target: Tensor, per_output: bool) -> list[Tensor]:
    """Standardised residuals `(target - mean) / std`, flat: one tensor, or one per index of axis 1."""
    z = (target.to(mean) - mean) / variance.sqrt()
    return [column.flatten() for column in by_output(z, per_output)]


def fingerprint(model: nn.Module) -> str:
    """A digest of the model's parameters and buffers: names, shapes, dtypes, and up to 1024 values of each."""
    digest, plain = hashlib.sha256(), plain_names(model)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{plain(name)} {tuple(value.shape)} {value.dtype}".encode())
            flat = value.detach().reshape(-1)
            values = flat[:: max(1, -(-flat.numel() // 1024))].cpu()
            digest.update(values.to(torch.float64).numpy().tobytes())
    return digest.hexdigest()


def checked_rates(rates: Any) -> list[Rate]:
    """The rates as a list, or `ArgumentError`."""
    if isinstance(rates, (Real, Mapping)):
        rates = [rates]
    if isinstance(rates, str) or not isinstance(rates, Iterable):
        raise ArgumentError(f"expected a sequence of rates; found {rates!r}.")
    found: list[Rate] = []
    for rate in rates:
        values = list(rate.values()) if isinstance(rate, Mapping) else [rate]
        if not all(_is_rate(value) for value in values) or not any(value > 0 for value in values):
            raise ArgumentError(f"expected rates inside (0, 1); found {rate!r}.")
        found.append({name: float(v) for name, v in rate.items()} if isinstance(rate, Mapping) else float(rate))
    if not found:
        raise ArgumentError("expected at least one rate; found none.")
    return found


@dataclass
class _Measured:
    sites: Sites
    target: Tensor
    fits: list[tuple[Rate, _Fit]]
    shares: dict[str, float] | None = None
    constant: tuple[int, ...] = ()


def _by_rate(model: nn.Module, data: Any, setup: Setup) -> _Measured:
    """One pass over the data, every rate on every batch; a fit for each rate whose output varies."""
    rates = setup.rates
    sites = Sites(setup.sites) if setup.sites is not None else None
    means: list[list[Tensor]] = [[] for _ in rates]
    variances: list[list[Tensor]] = [[] for _ in rates]
    targets: list[Tensor] = []
    with closing(_batches(model, data, setup, per_batch=len(rates))) as stream:
        for x, y, tick in stream:
            if sites is None:
                sites = find_sites(model, x, select=setup.select, kind=setup.kind)
            own = own_output(model, x, setup.readout) if setup.center == "model" else None
            found = moments(
                model,
                x,
                rates,
                sites,
                method=setup.method,
                readout=setup.readout,
                draws=setup.draws,
                seed=setup.seed,
                shared=setup.shared,
                chunk=setup.chunk,
                engine=setup.engine,
                tick=tick,
            )
            for i, moment in enumerate(found):
                center = moment.mean if own is None else own
                if i == 0:
                    targets.append(metrics.align_target(center, y).to(center.dtype).cpu())
                means[i].append(center.cpu())
                variances[i].append(moment.variance.cpu())
    target = _joined(targets)
    assert sites is not None
    fits: list[tuple[Rate, _Fit]] = []
    constant: tuple[int, ...] = ()
    for rate, mean_parts, variance_parts in zip(rates, means, variances, strict=True):
        variance = torch.cat(variance_parts)
        fit = _Fit.of(torch.cat(mean_parts), variance, target, setup)
        if fit is not None:
            fits.append((rate, fit))
        else:
            constant = _constant_outputs(variance, setup.by_output(target))
        mean_parts.clear()
        variance_parts.clear()
    return _Measured(sites, target, fits, constant=constant)


def _first_order(model: nn.Module, data: Any, setup: Setup) -> _Measured:
    """One pass over the data, then a fit of the sites' odds."""
    sites = Sites(setup.sites) if setup.sites is not None else None
    means, by_site, targets = [], [], []
    with closing(_batches(model, data, setup, per_batch=1)) as stream:
        for x, y, tick in stream:
            if sites is None:
                sites = find_sites(model, x, select=setup.select, kind=setup.kind)
            result = linearize(model, x, sites, setup.readout)
            targets.append(metrics.align_target(result.mean, y).to(result.mean.dtype).cpu())
            means.append(result.mean.cpu())
            by_site.append(result.variance_by_site.cpu())
            tick()
    target = _joined(targets)
    assert sites is not None
    mean, variances = torch.cat(means), torch.cat(by_site)
    per_output = setup.by_output(target)
    columns = _outputs_last((target - mean).double(), per_output)
    parts = [_outputs_last(v.reshape(target.shape), per_output) for v in variances.double().unbind(-1)]
    stacked = torch.stack(parts, -1)
    if not bool(stacked.sum(2).gt(0).any(0).all()):
        return _Measured(sites, target, [], constant=_constant_outputs(stacked.sum(2), per_output))
    if not bool(columns.any(0).all()):
        raise DataError(
            "expected errors to fit a variance to; found every prediction equal to its target. "
            "Pass held-out data, not what the model was fitted to."
        )
    found = fit_sites(columns, stacked, per_site=setup.per_site, floor=setup.floor, loss=setup.loss)
    raw = (variances.double() @ found.odds).reshape(target.shape)
    rates = (found.odds / (1 + found.odds)).tolist()
    rate: Rate = {s.name: r for s, r in zip(sites, rates, strict=True)} if setup.per_site else rates[0]
    fit = _Fit.of(mean, raw, target, setup, (found.scales, found.floors))
    part = stacked * found.odds
    shares = (part / part.sum(-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)).mean((0, 1)).tolist()
    named = {site.name: share for site, share in zip(sites, shares, strict=True)}
    return _Measured(sites, target, [(rate, fit)] if fit is not None else [], named)


@dataclass
class _Fit:
    """Scale, floor and relaxed scale of one rate, with the validation moments they were fitted to."""

    mean: Tensor
    variance: Tensor
    target: Tensor
    per_output: bool
    zeros: int
    least: Tensor
    optimal: tuple[Tensor, Tensor]
    relaxed: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        mean: Tensor,
        variance: Tensor,
        target: Tensor,
        setup: Setup,
        optimal: tuple[Tensor, Tensor] | None = None,
    ) -> _Fit | None:
        """None where some output does not vary at all."""
        per_output = setup.by_output(target)
        least = least_positive(variance, per_output)
        if bool(least.isinf().any()):
            return None
        zeros = int((variance == 0).sum())
        variance = lifted(variance, least)
        if optimal is None and setup.floor:
            optimal = fit_floor(mean, variance, target, per_output=per_output)
        elif optimal is None:
            scale = optimal_scale(mean, variance, target, per_output=per_output)
            optimal = (scale, torch.zeros_like(scale))
        total = apply_scale(variance.double(), *optimal)
        factor = relaxed_scale(mean, total, target, per_output=per_output)
        relaxed = (optimal[0] * factor, optimal[1] * factor)
        return cls(mean, variance, target, per_output, zeros, least, optimal, relaxed)

    def _variances(self) -> dict[str, Tensor]:
        return {
            "unscaled": self.variance,
            "scaled": apply_scale(self.variance, *self.optimal),
            "relaxed": apply_scale(self.variance, *self.relaxed),
        }

    def row(self, rate: Rate) -> RateRow:
        values: dict[str, float] = {}
        for name, variance in self._variances().items():
            values[f"nll_{name}"] = float(metrics.nll(self.mean, variance, self.target))
            values[f"ma_{name}"] = float(metrics.miscalibration_area(self.mean, variance, self.target))
        return RateRow(
            rate=dict(rate) if isinstance(rate, Mapping) else float(rate),
            rmse=float(metrics.rmse(self.mean, None, self.target)),
            nll_ideal=float(metrics.ideal_nll(self.mean, None, self.target, mask=self.mean != self.target)),
            scale=tuple(self.optimal[0].tolist()),
            floor=tuple(self.optimal[1].tolist()),
            relaxed_scale=tuple(self.relaxed[0].tolist()),
            relaxed_floor=tuple(self.relaxed[1].tolist()),
            zero_variances=self.zeros,
            **values,
        )

    def path(self) -> tuple[TradeoffPoint, ...]:
        return tradeoff(self.mean, self.variance, self.target, self.optimal, self.relaxed)

    def curves(self) -> dict[str, tuple[float, ...]]:
        curves: dict[str, tuple[float, ...]] = {}
        for name, variance in self._variances().items():
            levels, observed = metrics.calibration_curve(self.mean, variance, self.target)
            curves["levels"] = tuple(levels.tolist())
            curves[name] = tuple(observed.tolist())
        return curves

    def isotonic(self, choice: Choice) -> Isotonic:
        scale, floor = self.relaxed if choice == "relaxed" else self.optimal
        if isinstance(choice, float):
            scale = torch.full_like(scale, choice)
        fitted = apply_scale(self.variance, scale, floor)
        z = residuals(self.mean, fitted, self.target, self.per_output)
        return Isotonic.fit(z, tuple(scale.tolist()), tuple(floor.tolist()))


def _batches(
    model: nn.Module, data: Any, setup: Setup, per_batch: int
) -> Generator[tuple[Any, Tensor, Callable[[], Any]], None, None]:
    """Inputs, targets, and a function to call for every finished step of the progress bar."""
    from tqdm import tqdm

    count = batch_count(data, setup.batch_size)
    total = None if count is None else count * per_batch
    with tqdm(total=total, desc="calibrating", delay=2, disable=not setup.progress, leave=False) as bar:
        tick: Callable[[], Any] = bar.update
        for x, y in batches(data, model, batch_size=setup.batch_size, unpack=setup.unpack):
            yield x, y, tick


def _constant_outputs(variance: Tensor, per_output: bool) -> tuple[int, ...]:
    """Which of several outputs have no variance at all; none where that is true of every one."""
    if not per_output:
        return ()
    still = [i for i, column in enumerate(variance.unbind(1)) if not bool(column.any())]
    return tuple(still) if len(still) < variance.shape[1] else ()


def _outputs_last(values: Tensor, per_output: bool) -> Tensor:
    """`(M, K)` with one column for each index of axis 1, or `(M, 1)`."""
    return values.movedim(1, -1).reshape(-1, values.shape[1]) if per_output else values.reshape(-1, 1)


def _joined(targets: list[Tensor]) -> Tensor:
    rows = sum(len(part) for part in targets)
    if rows < 2:
        raise DataError(f"expected at least 2 validation rows, and better a hundred; found {rows}.")
    if rows < _FEW_ROWS:
        warn(f"only {rows} validation rows: the scale and the intervals will be rough.", LatedropWarning, stacklevel=5)
    shapes = sorted({tuple(part.shape[1:]) for part in targets})
    if len(shapes) > 1:
        raise DataError(
            f"expected outputs of one shape in all batches; found {shapes}. Pass a readout that gives one shape, such "
            "as a map's sum, or calibrate on inputs of one size."
        )
    return torch.cat(targets)


def _warn_of_zeros(table: list[RateRow], tried: int, values: int) -> None:
    found = [f"{row.zero_variances} at rate {row.rate}" for row in table if row.zero_variances]
    if len(table) < tried:
        found.insert(0, f"all {values} at {tried - len(table)} rates, which are left out")
    if found:
        warn(
            f"of {values} validation values, some have zero variance, as no draw touched them: {'; '.join(found)}. "
            "They are lifted to the smallest positive variance, and a rate with more than a tenth of them is not "
            "chosen where another is there; more draws or larger rates avoid it.",
            LatedropWarning,
            stacklevel=4,
        )


def _is_rate(value: Any) -> bool:
    try:
        return not isinstance(value, (bool, str)) and 0 <= float(value) < 1
    except (TypeError, ValueError):
        return False


def _one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"expected {name} to be one of {allowed}; found {value!r}.")
