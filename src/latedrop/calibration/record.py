"""The record of a calibration: all that was chosen and measured, frozen, and plain JSON on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal, TypeAlias, get_args
from warnings import warn

import torch
from torch import Tensor

from latedrop.calibration.intervals import LARGEST, Conformal, Intervals, intervals_from_dict, intervals_to_dict
from latedrop.calibration.measuring import Method
from latedrop.calibration.scale import TradeoffPoint, apply_scale, lifted
from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.model.sites import Rate, Sites, rates_by_site
from latedrop.records import (
    Fields,
    each,
    flag,
    mapping,
    number,
    numbers,
    or_none,
    parsed,
    sealed,
    text,
    unsealed,
    whole,
    wholes,
    wrong,
)
from latedrop.variance.engine.options import MOST_DRAWS

__all__ = ["Calibration", "Choice", "RateRow", "checked_choice", "lifted", "rate_text"]

Choice: TypeAlias = "Literal['optimal', 'relaxed'] | float | TradeoffPoint"
"""Which scale is in use: that of least NLL, the balanced one, a number, or a step between them from `tradeoff()`."""

_FORMAT = 1
_SCALES, _FLOORS = ("scales", "relaxed_scales"), ("floors", "relaxed_floors")
_SCALE_OF_ROW, _FLOOR_OF_ROW = ("scale", "relaxed_scale"), ("floor", "relaxed_floor")
_MEASURED = ("rmse", "nll_unscaled", "nll_scaled", "nll_relaxed", "nll_ideal", "ma_unscaled", "ma_scaled", "ma_relaxed")
# What a file may hold: the smallest float, the largest of float32, the largest rate below 1, entries of one output.
_TINY, _LARGEST_SCALE, _LARGEST_RATE, _MOST_ENTRIES = 5e-324, 3.4e38, 1 - 2**-53, 2**31


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

    The predicted variance is `scale · variance + floor` of the raw variance (over draws, or to first order), and
    `relaxed_scale · variance + relaxed_floor` with the relaxed choice.

    Attributes:
        rate: the chosen rate; a mapping from site names where every site has its own.
        choice: which scale predictions use: `"optimal"`, `"relaxed"`, a number, or a step of `tradeoff()`.
        table: one `RateRow` per rate.
        path: steps from the optimal to the relaxed scale.
        curves: calibration curves at the chosen rate: `levels`, `unscaled`, `scaled`, `relaxed`.
        least_variance: the smallest positive raw variance of each output on the validation data; it stands in for a
            variance of 0, where no draw touched a row.
        shares: each site's share of the raw variance, on average over the validation rows; None where the method
            does not tell the sites apart.
        intervals: fitted isotonic or conformal intervals; None is Gaussian.
        columns: the names of the inputs and targets in the file of validation data; None where there was none.
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
    shares: dict[str, float] | None
    intervals: Intervals
    fingerprint: str
    versions: dict[str, str]
    columns: dict[str, tuple[str, ...]] | None = None

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
        if isinstance(choice, TradeoffPoint):
            return choice.scale, choice.floor
        return (float(choice),) * len(self.scales), self.floors

    def variance(self, raw: Tensor, choice: Choice | None = None) -> Tensor:
        """The predicted variance from the variance over draws, both `(N, ...)`."""
        scales, floors = self.chosen(choice)
        return self.scaled(raw, scales, floors)

    def scaled(self, raw: Tensor, scales: Sequence[float], floors: Sequence[float]) -> Tensor:
        """`scale · variance + floor` with given scales and floors."""
        least, scale, floor = (torch.tensor(v, dtype=torch.float64) for v in (self.least_variance, scales, floors))
        return apply_scale(lifted(raw, least), scale, floor)

    def with_choice(self, choice: Choice) -> Calibration:
        """The same calibration with another scale in use."""
        if self.intervals is not None:
            warn(
                f"{self.intervals.kind} intervals keep the scale that they were fitted with; the new one changes only "
                "the variance.",
                LatedropWarning,
                stacklevel=3,
            )
        if isinstance(choice, TradeoffPoint) and len(choice.scale) != len(self.scales):
            raise ArgumentError(
                f"expected a step of this calibration's tradeoff(), with {len(self.scales)} scales; found one with "
                f"{len(choice.scale)}."
            )
        return replace(self, choice=checked_choice(choice))

    def to_json(self) -> str:
        """Readable JSON, with a checksum over its content."""
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.choice, TradeoffPoint):
            record["choice"] = asdict(self.choice)
        record["sites"] = self.sites.to_list()
        record["table"] = [asdict(row) for row in self.table]
        record["path"] = [asdict(point) for point in self.path]
        record["intervals"] = intervals_to_dict(self.intervals)
        record = {"format": _FORMAT, **json.loads(json.dumps(record))}
        return sealed("latedrop", record)

    @classmethod
    def from_json(cls, content: str) -> Calibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited or of another format."""
        document = parsed(content, "a calibration", "Calibrate again.")
        edited = "Calibrate again; to use another scale, load the original and call predictor.scaled(...)."
        again = "Calibrate again with this version."
        return _checked(cls, unsealed(document, "latedrop", "a calibration", _FORMAT, again, edited))

    def __str__(self) -> str:
        draws = f", {self.draws} draws" if self.draws else ""
        lines = [
            f"rate {rate_text(self.rate)}, scale {_short(self.scale)}, relaxed scale {_short(self.relaxed_scale)}, "
            f"floor {_short(self.floor)} ({self.method}, {self.criterion} criterion, {self.rows} rows{draws})"
        ]
        if 0 in self.scales:
            lines.append("scale 0: the floor alone gives the variance, the same for every input")
        names = ["rate", "rmse", "nll_unscaled", "nll_scaled", "nll_relaxed", "nll_ideal"]
        names += ["ma_unscaled", "ma_scaled", "ma_relaxed", "scale", "relaxed_scale"]
        cells = [["", *(name.replace("_", " ") for name in names)]]
        for row in self.table:
            values = [_float_or_tuple(getattr(row, name)) for name in names]
            mark = "*" if row.rate == self.rate else ""
            cells.append([mark, rate_text(row.rate), *map(_short, values[1:])])
        lines += _aligned(cells)
        if isinstance(self.rate, Mapping) or self.shares is not None:
            rates = rates_by_site(self.sites, self.rate)
            rows = [["site", "rate", "share of variance"]]
            for site in self.sites:
                share = "" if self.shares is None else f"{self.shares[site.name]:.1%}"
                rows.append([site.name, _short(rates[site.name]), share])
            lines += _aligned(rows)
        return "\n".join(lines)


