"""The search over rates, and the record of what it found.

For every rate the validation data give a mean and a variance over draws. The scaled criterion takes the rate with
the smallest NLL of `scale(rate) · variance(rate) (+ floor)`, each rate with its own best scale (Ledda, Fumera, Roli
2023); the unscaled one takes the rate with the smallest NLL of the variance as it is (Loquercio et al. 2020).
The same random numbers serve all rates, and each batch is read once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop import metrics
from latedrop.batches import Unpack, batch_count, batches
from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError
from latedrop.forward import Readout
from latedrop.intervals import Intervals, Isotonic, intervals_from_dict, intervals_to_dict
from latedrop.sample import checked_draws, plain_output, sample
from latedrop.scale import TradeoffPoint, apply_scale, fit_floor, optimal_scale, relaxed_scale, tradeoff
from latedrop.sites import Kind, Rate, Select, Site, Sites, find_sites

__all__ = ["PAPER_RATES", "Calibration", "Choice", "RateRow", "fingerprint", "residuals", "search"]

Choice: TypeAlias = "Literal['optimal', 'relaxed'] | float"

PAPER_RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
_FORMAT = 1
_FEW_ROWS = 10


@dataclass(frozen=True)
class RateRow:
    """What one rate gave on the validation data; scales and floors are one per output, or one for all."""

    rate: Rate
    rmse: float
    nll_unscaled: float
    nll_scaled: float
    nll_relaxed: float
    nll_ideal: float
    ma_unscaled: float
    ma_scaled: float
    ma_relaxed: float
    scale: tuple[float, ...]
    relaxed_scale: tuple[float, ...]
    floor: tuple[float, ...]
    relaxed_floor: tuple[float, ...]
    zero_variances: int


@dataclass(frozen=True)
class Calibration:
    """All that was chosen and measured. Frozen, and plain JSON on disk.

    The predicted variance is `scale · variance + floor` of the variance over draws, and
    `relaxed_scale · variance + relaxed_floor` with the relaxed choice.

    Attributes:
        rate: the chosen rate.
        choice: which scale predictions use: `"optimal"`, `"relaxed"`, or a number.
        table: one `RateRow` per rate.
        path: steps from the optimal to the relaxed scale.
        curves: calibration curves at the chosen rate: `levels`, `unscaled`, `scaled`, `relaxed`.
        least_variance: per output; smaller variances over draws are lifted to it, as no draw touched them.
        intervals: fitted isotonic or conformal intervals; None is Gaussian.
    """

    rate: Rate
    scales: tuple[float, ...]
    relaxed_scales: tuple[float, ...]
    floors: tuple[float, ...]
    relaxed_floors: tuple[float, ...]
    choice: Choice
    criterion: str
    method: str
    mean: str
    draws: int
    seed: int
    shared: bool
    per_output: bool
    rows: int
    output_shape: tuple[int, ...]
    least_variance: tuple[float, ...]
    sites: Sites
    readout: str | int | None
    custom_readout: str | None
    table: tuple[RateRow, ...]
    path: tuple[TradeoffPoint, ...]
    curves: dict[str, tuple[float, ...]]
    intervals: Intervals
    fingerprint: str
    versions: dict[str, str]

    @property
    def scale(self) -> float | tuple[float, ...]:
        """The NLL-optimal scale: a float, or one per output."""
        return _float_or_tuple(self.scales)

    @property
    def relaxed_scale(self) -> float | tuple[float, ...]:
        """The scale that balances the calibration curve: a float, or one per output."""
        return _float_or_tuple(self.relaxed_scales)

    @property
    def floor(self) -> float | tuple[float, ...]:
        """What is added to the scaled variance: a float, or one per output."""
        return _float_or_tuple(self.floors)

    def tradeoff(self) -> tuple[TradeoffPoint, ...]:
        """The path from the optimal to the relaxed scale, with NLL and miscalibration area at each step."""
        return self.path

    def chosen(self, choice: Choice | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The (scales, floors) of a choice; the calibration's own where None."""
        choice = checked_choice(self.choice if choice is None else choice)
        if choice == "optimal":
            return self.scales, self.floors
        if choice == "relaxed":
            return self.relaxed_scales, self.relaxed_floors
        return (float(choice),) * len(self.scales), self.floors

    def variance(self, raw: Tensor, choice: Choice | None = None) -> Tensor:
        """The predicted variance from the variance over draws, both `(N, ...)`."""
        scales, floors = self.chosen(choice)
        return self.scaled(raw, scales, floors)

    def scaled(self, raw: Tensor, scales: Sequence[float], floors: Sequence[float]) -> Tensor:
        """`scale · variance + floor` with given scales and floors."""
        lifted = _lifted(raw, torch.tensor(self.least_variance))
        return apply_scale(lifted, torch.tensor(scales), torch.tensor(floors))

    def with_choice(self, choice: Choice) -> Calibration:
        """The same calibration with another scale in use."""
        return replace(self, choice=checked_choice(choice))

    def to_json(self) -> str:
        """Readable JSON, with a checksum over its content."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["sites"] = self.sites.to_list()
        record["table"] = [asdict(row) for row in self.table]
        record["path"] = [asdict(point) for point in self.path]
        record["intervals"] = intervals_to_dict(self.intervals)
        record = {"format": _FORMAT, **json.loads(json.dumps(record))}
        return json.dumps({"latedrop": record, "checksum": _checksum(record)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited or of another format."""
        try:
            document = json.loads(text)
            record, checksum = document["latedrop"], document["checksum"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"expected the JSON of a calibration; it is truncated or something else ({error}). Calibrate again."
            ) from error
        if not isinstance(record, dict) or record.pop("format", None) != _FORMAT:
            raise DataError(f"expected calibration format {_FORMAT}; found another. Calibrate again with this version.")
        if _checksum({"format": _FORMAT, **record}) != checksum:
            raise DataError(
                "expected the content that was saved; the checksum does not match: the file was edited or damaged. "
                "Calibrate again; to use another scale, load the original and call predictor.scaled(...)."
            )
        record["sites"] = Sites.from_list(record["sites"])
        record["table"] = tuple(RateRow(**_tuples(row)) for row in record["table"])
        record["path"] = tuple(TradeoffPoint(**_tuples(point)) for point in record["path"])
        record["curves"] = _tuples(record["curves"])
        record["intervals"] = intervals_from_dict(record["intervals"])
        return cls(**_tuples(record))

    def __str__(self) -> str:
        head = (
            f"rate {_short(self.rate)}, scale {_short(self.scale)}, relaxed scale {_short(self.relaxed_scale)}, "
            f"floor {_short(self.floor)} ({self.criterion} criterion, {self.rows} rows, {self.draws} draws)"
        )
        names = ("rate", "rmse", "nll_unscaled", "nll_scaled", "nll_relaxed", "nll_ideal")
        names += ("ma_unscaled", "ma_scaled", "ma_relaxed", "scale", "relaxed_scale")
        cells = [[""] + [name.replace("_", " ") for name in names]]
        for row in self.table:
            mark = "*" if row.rate == self.rate else ""
            cells.append([mark] + [_short(_float_or_tuple(getattr(row, name))) for name in names])
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([head, *lines])


