"""Bounds on measures, as a pipeline states them: `coverage90>=0.85, gain>=0, rmse[price]<12`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from latedrop.errors import ArgumentError
from latedrop.numerals import plain

__all__ = ["CLASS_MEASURES", "MEASURES", "Requirement", "checked_requirements", "level_of", "parsed_requirements"]

MEASURES = ("coverage90", "width90", "gain", "correlation", "rmse", "mae", "nll", "ma", "rows")
"""What can be required; coverage and width at any level in percent, from 1 to 99."""
CLASS_MEASURES = (
    *("accuracy", "nll", "brier", "ece", "classwise_ece", "gain", "auroc", "selective_risk", "coverage90", "size90"),
    *("kept", "kept_error", "rows"),
)
"""What can be required of a classifier; coverage and size of sets at any level in percent."""

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_ONE = re.compile(r"\s*(?P<name>[A-Za-z_]+[\d.]*(?:\[.+\])?)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>[-+\d.eE]+)\s*")
_LEVELLED = re.compile(r"(coverage|width|size)(?P<level>[1-9]\d?)")
_BETWEEN = re.compile(r",(?![^\[]*\])")  # no comma inside brackets


@dataclass(frozen=True)
class Requirement:
    """A bound on a measure.

    Attributes:
        measure: its name.
        sign: `>=`, `>`, `<=` or `<`.
        bound: what it is held against.
        found: what was measured; None before that.
    """

    measure: str
    sign: str
    bound: float
    found: float | None = None

    @property
    def met(self) -> bool:
        """Whether the bound is kept; not where the measure is NaN."""
        return self.found is not None and _COMPARE[self.sign](self.found, self.bound)

    def __str__(self) -> str:
        found = "" if self.found is None else f"; found {plain(self.found)}"
        return f"required {self.measure} {self.sign} {self.bound:g}{found}"


def parsed_requirements(text: str) -> tuple[Requirement, ...]:
    """Requirements separated by commas; `ArgumentError` where one cannot be read, or no measure has its name."""
    found = []
    for part in _BETWEEN.split(text):
        match = _ONE.fullmatch(part)
        try:
            bound = float(match["bound"]) if match else None
        except ValueError:
            bound = None
        if match is None or bound is None:
            raise ArgumentError(
                f"expected requirements as NAME>=NUMBER (or >, <=, <), separated by commas; found {part.strip()!r}."
            )
        _check_name(match["name"].partition("[")[0])
        found.append(Requirement(match["name"], match["sign"], bound))
    return tuple(found)


def checked_requirements(text: str, measures: Mapping[str, float]) -> tuple[Requirement, ...]:
    """The requirements with what was measured; `ArgumentError` where a measure is not among these."""
    found = []
    for item in parsed_requirements(text):
        if item.measure not in measures:
            outputs = sorted({name.partition("[")[2][:-1] for name in measures if "[" in name})
            alike = [name for name in dict.fromkeys((*MEASURES, *CLASS_MEASURES)) if name in measures]
            of = f"; of one output with its name, as in gain[{outputs[0]}], among {outputs}" if outputs else ""
            raise ArgumentError(
                f"expected a measure of these rows to require; found {item.measure!r}. Known: {', '.join(alike)}{of}. "
                "coverage, width and size take a level in percent."
            )
        found.append(Requirement(item.measure, item.sign, item.bound, measures[item.measure]))
    return tuple(found)


def level_of(measure: str) -> float | None:
    """The level of a measure such as `coverage90`; None of others."""
    match = _LEVELLED.fullmatch(measure)
    return None if match is None else int(match["level"]) / 100


def _check_name(name: str) -> None:
    match = _LEVELLED.fullmatch(name)
    known = dict.fromkeys((*MEASURES, *CLASS_MEASURES))
    if match is None and (name not in known or name.endswith("90")):
        raise ArgumentError(
            f"expected a measure to require among {', '.join(known)}, with coverage, width and size at any level from "
            f"1 to 99; found {name!r}."
        )