def _checked(kind: type[Calibration], record: dict[str, Any]) -> Calibration:
    """The calibration in a record, every field checked on its own and against the others."""
    fields = Fields(record, "calibration")
    shape = fields.take("output_shape", _shape)
    per_output, method = fields.take("per_output", flag), fields.take("method", text, among=get_args(Method))
    if per_output and not shape:
        wrong("calibration.per_output", "false, as there is one output", per_output)
    count = shape[0] if per_output else 1
    sites = fields.take("sites", Sites.from_list)
    scales = {name: fields.take(name, numbers, least=0, most=_LARGEST_SCALE, length=count) for name in _SCALES}
    floors = {name: fields.take(name, numbers, least=0, most=LARGEST, length=count) for name in _FLOORS}
    table = fields.take("table", each(_row), count=count)
    rate = fields.take("rate", _rate, sites=sites)
    if all(row.rate != rate for row in table):
        wrong("calibration.rate", "a rate of its table", rate)
    found = kind(
        rate=rate,
        **scales,
        **floors,
        choice=fields.take("choice", _choice, count=count),
        criterion=fields.take("criterion", text, among=("scaled", "unscaled")),
        method=method,
        mean=fields.take("mean", text, among=("draws", "model")),
        draws=fields.take("draws", whole, least=2 if method == "sample" else 0, most=MOST_DRAWS),
        seed=fields.take("seed", whole),
        shared=fields.take("shared", flag),
        per_output=per_output,
        rows=fields.take("rows", whole, least=2),
        output_shape=shape,
        least_variance=fields.take("least_variance", numbers, least=_TINY, most=LARGEST, length=count),
        sites=sites,
        readout=fields.take("readout", _readout),
        custom_readout=fields.take("custom_readout", or_none(text)),
        table=table,
        path=fields.take("path", each(_point), count=count),
        curves=fields.take("curves", _curves),
        shares=fields.take("shares", _shares, sites=sites),
        intervals=fields.take("intervals", _intervals, count=count, shape=shape),
        fingerprint=fields.take("fingerprint", text),
        versions=fields.take("versions", mapping(text)),
        columns=fields.maybe("columns", None, or_none(mapping(each(text)))),
    )
    fields.end()
    return found


