"""The record of a calibration: all that was chosen and measured, frozen, and plain JSON on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Annotated, Any, Literal, TypeAlias
from warnings import warn

import torch
from torch import Tensor

from latedrop.calibration.fitted_terms import FittedTerms, aligned
from latedrop.calibration.scale import Floors, Intervals, Scales, TradeoffPoint, apply_scale, lifted
from latedrop.calibration.seen import Sketch
from latedrop.calibration.targets import StoredTransform
from latedrop.calibration.verdict import Verdict
from latedrop.dropout.moments import MOST_DRAWS
from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.network.sites import Rate, StoredSites, rates_by_site
from latedrop.options import shown
from latedrop.records import Format, Limits, match, record
from latedrop.stored_tensors import inline
from latedrop.streams.monitor import Usual, from_curve
from latedrop.terms.forest import LEAST_ROWS, ErrorForest

__all__ = ["CALIBRATION", "Calibration", "Choice", "Columns", "Method", "RateRow", "checked_choice", "rate_text"]

Method: TypeAlias = Literal["terms", "sample", "linear", "propagate"]
_MOST_SCALE = 3.4e38
Choice: TypeAlias = Literal["optimal", "relaxed"] | Annotated[float, Limits(5e-324, _MOST_SCALE)] | TradeoffPoint
"""Which scale is in use: that of least NLL, the balanced one, a number, or a step between them from `tradeoff()`."""
Columns: TypeAlias = dict[str, Annotated[tuple[str, ...], Limits(1)]]
"""The names of the inputs and targets."""

_BY_OUTPUT = ("scale", "floor", "relaxed_scale", "relaxed_floor")  # in parts of a record: one per output, or for all
_MOST_ENTRIES = 2**31  # of one output
_Shape: TypeAlias = tuple[Annotated[int, Limits(1, _MOST_ENTRIES)], ...]
_Curve: TypeAlias = Annotated[tuple[Annotated[float, Limits(0, 1)], ...], Limits(1)]
_Degrees: TypeAlias = Annotated[float, Limits(3, 1e6)] | None
_Least: TypeAlias = Annotated[tuple[Annotated[float, Limits(5e-324, 1e300)], ...], Limits(1)]


@record
@dataclass(frozen=True)
class RateRow:
    """Metrics of one rate on the validation data; scales and floors are one per output, or one for all.

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
    scale: Scales
    relaxed_scale: Scales
    floor: Floors
    relaxed_floor: Floors
    zero_variances: Annotated[int, Limits(0)]

    @property
    def rmses(self) -> tuple[float, ...]:
        """Return the RMSE of each output, or one for all."""
        return self.rmse if isinstance(self.rmse, tuple) else (self.rmse,)