def search(
    model: nn.Module,
    data: Any,
    *,
    rates: Sequence[Rate] = PAPER_RATES,
    draws: int = 100,
    criterion: Literal["scaled", "unscaled"] = "scaled",
    mean: Literal["draws", "model"] = "draws",
    floor: bool = False,
    per_output: bool = True,
    scale: Choice = "optimal",
    isotonic: bool = False,
    sites: Sequence[Site] | None = None,
    select: Select = None,
    kind: Kind = "element",
    readout: Readout = None,
    seed: int = 0,
    shared: bool = True,
    batch_size: int = 256,
    chunk: int | None = None,
    unpack: Unpack | None = None,
    progress: bool = True,
) -> Calibration:
    """Measure every rate on the validation data and record the best; the arguments are those of `calibrate`."""
    rates = _checked_rates(rates)
    draws = checked_draws(draws)
    _one_of("criterion", criterion, ("scaled", "unscaled"))
    _one_of("mean", mean, ("draws", "model"))
    choice = checked_choice(scale)
    found = Sites(sites) if sites is not None else None
    means: list[list[Tensor]] = [[] for _ in rates]
    variances: list[list[Tensor]] = [[] for _ in rates]
    targets: list[Tensor] = []
    total = batch_count(data, batch_size)
    with _bar(None if total is None else total * len(rates), progress) as tick:
        for x, y in batches(data, model, batch_size=batch_size, unpack=unpack):
            if found is None:
                found = find_sites(model, x, select=select, kind=kind)
            own = plain_output(model, x, readout) if mean == "model" else None
            for i, rate in enumerate(rates):
                moments = sample(model, x, rate, draws, seed, found, readout, chunk, shared)
                center = moments.mean if own is None else own
                if i == 0:
                    targets.append(metrics.align_target(center, y).to(center.dtype).cpu())
                means[i].append(center.cpu())
                variances[i].append(moments.variance.cpu())
                tick()
    target = _joined(targets)
    rows = len(target)
    per_output = per_output and target.dim() > 1 and target.shape[1] > 1
    table, fits = [], []
    for rate, mean_parts, variance_parts in zip(rates, means, variances, strict=True):
        fit = _Fit.of(torch.cat(mean_parts), torch.cat(variance_parts), target, per_output, floor)
        if fit is not None:
            table.append(fit.row(rate))
            fits.append(fit)
        mean_parts.clear()
        variance_parts.clear()
    if not table or found is None:
        raise OutputError(
            f"expected an output that varies under dropout; it is the same in all {draws} draws at every rate. "
            "Check with find_sites that the sites reach the output, and that the readout does not round it."
        )
    _warn_of_zeros(table, len(rates), target.numel())
    best = min(range(len(table)), key=lambda i: getattr(table[i], f"nll_{criterion}"))
    row, fit = table[best], fits[best]
    return Calibration(
        rate=row.rate,
        scales=row.scale,
        relaxed_scales=row.relaxed_scale,
        floors=row.floor,
        relaxed_floors=row.relaxed_floor,
        choice=choice,
        criterion=criterion,
        method="sample",
        mean=mean,
        draws=draws,
        seed=seed,
        shared=shared,
        per_output=per_output,
        rows=rows,
        output_shape=tuple(target.shape[1:]),
        least_variance=tuple(fit.least.tolist()),
        sites=found,
        readout=None if callable(readout) else readout,
        custom_readout=getattr(readout, "__qualname__", type(readout).__name__) if callable(readout) else None,
        table=tuple(table),
        path=fit.path(),
        curves=fit.curves(),
        intervals=fit.isotonic(choice) if isotonic else None,
        fingerprint=fingerprint(model),
        versions={"torch": torch.__version__},
    )


