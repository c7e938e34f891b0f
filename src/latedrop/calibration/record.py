"""The record of a calibration: all that was chosen and measured, frozen, and plain JSON on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args
from warnings import warn

import torch
from torch import Tensor

from latedrop.calibration.fitted_terms import FittedTerms, aligned
from latedrop.calibration.intervals import LARGEST, Intervals, intervals_to_dict
from latedrop.calibration.measuring import Method
from latedrop.calibration.record_parts import (
    LARGEST_SCALE,
    TINY,
    Choice,
    RateRow,
    checked_choice,
    choice_of,
    curves_of,
    intervals_of,
    point_of,
    rate_of,
    readout_of,
    row_of,
    shape_of,
    shares_of,
    verdict_of,
)
from latedrop.calibration.scale import TradeoffPoint, apply_scale, lifted
from latedrop.calibration.seen import seen_of
from latedrop.calibration.term_record import Stored, plain_tensors, terms_from_dict, terms_to_dict
from latedrop.calibration.transforms import Transform, transform_from_dict
from latedrop.calibration.verdict import Verdict
from latedrop.dropout.moments import MOST_DRAWS
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.network.sites import Rate, Sites, rates_by_site
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
    wrong,
)

__all__ = ["Calibration", "Choice", "RateRow", "checked_choice", "lifted", "rate_text"]

_FORMAT = 1
_SCALES, _FLOORS = ("scales", "relaxed_scales"), ("floors", "relaxed_floors")


@dataclass(frozen=True)
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
        intervals: fitted isotonic or conformal intervals; None is Gaussian.
        columns: the names of the inputs and targets, in the file or the tables of validation data; None where there
            were none.
        terms: what `method="terms"` fitted; the raw variance is then the fitted one, and the scale 1.
        verdict: what the variance is worth beside a constant, on rows left out of its fit.
        constant: that constant, the validation rows' mean squared error, one per output or one for all.
        ratio_to_draws: of a method that approximates, its raw variance over that of a few draws, on a few validation
            rows; None where draws were taken anyway, or where it was not measured.
        target: how the targets were transformed for training, None where they were not. Scales, floors, coefficients
            and constants are in the model's unit then; the table and the path are in the original one.
        seen: marks of up to 256 rows that it was fitted to, by which `compare` notices these; see `calibration.seen`.
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
    terms: FittedTerms | None = None
    verdict: Verdict | None = None
    constant: tuple[float, ...] | None = None
    ratio_to_draws: float | None = None
    target: Transform | None = None
    seen: str = ""

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

    @property
    def output_names(self) -> tuple[str, ...] | None:
        """What the outputs are called, one for each entry along axis 1: as the target columns. None where not known."""
        known = self.columns or {}
        names = known.get("targets") or known.get("target_arrays") or ()
        return names if len(names) == (self.output_shape[0] if len(self.output_shape) == 1 else 1) else None

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

    def check_outputs(self, mean: Tensor) -> None:
        """`DataError` where outputs `(N, ...)` are of another shape than the calibrated ones."""
        fixed = self.per_output or self.output_shape == (1,)  # else the cells of a map, which may be of another size
        if mean.dim() != len(self.output_shape) + 1 or (fixed and mean.shape[1] != self.output_shape[0]):
            raise DataError(
                f"expected outputs of shape (N, {', '.join(map(str, self.output_shape))}), as in the calibration; "
                f"found {tuple(mean.shape)}. Use the readout that the calibration was made with."
            )

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

    def to_json(self, stored: dict[str, Tensor] | None = None, file: str = "") -> str:
        """Readable JSON, with a checksum over its content.

        Where `stored` is given, tensors go there, and the JSON says that they are in `file`.
        """
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.choice, TradeoffPoint):
            record["choice"] = asdict(self.choice)
        record["sites"] = self.sites.to_list()
        record["table"] = [asdict(row) for row in self.table]
        record["path"] = [asdict(point) for point in self.path]
        record["intervals"] = intervals_to_dict(self.intervals)
        record["terms"] = None if self.terms is None else plain_tensors(terms_to_dict(self.terms), stored, file)
        record["verdict"] = None if self.verdict is None else asdict(self.verdict)
        record["target"] = None if self.target is None else self.target.to_dict()
        record = {"format": _FORMAT, **json.loads(json.dumps(record))}
        return sealed("latedrop", record)

    @classmethod
    def from_json(cls, content: str, stored: Stored = lambda file: {}) -> Calibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited or of another format.

        `stored` is called where tensors are kept elsewhere.
        """
        document = parsed(content, "a calibration", "Calibrate again.")
        edited = "Calibrate again; to use another scale, load the original and call predictor.scaled(...)."
        again = "Calibrate again with this version."
        return _checked(cls, unsealed(document, "latedrop", "a calibration", _FORMAT, again, edited), stored)

    @property
    def verdict_of_other(self) -> str:
        """What the verdict is about, in words, where that is not what predictions use; empty where it is."""
        if self.verdict is None or (self.choice == "optimal" and self.intervals is None):
            return ""
        used = f"{self.intervals.kind} intervals" if self.intervals is not None else "another scale"
        return f"This is said of Gaussian intervals with the scale of least NLL; predictions use {used}: evaluate them."

    def __str__(self) -> str:
        lines = [str(self.verdict)] if self.verdict is not None else []
        lines += [self.verdict_of_other] if self.verdict_of_other else []
        if self.target is not None:
            lines.append(f"trained on transformed targets, {self.target}: what is fitted is in the model's unit")
        return "\n".join(lines + (self._rate_lines() if self.terms is None else self.terms.lines()))

    def _rate_lines(self) -> list[str]:
        draws = f", {self.draws} draws" if self.draws else ""
        lines = [
            f"rate {rate_text(self.rate)}, scale {_short(self.scale)}, relaxed scale {_short(self.relaxed_scale)}, "
            f"floor {_short(self.floor)} ({self.method}, {self.criterion} criterion, {self.rows} rows{draws})"
        ]
        if self.ratio_to_draws is not None:
            lines.append(f"its raw variance is {_short(self.ratio_to_draws)} times that of a few draws")
        if 0 in self.scales:
            lines.append("scale 0: the floor alone gives the variance, the same for every input")
        names = ["rate", "rmse", "nll_unscaled", "nll_scaled", "nll_relaxed", "nll_ideal"]
        names += ["ma_unscaled", "ma_scaled", "ma_relaxed", "scale", "relaxed_scale"]
        cells = [["", *(name.replace("_", " ") for name in names)]]
        for row in self.table:
            values = [_float_or_tuple(getattr(row, name)) for name in names]
            mark = "*" if row.rate == self.rate else ""
            cells.append([mark, rate_text(row.rate), *map(_short, values[1:])])
        lines += aligned(cells)
        if isinstance(self.rate, Mapping) or self.shares is not None:
            rates = rates_by_site(self.sites, self.rate)
            rows = [["site", "rate", "share of variance"]]
            for site in self.sites:
                share = "" if self.shares is None else f"{self.shares[site.name]:.1%}"
                rows.append([site.name, _short(rates[site.name]), share])
            lines += aligned(rows)
        return lines


