"""Where a table is cut: a network sees the rows on one side of a quantile of one input and is tested on the others.

The rows are ordered by one input, `above`: from its smallest value up, `below`: from its largest value down. The first
70 % are *inside*; the rows whose value lies strictly beyond the last of these are *shifted*. Rows with the same value
as the last one are put in order by chance. Those of them that are not inside are left out, so that every cut of a table
has the same number of rows inside, and no shifted row has a value that occurs inside.

Of the rows inside a fifth is held out to compare with (`inside`), of the rest a fifth is for validation, and the
networks are trained on what is left. Inputs and target are standardised with the rows that a network is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["DIRECTIONS", "MOST_ROWS", "Cut", "LeftOut", "Parts", "Table", "at_most", "cuts", "parts"]

Table: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.int64]
Direction: TypeAlias = Literal["above", "below"]

DIRECTIONS: tuple[Direction, ...] = ("above", "below")
MOST_ROWS = 5000
"""Larger tables are reduced to so many rows, drawn by chance."""
_INSIDE = 0.7
_LEAST_SHIFTED = 0.15  # of all rows
_HELD, _VALIDATION = 0.2, 0.2


@dataclass(frozen=True)
class Cut:
    """One input and direction, and the row numbers on both sides.

    Attributes:
        column: of the input.
        direction: where the shifted rows are.
        edge: value of the last row inside.
        train: rows that networks are trained on.
        validation: rows that scales, floors and rates are fitted on.
        inside: held out, from the same side as the training rows.
        shifted: all rows beyond the edge.
    """

    column: int
    direction: Direction
    edge: float
    train: Rows
    validation: Rows
    inside: Rows
    shifted: Rows


@dataclass(frozen=True)
class LeftOut:
    """An input and direction that cannot be cut, and why."""

    column: int
    direction: Direction
    reason: str


@dataclass(frozen=True)
class Parts:
    """The rows of all cuts, standardised: x `(cuts, n, inputs)`, y `(cuts, n)`, for every part of a `Cut`.

    Attributes:
        x: by part.
        y: by part.
        shifted: how many shifted rows each cut has; the rest, up to the largest, are copies of its last row.
    """

    x: dict[str, Table]
    y: dict[str, Table]
    shifted: tuple[int, ...]


def at_most(table: Table, rows: int = MOST_ROWS, seed: int = 0) -> Table:
    """The table, or so many of its rows, in their order."""
    if len(table) <= rows:
        return table
    chosen = np.random.default_rng([seed, len(table)]).permutation(len(table))[:rows]
    return table[np.sort(chosen)]


def cuts(table: Table, seed: int = 0, inputs: int | None = None) -> tuple[list[Cut], list[LeftOut]]:
    """Every input and direction of a table (the target is its last column) that can be cut, and those that cannot.

    Args:
        table: `(rows, columns)`.
        seed: of ties, and of which rows are for what.
        inputs: only the first ones.

    >>> table = np.random.default_rng(0).normal(size=(100, 3))
    >>> table[:, 1] = table[:, 1] > 0
    >>> found, left_out = cuts(table)
    >>> [(cut.column, cut.direction, len(cut.shifted)) for cut in found]
    [(0, 'above', 30), (0, 'below', 30)]
    >>> left_out[0].reason
    '0 % of the rows lie beyond the cut; it has 2 values'
    """
    found: list[Cut] = []
    left_out: list[LeftOut] = []
    for column in range(table.shape[1] - 1)[:inputs]:
        for direction in DIRECTIONS:
            random = np.random.default_rng([seed, column, DIRECTIONS.index(direction)])
            one = _cut(table[:, column], column, direction, random)
            if isinstance(one, Cut):
                found.append(one)
            else:
                left_out.append(one)
    return found, left_out


def _cut(values: Table, column: int, direction: Direction, random: np.random.Generator) -> Cut | LeftOut:
    signed = values if direction == "above" else -values
    by_chance = random.permutation(len(values))
    order = by_chance[np.argsort(signed[by_chance], kind="stable")]
    rows = order[: round(_INSIDE * len(values))]
    edge, last = signed[rows[-1]], float(values[rows[-1]])
    shifted = np.flatnonzero(signed > edge)
    count = len(np.unique(values))
    if len(shifted) < _LEAST_SHIFTED * len(values):
        share = f"{len(shifted) / len(values):.0%}".replace("%", " %")
        return LeftOut(column, direction, f"{share} of the rows lie beyond the cut; it has {count} values")
    if signed[rows[0]] == edge:
        return LeftOut(column, direction, f"one value in all rows inside; it has {count} values")
    rows = random.permutation(rows)
    held = round(_HELD * len(rows))
    kept = held + round(_VALIDATION * (len(rows) - held))
    return Cut(column, direction, last, rows[kept:], rows[held:kept], rows[:held], shifted)


def parts(table: Table, found: Sequence[Cut]) -> Parts:
    """The rows of all cuts as arrays. A column that is constant in the training rows is only centred."""
    most = max(len(cut.shifted) for cut in found)
    numbers = {part: np.stack([getattr(cut, part) for cut in found]) for part in ("train", "validation", "inside")}
    numbers["shifted"] = np.stack([np.pad(cut.shifted, (0, most - len(cut.shifted)), mode="edge") for cut in found])
    train = table[numbers["train"]]
    mean, std = train.mean(1), train.std(1)
    std[np.ptp(train, axis=1) == 0] = 1.0
    scaled = {part: (table[rows] - mean[:, None]) / std[:, None] for part, rows in numbers.items()}
    return Parts(
        {part: rows[..., :-1] for part, rows in scaled.items()},
        {part: rows[..., -1] for part, rows in scaled.items()},
        tuple(len(cut.shifted) for cut in found),
    )