def residuals(mean: Tensor, variance: Tensor, target: Tensor, per_output: bool) -> list[Tensor]:
    """Standardised residuals `(target - mean) / std`, flat: one tensor, or one per index of axis 1."""
    z = (target.to(mean) - mean) / variance.sqrt()
    return [column.flatten() for column in z.unbind(1)] if per_output else [z.flatten()]


def fingerprint(model: nn.Module) -> str:
    """A digest of the model's parameters and buffers: names, shapes, dtypes, and up to 1024 values of each."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            flat = value.detach().reshape(-1)
            values = flat[:: max(1, flat.numel() // 1024)].cpu()
            digest.update(values.to(torch.float64).numpy().tobytes())
    return digest.hexdigest()


def checked_choice(choice: Any) -> Choice:
    """The choice of scale, or `ArgumentError`."""
    if choice in ("optimal", "relaxed"):
        return choice  # type: ignore[no-any-return]
    if isinstance(choice, (int, float)) and not isinstance(choice, bool) and 0 < choice < float("inf"):
        return float(choice)
    raise ArgumentError(f"expected scale 'optimal', 'relaxed' or a positive number; found {choice!r}.")


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
    def of(cls, mean: Tensor, variance: Tensor, target: Tensor, per_output: bool, floor: bool) -> _Fit | None:
        columns = variance.unbind(1) if per_output else (variance,)
        if not all(bool(column.any()) for column in columns):
            return None
        zeros = int((variance == 0).sum())
        least = torch.stack([column[column > 0].min() for column in columns]) if zeros else torch.zeros(len(columns))
        variance = _lifted(variance, least)
        scale = optimal_scale(mean, variance, target, per_output=per_output)
        optimal = (scale, torch.zeros_like(scale))
        if floor:
            optimal = fit_floor(mean, variance, target, per_output=per_output)
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
            nll_ideal=_quiet_ideal(self.mean, self.target),
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


def _lifted(variance: Tensor, least: Tensor) -> Tensor:
    least = least.to(variance)
    if len(least) > 1:
        least = least.reshape(1, -1, *[1] * (variance.dim() - 2))
    return torch.maximum(variance, least)


def _joined(targets: list[Tensor]) -> Tensor:
    rows = sum(len(part) for part in targets)
    if rows < 2:
        raise DataError(f"expected at least 2 validation rows, and better a hundred; found {rows}.")
    if rows < _FEW_ROWS:
        warn(f"only {rows} validation rows: the scale and the intervals will be rough.", LatedropWarning, stacklevel=4)
    return torch.cat(targets)


def _warn_of_zeros(table: list[RateRow], tried: int, values: int) -> None:
    found = [f"{row.zero_variances} at rate {_short(row.rate)}" for row in table if row.zero_variances]
    if len(table) < tried:
        found.insert(0, f"all {values} at {tried - len(table)} rates, which are left out")
    if found:
        warn(
            f"of {values} validation values, some have zero variance, as no draw touched them: {'; '.join(found)}. They "
            "are lifted to the smallest positive variance; more draws, larger rates or floor=True avoid it.",
            LatedropWarning,
            stacklevel=4,
        )


def _quiet_ideal(mean: Tensor, target: Tensor) -> float:
    """The ideal NLL over the rows that are not predicted exactly."""
    return float(metrics.ideal_nll(mean, None, target, mask=mean != target))


def _checked_rates(rates: Any) -> list[Rate]:
    rates = list(rates) if not isinstance(rates, (float, int, Mapping)) else [rates]
    if not rates:
        raise ArgumentError("expected at least one rate; found none.")
    for rate in rates:
        values = list(rate.values()) if isinstance(rate, Mapping) else [rate]
        if not all(isinstance(v, (int, float)) and 0 <= v < 1 for v in values) or not any(v > 0 for v in values):
            raise ArgumentError(f"expected rates inside (0, 1); found {rate!r}.")
    return rates


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"expected {name} to be one of {allowed}; found {value!r}.")


class _bar:  # noqa: N801
    """A progress bar that shows itself only on work longer than two seconds."""

    def __init__(self, total: int | None, show: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="calibrating", unit="rate", delay=2, disable=not show, leave=False)

    def __enter__(self) -> Callable[[], Any]:
        return self._bar.update

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def _float_or_tuple(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_short(item) for item in value) + ")"
    return f"{value:.4g}"