def _checked(kind: type[Calibration], record: dict[str, Any], stored: Stored) -> Calibration:
    """The calibration in a record, every field checked on its own and against the others."""
    fields = Fields(record, "calibration")
    shape = fields.take("output_shape", shape_of)
    per_output, method = fields.take("per_output", flag), fields.take("method", text, among=get_args(Method))
    if per_output and not shape:
        wrong("calibration.per_output", "false, as there is one output", per_output)
    count = shape[0] if per_output else 1
    sites = fields.take("sites", Sites.from_list)
    scales = {name: fields.take(name, numbers, least=0, most=LARGEST_SCALE, length=count) for name in _SCALES}
    floors = {name: fields.take(name, numbers, least=0, most=LARGEST, length=count) for name in _FLOORS}
    table = fields.take("table", each(row_of), count=count)
    rate = fields.take("rate", rate_of, sites=sites)
    if all(row.rate != rate for row in table):
        wrong("calibration.rate", "a rate of its table", rate)
    found = kind(
        rate=rate,
        **scales,
        **floors,
        choice=fields.take("choice", choice_of, count=count),
        criterion=fields.take("criterion", text, among=("scaled", "unscaled")),
        method=method,
        mean=fields.take("mean", text, among=("draws", "model")),
        draws=fields.take("draws", whole, least=2 if method == "sample" else 0, most=MOST_DRAWS),
        seed=fields.take("seed", whole),
        shared=fields.take("shared", flag),
        per_output=per_output,
        rows=fields.take("rows", whole, least=2),
        output_shape=shape,
        least_variance=fields.take("least_variance", numbers, least=TINY, most=LARGEST, length=count),
        sites=sites,
        readout=fields.take("readout", readout_of),
        custom_readout=fields.take("custom_readout", or_none(text)),
        table=table,
        path=fields.take("path", each(point_of), count=count),
        curves=fields.take("curves", curves_of),
        shares=fields.take("shares", shares_of, sites=sites),
        intervals=fields.take("intervals", intervals_of, count=count, shape=shape),
        fingerprint=fields.take("fingerprint", text),
        versions=fields.take("versions", mapping(text)),
        columns=fields.maybe("columns", None, or_none(mapping(each(text)))),
        terms=fields.maybe("terms", None, or_none(terms_from_dict), stored=stored, count=count),
        verdict=fields.maybe("verdict", None, or_none(verdict_of)),
        constant=fields.maybe("constant", None, or_none(numbers), least=0, most=LARGEST, length=count),
        ratio_to_draws=fields.maybe("ratio_to_draws", None, or_none(number), least=0),
        target=fields.maybe("target", None, or_none(transform_from_dict), count=shape[0] if shape else 1),
        seen=fields.maybe("seen", "", seen_of),
    )
    fields.end()
    if (method == "terms") != (found.terms is not None) or (rate == {}) != (found.terms is not None):
        wrong("calibration.terms", f"there with method 'terms' and without a rate, and only then, not {method!r}", rate)
    return found


def rate_text(rate: Rate | None) -> str:
    """A rate for tables: a number, `per site` where they differ, a dash where there is no dropout."""
    if rate is None or rate == {}:
        return "-"
    return "per site" if isinstance(rate, Mapping) else _short(rate)


def _float_or_tuple(values: Any) -> float | tuple[float, ...]:
    result: float | tuple[float, ...] = values[0] if isinstance(values, tuple) and len(values) == 1 else values
    return result


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_short(item) for item in value) + ")"
    return f"{value:.4g}"