def _shape(value: Any, name: str) -> tuple[int, ...]:
    found = () if value == [] else wholes(value, name, least=1, most=_MOST_ENTRIES)
    return found if prod(found) <= _MOST_ENTRIES else wrong(name, f"a shape of at most {_MOST_ENTRIES} entries", value)


def _rate(value: Any, name: str, *, sites: Sites | None = None) -> Rate:
    if not isinstance(value, dict):
        return number(value, name, least=0, most=_LARGEST_RATE)
    rates = mapping(number)(value, name, least=0, most=_LARGEST_RATE)
    unknown = (
        [] if sites is None else [p for p in rates if not any(fnmatchcase(s.name, p) or s.name == p for s in sites)]
    )
    return wrong(name, "rates of its sites", unknown) if unknown or not rates else rates


def _choice(value: Any, name: str, *, count: int) -> Choice:
    if isinstance(value, dict):
        return _point(value, name, count=count)
    if isinstance(value, str):
        return text(value, name, among=("optimal", "relaxed"))  # type: ignore[return-value]
    return number(value, name, least=_TINY, most=_LARGEST_SCALE)


def _readout(value: Any, name: str) -> str | int | None:
    return value if value is None or isinstance(value, str) else whole(value, name)


def _row(value: Any, name: str, *, count: int) -> RateRow:
    fields = Fields(value, name)
    lists = {part: fields.take(part, numbers, least=0, most=_LARGEST_SCALE, length=count) for part in _SCALE_OF_ROW}
    lists |= {part: fields.take(part, numbers, least=0, most=LARGEST, length=count) for part in _FLOOR_OF_ROW}
    measured = {part: fields.take(part, number) for part in _MEASURED}
    zeros = fields.take("zero_variances", whole, least=0)
    row = RateRow(rate=fields.take("rate", _rate), zero_variances=zeros, **lists, **measured)  # type: ignore[arg-type]
    fields.end()
    return row


def _point(value: Any, name: str, *, count: int) -> TradeoffPoint:
    fields = Fields(value, name)
    scale = fields.take("scale", numbers, least=0, most=_LARGEST_SCALE, length=count)
    floor = fields.take("floor", numbers, least=0, most=LARGEST, length=count)
    point = TradeoffPoint(scale, floor, fields.take("nll", number), fields.take("ma", number))
    fields.end()
    return point


def _curves(value: Any, name: str) -> dict[str, tuple[float, ...]]:
    fields = Fields(value, name)
    levels = fields.take("levels", numbers, least=0, most=1)
    others = ("unscaled", "scaled", "relaxed")
    found = {other: fields.take(other, numbers, least=0, most=1, length=len(levels)) for other in others}
    fields.end()
    return {"levels": levels, **found}


def _shares(value: Any, name: str, *, sites: Sites) -> dict[str, float] | None:
    if value is None:
        return None
    found = mapping(number)(value, name, least=0, most=1 + 1e-6)
    return found if set(found) == {s.name for s in sites} else wrong(name, "a share of every site", list(found))


def _intervals(value: Any, name: str, *, count: int, shape: tuple[int, ...]) -> Intervals:
    found = intervals_from_dict(value, count, name)
    rows = () if found is None else found.scores if isinstance(found, Conformal) else found.knots
    if found is not None and len(rows) not in (count, *shape[:1]):
        wrong(name, f"of {count} outputs", f"{len(rows)} of them")
    return found


def checked_choice(choice: Any) -> Choice:
    """The choice of scale, or `ArgumentError`."""
    if isinstance(choice, TradeoffPoint):
        return choice
    if isinstance(choice, str) and choice in ("optimal", "relaxed"):
        return choice  # type: ignore[return-value]
    if isinstance(choice, (int, float)) and not isinstance(choice, bool) and 0 < choice < float("inf"):
        return float(choice)
    raise ArgumentError(
        f"expected scale 'optimal', 'relaxed', a positive number or a step of tradeoff(); found {choice!r}."
    )


def rate_text(rate: Rate | None) -> str:
    """A rate for tables: a number, `per site` where they differ, a dash where there is no dropout."""
    if rate is None:
        return "-"
    return "per site" if isinstance(rate, Mapping) else _short(rate)


def _float_or_tuple(values: Any) -> float | tuple[float, ...]:
    result: float | tuple[float, ...] = values[0] if isinstance(values, tuple) and len(values) == 1 else values
    return result


def _aligned(cells: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_short(item) for item in value) + ")"
    return f"{value:.4g}"