@record
@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that was chosen and measured. Frozen, and plain JSON on disk.

    The predicted variance is `scale · variance + floor` of the raw variance (over draws, or to first order), and
    `relaxed_scale · variance + relaxed_floor` with the relaxed choice.

    Attributes:
        rate: the chosen rate; a mapping from site names where every site has its own, empty where terms have no rate.
        choice: which scale predictions use: `"optimal"`, `"relaxed"`, a number, or a step of `tradeoff()`.
        table: one `RateRow` per rate.
        path: steps from the optimal to the relaxed scale.
        curves: calibration curves at the chosen rate: `levels`, `unscaled`, `scaled`, `relaxed`, `constant`.
        least_variance: the smallest positive raw variance of each output on the validation data; it stands in for a
            variance of 0, where no draw touched a row.
        shares: each site's share of the raw variance, on average over the validation rows; None where the method
            does not tell the sites apart.
        intervals: fitted isotonic or conformal intervals; None follows `degrees`.
        degrees: of freedom of the Student t of the errors, a whole number; None where they are taken as Gaussian.
        columns: the names of the inputs and targets, in the file or the tables of validation data; None where there
            were none.
        terms: what `method="terms"` fitted; the raw variance is then the fitted one, and the scale that of its
            tails.
        verdict: what the variance is worth beside a constant, on rows left out of its fit.
        constant: that constant, one per output or one for all: the validation rows' mean squared error, or the variance
            of the Student t that fits their errors.
        constant_degrees: of freedom of that t; None where it is Gaussian.
        target: how the targets were transformed for training, None where they were not. Scales, floors, coefficients
            and constants are in the model's unit then; the table and the path are in the original one.
        seen: marks of up to 256 rows that it was fitted to, by which `compare` notices these; see `calibration.seen`.
    """

    rate: Rate
    choice: Choice
    criterion: Literal["scaled", "unscaled"] = "scaled"
    method: Method
    mean: Literal["draws", "model", "corrected"]
    draws: Annotated[int, Limits(0, MOST_DRAWS)] = 0
    seed: int
    shared: bool = True
    per_output: bool
    rows: Annotated[int, Limits(2)]
    output_shape: _Shape
    least_variance: _Least
    sites: StoredSites
    readout: str | int | None
    custom_readout: str | None
    table: Annotated[tuple[RateRow, ...], Limits(1)]
    path: Annotated[tuple[TradeoffPoint, ...], Limits(1)]
    curves: dict[str, _Curve]
    shares: dict[str, Annotated[float, Limits(0, 1 + 1e-6)]] | None = None
    intervals: Intervals
    fingerprint: str
    versions: dict[str, str]
    columns: Columns | None = None
    terms: FittedTerms | None = None
    verdict: Verdict | None = None
    constant: Floors | None = None
    target: StoredTransform | None = None
    seen: Sketch = ""
    degrees: _Degrees = None
    constant_degrees: _Degrees = None

    def checked(self) -> Calibration:
        """Check names and lengths against each other after reading."""
        shape, names, curves = self.output_shape, [site.name for site in self.sites], self.curves
        match(prod(shape) <= _MOST_ENTRIES, "output_shape", f"a shape of at most {_MOST_ENTRIES} entries", shape)
        match(bool(shape) or not self.per_output, "per_output", "false, as there is one output", True)
        count = shape[0] if self.per_output else 1
        lengths: dict[str, Any] = {"least_variance": self.least_variance, "constant": self.constant}
        parts: dict[str, Any] = {f"path[{i}]": step for i, step in enumerate(self.path)} | {"choice": self.choice}
        parts |= {f"table[{i}]": row for i, row in enumerate(self.table)} | {"intervals": self.intervals}
        for place, part in parts.items():
            lengths |= {f"{place}.{name}": getattr(part, name) for name in _BY_OUTPUT if hasattr(part, name)}
        lengths |= {f"table[{i}].rmse": row.rmses for i, row in enumerate(self.table)}
        if self.terms is not None:
            lengths["terms.floors"] = self.terms.floors
            looked = () if self.terms.features is None else self.terms.features.sites
            match(set(looked) <= set(names), "terms.features.sites", f"some of the sites {names}", looked)
        if self.intervals is not None:
            outputs = self.intervals.outputs
            match(outputs in (count, *shape[:1]), "intervals", f"those of {count} outputs", f"{outputs} of them")
        for name, values in lengths.items():
            match(values is None or len(values) == count, name, f"{count} numbers, one per output or for all", values)
        wanted = {"levels", "unscaled", "scaled", "relaxed"}
        match(wanted <= set(curves) <= wanted | {"constant"}, "curves", f"of {sorted(wanted)}", [*curves])
        for name, curve in curves.items():
            match(len(curve) == len(curves["levels"]), f"curves.{name}", f"{len(curves['levels'])} numbers", len(curve))
        rates = self.rate if isinstance(self.rate, Mapping) else {}
        unknown = [p for p in rates if not any(fnmatchcase(name, p) or name == p for name in names)]
        match(not unknown, "rate", f"rates of its sites {names}", unknown)
        match(any(row.rate == self.rate for row in self.table), "rate", "a rate of its table", self.rate)
        told_apart = self.shares is None or set(self.shares) == set(names)
        match(told_apart, "shares", f"one of every site {names}", self.shares)
        match(self.draws >= 2 or self.method != "sample", "draws", "2 or more", self.draws)
        by_terms = self.method == "terms"
        match(by_terms == (self.terms is not None), "terms", "there with method 'terms', and only then", self.method)
        match(by_terms == (self.rate == {}), "rate", "empty with method 'terms', and only then", self.rate)
        for name, degrees in (("degrees", self.degrees), ("constant_degrees", self.constant_degrees)):
            match(degrees is None or degrees == round(degrees), name, "a whole number", degrees)
        mean = getattr(self.target, "mean", (0.0,))
        match(len(mean) in (1, *shape[:1]), "target.mean", f"one number, or {shape[:1]}", mean)
        return self

    @property
    def row(self) -> RateRow:
        """Return the row of the table at the chosen rate."""
        return next(row for row in self.table if row.rate == self.rate)

    @property
    def scales(self) -> tuple[float, ...]:
        """Return the NLL-optimal scales, one per output or one for all."""
        return self.row.scale

    @property
    def floors(self) -> tuple[float, ...]:
        """Return the floors that are added to the scaled variance, likewise."""
        return self.row.floor

    @property
    def scale(self) -> float | tuple[float, ...]:
        """Return `scales`, as a number where there is one."""
        return _single(self.scales)

    @property
    def relaxed_scale(self) -> float | tuple[float, ...]:
        """Return the scales that balance the calibration curve, as a number where there is one."""
        return _single(self.row.relaxed_scale)

    @property
    def floor(self) -> float | tuple[float, ...]:
        """Return `floors`, as a number where there is one."""
        return _single(self.floors)

    @property
    def output_names(self) -> tuple[str, ...] | None:
        """Return the names of the outputs, one for each entry along axis 1, as the target columns; None if unknown."""
        columns = self.columns or {}
        names = columns.get("targets") or columns.get("target_arrays") or ()
        return names if len(names) == (self.output_shape[0] if len(self.output_shape) == 1 else 1) else None

    @property
    def kind(self) -> str:
        """Return the kind of intervals: `"student"`, `"gaussian"`, `"isotonic"` or `"conformal"`."""
        if self.intervals is not None:
            return self.intervals.kind
        return "gaussian" if self.degrees is None else "student"

    def tradeoff(self) -> tuple[TradeoffPoint, ...]:
        """Return the path from the optimal to the relaxed scale, with NLL and miscalibration area at each step."""
        return self.path

    def chosen(self, choice: Choice | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the (scales, floors) of a choice; the calibration's own where None."""
        choice = checked_choice(self.choice if choice is None else choice)
        if choice == "optimal":
            return self.scales, self.floors
        if choice == "relaxed":
            return self.row.relaxed_scale, self.row.relaxed_floor
        if isinstance(choice, TradeoffPoint):
            return choice.scale, choice.floor
        return (float(choice),) * len(self.scales), self.floors

    def variance(self, raw: Tensor, choice: Choice | None = None) -> Tensor:
        """Return the predicted variance from the variance over draws, both `(N, ...)`."""
        return self.scaled(raw, *self.chosen(choice))

    def scaled(self, raw: Tensor, scales: tuple[float, ...], floors: tuple[float, ...]) -> Tensor:
        """Return `scale · variance + floor` with given scales and floors."""
        least, scale, floor = (torch.tensor(v, dtype=torch.float64) for v in (self.least_variance, scales, floors))
        return apply_scale(lifted(raw, least), scale, floor)

    def with_choice(self, choice: Choice) -> Calibration:
        """Return this calibration with another scale in use."""
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

    def usual(self) -> Usual:
        """Return what a stream compares with: errors by the curve of the scale in use, novelty and shares by terms."""
        usual = Usual() if self.terms is None else self.terms.usual or Usual()
        curves = {"optimal": "scaled", "relaxed": "relaxed"}
        curve = curves.get(self.choice) if isinstance(self.choice, str) else None
        if curve is None:
            return usual
        return replace(usual, errors=from_curve(self.curves["levels"], self.curves[curve], self.rows))

    def to_json(self, tensor: Callable[[Tensor], Any] = inline) -> str:
        """Return readable JSON, with a checksum over its content; `tensor` makes plain data of tensors."""
        return CALIBRATION.to_json(self, tensor)

    @classmethod
    def from_json(cls, content: str) -> Calibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited or of another format."""
        return CALIBRATION.from_json(content)

    @property
    def verdict_of_other(self) -> str:
        """Return a sentence about the verdict where that is not what predictions use; empty where it is."""
        if self.verdict is None or (self.choice == "optimal" and self.intervals is None):
            return ""
        used = f"{self.intervals.kind} intervals" if self.intervals is not None else "another scale"
        return f"The verdict is about the fitted scale; predictions use {used}: evaluate them on other rows."

    @property
    def next_step(self) -> str:
        """Return advice on what to try next, in one line; empty where there is nothing to say."""
        verdict, fitted = self.verdict, self.terms
        if verdict is None:
            return ""
        if verdict.rows < 30:
            return "pass 30 validation rows or more: fewer cannot tell what errors are usual."
        if fitted is None:
            return "" if verdict.grade == "good" else "the default, method='terms', adds what dropout cannot see."
        if not fitted.reference_rows:
            return "give the inputs of training rows as reference: they tell which rows are usual."
        forest = any(isinstance(term, ErrorForest) for term in fitted.terms)
        if not forest and verdict.rows < LEAST_ROWS:
            return f"pass {LEAST_ROWS} validation rows or more: a forest then learns where errors are large."
        if verdict.slices:
            part = max(verdict.slices, key=lambda each: abs(each.coverage - 0.9))
            return f"pass more validation rows where {part.by} is {part.low:.4g} to {part.high:.4g}."
        if verdict.grade != "good":
            return "a term of your own may know where errors are large: VarianceHead, or a class of yours."
        if forest and fitted.needs_gradients and fitted.correction is None:
            return "Terms(mean='corrected') may also predict better, from the same validation rows."
        return ""

    def __repr__(self) -> str:
        made_of = f"rate {rate_text(self.rate)}" if self.terms is None else self.terms.choice
        return f"Calibration by method {self.method}: {made_of}, scale {self.choice}, {self.rows} validation rows"

    def __str__(self) -> str:
        lines = [str(self.verdict)] if self.verdict is not None else []
        lines += [f"next: {self.next_step}"] if self.next_step else []
        lines += [self.verdict_of_other] if self.verdict_of_other else []
        if self.target is not None:
            lines.append(f"trained on transformed targets, {self.target}: what is fitted is in the model's unit")
        return "\n".join(lines + (self._rate_lines() if self.terms is None else self.terms.lines()))

    def _rate_lines(self) -> list[str]:
        draws = f", {self.draws} draws" if self.draws else ""
        scales = f"scale {_short(self.scales)}, relaxed scale {_short(self.row.relaxed_scale)}"
        how = f"{self.method}, {self.criterion} criterion, {self.rows} rows{draws}"
        lines = [f"rate {rate_text(self.rate)}, {scales}, floor {_short(self.floors)} ({how})"]
        if 0 in self.scales:
            lines.append("scale 0: the floor alone gives the variance, the same for every input")
        names = ["rmse", "nll_unscaled", "nll_scaled", "nll_relaxed", "nll_ideal"]
        names += ["ma_unscaled", "ma_scaled", "ma_relaxed", "scale", "relaxed_scale"]
        cells = [["", "rate", *(name.replace("_", " ") for name in names)]]
        for row in self.table:
            mark = "*" if row.rate == self.rate else ""
            cells.append([mark, rate_text(row.rate), *(_short(getattr(row, name)) for name in names)])
        lines += aligned(cells)
        if isinstance(self.rate, Mapping) or self.shares is not None:
            rates, shares = rates_by_site(self.sites, self.rate), self.shares or {}
            by_site = [[name, _short(rate), f"{shares[name]:.1%}" if shares else ""] for name, rate in rates.items()]
            lines += aligned([["site", "rate", "share of variance"], *by_site])
        return lines


CALIBRATION = Format(
    Calibration,
    "latedrop",
    "a calibration",
    "Calibrate again; to use another scale, load the original and call predictor.scaled(...).",
    "calibration",
)


def checked_choice(choice: Any) -> Choice:
    """Return the choice of scale, or raise `ArgumentError`."""
    if isinstance(choice, TradeoffPoint):
        return choice
    if isinstance(choice, str) and choice in ("optimal", "relaxed"):
        return choice  # type: ignore[return-value]
    if isinstance(choice, (int, float)) and not isinstance(choice, bool) and 0 < choice <= _MOST_SCALE:
        return float(choice)
    raise ArgumentError(
        f"expected scale 'optimal', 'relaxed', a positive number or a step of tradeoff(); found {shown(choice)}."
    )


def rate_text(rate: Rate | None) -> str:
    """Format a rate for tables: a number, `per site` where they differ, a dash where there is no dropout."""
    if rate is None or rate == {}:
        return "-"
    return "per site" if isinstance(rate, Mapping) else _short(rate)


def _single(values: tuple[float, ...]) -> float | tuple[float, ...]:
    return values[0] if len(values) == 1 else values


def _short(value: Any) -> str:
    value = _single(value) if isinstance(value, tuple) else value
    return f"({', '.join(map(_short, value))})" if isinstance(value, tuple) else f"{value:.4g}"
