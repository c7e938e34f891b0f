"""Where intervals hold less than elsewhere: test rows in groups, by deviation, by an input, by how strange they are.

In each group stand the share of values inside the intervals, and the share inside those of one constant variance.
A group differs from the level where it is off by more standard errors than chance gives to the worst of all groups
that are looked at: `z` with `2 (1 - Phi(z)) = 0.05 / groups`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.metrics.levels import normal_quantile

__all__ = ["Floats", "Group", "Inputs", "Outcomes", "by_deviation", "by_input", "by_novelty", "input_columns"]

Floats: TypeAlias = npt.NDArray[np.float64]
_FEWEST = 10  # rows of a group
_DECILES, _PARTS = 10, 5
_CHANCE = 0.05
_TELLING = 6


@dataclass(frozen=True)
class Group:
    """Some of the test rows.

    Attributes:
        name: of what they are grouped by.
        low: the smallest value of that in the group.
        high: the largest.
        rows: how many.
        coverage: share of their values inside the intervals.
        coverage_error: standard error of that, for intervals that hold what their level says.
        constant: share inside the intervals of one constant variance; None where the constant is not known.
        rmse: of these rows, in the target's unit.
        std: root of the mean predicted variance.
        off: "less" or "more" where the coverage is further from the level than chance explains; else empty.
    """

    name: str
    low: float
    high: float
    rows: int
    coverage: float
    coverage_error: float
    constant: float | None
    rmse: float
    std: float
    off: str = ""


@dataclass(frozen=True)
class Outcomes:
    """One entry per value: errors, deviations, and whether the value lies in its interval.

    Attributes:
        level: of the intervals.
        rows: the row that each value belongs to.
        error: target less prediction.
        std: the predicted standard deviation.
        inside: whether the interval holds the target.
        constant: the same of one constant variance; None where it is not known.
    """

    level: float
    rows: npt.NDArray[np.intp]
    error: Floats
    std: Floats
    inside: npt.NDArray[np.bool_]
    constant: npt.NDArray[np.bool_] | None

    def group(self, name: str, by: Floats, chosen: npt.NDArray[np.intp], groups: int) -> Group:
        """Return the values at some indices as a group, one of so many that are looked at."""
        rows, values = len(np.unique(self.rows[chosen])), len(chosen)
        coverage = float(self.inside[chosen].mean())
        error = float(np.sqrt(self.level * (1 - self.level) / values))
        if values > rows:  # what the values of a row have in common is more than chance
            of_row = np.bincount(self.rows[chosen], self.inside[chosen] - coverage)
            error = max(error, float(np.sqrt(np.square(of_row).sum())) / values)
        far = abs(coverage - self.level) > normal_quantile(1 - _CHANCE / 2 / groups) * error and rows >= _FEWEST
        return Group(
            name,
            float(by[chosen].min()),
            float(by[chosen].max()),
            rows,
            coverage,
            error,
            None if self.constant is None else float(self.constant[chosen].mean()),
            float(np.sqrt(np.square(self.error[chosen]).mean())),
            float(np.sqrt(np.square(self.std[chosen]).mean())),
            ("less" if coverage < self.level else "more") if far else "",
        )


def by_deviation(outcomes: Outcomes) -> tuple[Group, ...]:
    """Return tenths by predicted deviation, the smallest first; none where these are all the same."""
    if np.ptp(outcomes.std) <= 1e-6 * outcomes.std.max():
        return ()
    return _parts(outcomes, "std", outcomes.std, _DECILES, 1)


def by_novelty(outcomes: Outcomes, novelty: Floats) -> tuple[Group, ...]:
    """Return the rows of a novelty up to 1, as 95 % of the reference rows have, and those beyond; one value per row."""
    by = novelty[outcomes.rows]
    cuts = [np.flatnonzero(by <= 1), np.flatnonzero(by > 1)]
    return tuple(outcomes.group("novelty", by, chosen, 2) for chosen in cuts if len(chosen))


def by_input(
    outcomes: Outcomes, inputs: Inputs, values: Mapping[str, Floats], most: int | None = _TELLING
) -> tuple[tuple[Group, ...], ...]:
    """Return groups along the inputs that tell most, the most telling first; `values` are others, one per value.

    `most` of them, or all where None.
    """
    telling, names = [], dict.fromkeys([*inputs.columns, *values])
    for name in names:
        by = values[name] if name in values else inputs.at(name, outcomes.rows)
        groups = _parts(outcomes, name, by, _PARTS, _PARTS * len(names))
        if len(groups) > 1:
            telling.append(groups)
    return tuple(sorted(telling, key=_difference, reverse=True)[:most])


def _difference(groups: Sequence[Group]) -> float:
    """Return how much the coverage differs between groups, beside what chance does: the mean of squares of `z`."""
    middle = sum(group.coverage * group.rows for group in groups) / sum(group.rows for group in groups)
    return sum(((group.coverage - middle) / group.coverage_error) ** 2 for group in groups) / (len(groups) - 1)


def _parts(outcomes: Outcomes, name: str, by: Floats, most: int, groups: int) -> tuple[Group, ...]:
    """Return groups of about as many values each; what is equal stays together, and NaN out."""
    finite = np.flatnonzero(np.isfinite(by))
    values = np.unique(by[finite])
    parts = min(most, len(finite) // _FEWEST)
    if parts < 2 or len(values) < 2:
        return ()
    edges = np.unique(np.quantile(by[finite], np.arange(1, parts) / parts))
    places = np.searchsorted(values if len(values) <= parts else edges, by[finite], side="left")
    total = len(np.unique(places)) if groups == 1 else groups
    cuts = [finite[places == place] for place in np.unique(places)]
    return tuple(outcomes.group(name, by, chosen, total) for chosen in cuts)


@dataclass(frozen=True)
class Inputs:
    """Columns of numbers that rows can be grouped by.

    Attributes:
        columns: by name, one value per row.
        rows: which rows these are, in rising order; all of them where None.
    """

    columns: Mapping[str, Floats]
    rows: npt.NDArray[np.intp] | None = None

    def at(self, name: str, rows: npt.NDArray[np.intp]) -> Floats:
        """Return the values of some rows; NaN where a row is not among those that are known."""
        column = self.columns[name]
        if self.rows is None:
            return column[rows]
        places = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        return np.where(self.rows[places] == rows, column[places], np.nan)


def input_columns(inputs: Any, rows: int) -> Inputs:
    """Return columns of numbers of a mapping, a DataFrame, or an array `(N, columns)`; none where there are none.

    Columns that are not one number per row are left out.
    """
    if isinstance(inputs, Inputs):
        return inputs
    columns: dict[str, Any] = {}
    if hasattr(inputs, "columns") or isinstance(inputs, Mapping):
        names = inputs.columns if hasattr(inputs, "columns") else inputs
        columns = {str(name): inputs[name] for name in names}
    elif inputs is not None:
        array = np.asarray(inputs.detach().cpu() if hasattr(inputs, "detach") else inputs)
        columns = {f"input {k}": part for k, part in enumerate(array.T)} if array.ndim == 2 else {}
    numbers = {}
    for name, column in columns.items():
        values = np.asarray(column.detach().cpu() if hasattr(column, "detach") else column)
        if values.shape == (rows,) and values.dtype.kind in "fiub":
            numbers[name] = values.astype(np.float64)
    return Inputs(numbers)
