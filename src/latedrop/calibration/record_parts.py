"""The parts of a calibration's record, each read from JSON with a check."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal, TypeAlias

from latedrop.calibration.intervals import LARGEST, Conformal, Intervals, intervals_from_dict
from latedrop.calibration.scale import TradeoffPoint
from latedrop.calibration.verdict import Verdict
from latedrop.errors import ArgumentError
from latedrop.network.sites import Rate, Sites
from latedrop.records import Fields, mapping, number, numbers, text, whole, wholes, wrong

__all__ = ["Choice", "RateRow", "checked_choice"]

Choice: TypeAlias = "Literal['optimal', 'relaxed'] | float | TradeoffPoint"
"""Which scale is in use: that of least NLL, the balanced one, a number, or a step between them from `tradeoff()`."""

_SCALE_OF_ROW, _FLOOR_OF_ROW = ("scale", "relaxed_scale"), ("floor", "relaxed_floor")
_MEASURED = ("nll_unscaled", "nll_scaled", "nll_relaxed", "nll_ideal", "ma_unscaled", "ma_scaled", "ma_relaxed")
# What a file may hold: the smallest float, the largest of float32, the largest rate below 1, entries of one output.
TINY, LARGEST_SCALE, _LARGEST_RATE, _MOST_ENTRIES = 5e-324, 3.4e38, 1 - 2**-53, 2**31


@dataclass(frozen=True)
class RateRow:
    """What one rate gave on the validation data; scales and floors are one per output, or one for all.

    So is the RMSE, as outputs may have different units: a number, or one per output. The NLL is per value, averaged
    over outputs: a change of unit adds the same to that of every rate.
    """

    rate: Rate
    rmse: float | tuple[float, ...]
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

    @property
    def rmses(self) -> tuple[float, ...]:
        """The RMSE of each output, or one for all."""
        return self.rmse if isinstance(self.rmse, tuple) else (self.rmse,)


def verdict_of(value: Any, name: str) -> Verdict:
    """A verdict."""
    fields = Fields(value, name)
    rounding = 1e-6
    found = Verdict(
        rows=fields.take("rows", whole, least=1, most=_MOST_ENTRIES),
        fitted=fields.take("fitted", text),
        gain=fields.take("gain", number),
        gain_error=fields.take("gain_error", number, least=0),
        correlation=fields.take("correlation", number, least=-1 - rounding, most=1 + rounding),
        coverage=fields.take("coverage", number, least=0, most=1 + rounding),
        coverage_error=fields.take("coverage_error", number, least=0, most=1),
    )
    fields.end()
    return found


def shape_of(value: Any, name: str) -> tuple[int, ...]:
    """The shape of one output."""
    found = () if value == [] else wholes(value, name, least=1, most=_MOST_ENTRIES)
    return found if prod(found) <= _MOST_ENTRIES else wrong(name, f"a shape of at most {_MOST_ENTRIES} entries", value)


def rate_of(value: Any, name: str, *, sites: Sites | None = None) -> Rate:
    """A rate, or one for each of some sites."""
    if not isinstance(value, dict):
        return number(value, name, least=0, most=_LARGEST_RATE)
    rates = mapping(number)(value, name, least=0, most=_LARGEST_RATE)
    unknown = (
        [] if sites is None else [p for p in rates if not any(fnmatchcase(s.name, p) or s.name == p for s in sites)]
    )
    return wrong(name, "rates of its sites", unknown) if unknown else rates


def choice_of(value: Any, name: str, *, count: int) -> Choice:
    """Which scale is in use."""
    if isinstance(value, dict):
        return point_of(value, name, count=count)
    if isinstance(value, str):
        return text(value, name, among=("optimal", "relaxed"))  # type: ignore[return-value]
    return number(value, name, least=TINY, most=LARGEST_SCALE)


def readout_of(value: Any, name: str) -> str | int | None:
    """A part's name or index."""
    return value if value is None or isinstance(value, str) else whole(value, name)


def row_of(value: Any, name: str, *, count: int) -> RateRow:
    """One row of the table of rates."""
    fields = Fields(value, name)
    lists = {part: fields.take(part, numbers, least=0, most=LARGEST_SCALE, length=count) for part in _SCALE_OF_ROW}
    lists |= {part: fields.take(part, numbers, least=0, most=LARGEST, length=count) for part in _FLOOR_OF_ROW}
    measured: dict[str, Any] = {part: fields.take(part, number) for part in _MEASURED}
    measured["rmse"] = fields.take("rmse", _number_or_several, count=count)
    zeros = fields.take("zero_variances", whole, least=0)
    row = RateRow(rate=fields.take("rate", rate_of), zero_variances=zeros, **lists, **measured)  # type: ignore[arg-type]
    fields.end()
    return row


def _number_or_several(value: Any, name: str, *, count: int) -> float | tuple[float, ...]:
    return numbers(value, name, length=count) if isinstance(value, list) else number(value, name)


def point_of(value: Any, name: str, *, count: int) -> TradeoffPoint:
    """One step of a path."""
    fields = Fields(value, name)
    scale = fields.take("scale", numbers, least=0, most=LARGEST_SCALE, length=count)
    floor = fields.take("floor", numbers, least=0, most=LARGEST, length=count)
    point = TradeoffPoint(scale, floor, fields.take("nll", number), fields.take("ma", number))
    fields.end()
    return point


def curves_of(value: Any, name: str) -> dict[str, tuple[float, ...]]:
    """Calibration curves."""
    fields = Fields(value, name)
    levels = fields.take("levels", numbers, least=0, most=1)
    others = ("unscaled", "scaled", "relaxed")
    found = {other: fields.take(other, numbers, least=0, most=1, length=len(levels)) for other in others}
    constant = fields.maybe("constant", None, numbers, least=0, most=1, length=len(levels))
    fields.end()
    return {"levels": levels, **found, **({} if constant is None else {"constant": constant})}


def shares_of(value: Any, name: str, *, sites: Sites) -> dict[str, float] | None:
    """The share of every site."""
    if value is None:
        return None
    found = mapping(number)(value, name, least=0, most=1 + 1e-6)
    return found if set(found) == {s.name for s in sites} else wrong(name, "a share of every site", list(found))


def intervals_of(value: Any, name: str, *, count: int, shape: tuple[int, ...]) -> Intervals:
    """Fitted intervals."""
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
