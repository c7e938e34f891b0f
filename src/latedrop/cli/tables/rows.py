"""Tables of all kinds: a file with names, what each column is for, and batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.cli.tables.labels import Labels
from latedrop.errors import ArgumentError, DataError
from latedrop.files import readable
from latedrop.terminal import listed

__all__ = ["STANDARD", "Array", "Block", "Columns", "Place", "Reader", "Rows", "Table", "choose", "read_batches"]

STANDARD = "-"
"""The path of standard input and output."""

Array: TypeAlias = npt.NDArray[Any]
Place: TypeAlias = int | str
"""A line or an index; in a folder, with the file's name: `part1.csv:7`."""
Block: TypeAlias = "tuple[Sequence[Place], dict[str, Array], dict[str, Any]]"
"""Places, numbers by name, and what is carried along by name."""
Reader: TypeAlias = Callable[["Columns", int], "Iterator[Block]"]
_SHOWN = 12


@dataclass(frozen=True)
class Table:
    """A file with rows, or a folder of such files.

    Attributes:
        path: where it is; `-` is standard input.
        names: of its columns or arrays, in the file's order.
        arrays: whether a row of an input can have any shape; else it is one value.
        count: how many rows, where that is known without reading them.
        unit: what `Rows.places` counts: the file's lines from 1, or its rows from 0.
        read: makes the iterator over rows; use `read_batches`.
        images: the column that names images, which are the inputs; None where there are none.
    """

    path: str
    names: tuple[str, ...]
    arrays: bool
    count: int | None
    unit: str
    read: Reader
    images: str | None = None

    @property
    def word(self) -> str:
        """Return the word for a named part in messages, "array" or "column"."""
        return "array" if self.arrays and self.images is None else "column"


@dataclass(frozen=True)
class Columns:
    """Name the columns used as inputs, as targets, as row weights, and those copied to the output (`kept`).

    With `labels` there is one target, which may be text; `labels` maps it to class numbers.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    weight: str | None = None
    labels: Labels | None = None

    @property
    def numbers(self) -> list[str]:
        """Return the columns read as numbers (inputs, targets, weights), without duplicates."""
        weight = () if self.weight is None else (self.weight,)
        return list(dict.fromkeys((*self.inputs, *(() if self.labels else self.targets), *weight)))

    @property
    def carried(self) -> list[str]:
        """Return the columns read unchanged (kept ones, and labels), without duplicates."""
        return list(dict.fromkeys((*self.kept, *(self.targets if self.labels else ()))))

    @property
    def all(self) -> list[str]:
        """Return all columns, without duplicates."""
        return list(dict.fromkeys((*self.numbers, *self.carried)))


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        places: the line or index of each in its file.
        inputs: `(N, columns)` of a csv or parquet file, else the arrays `(N, ...)` by name.
        target: `(N,)`, `(N, targets)` or an array `(N, ...)`; the numbers of classes where these are labels; None where
            no target was asked for.
        kept: columns copied to the output, by name, N values each.
        finite: `(N,)`, whether a row has neither NaN nor inf.
        weights: `(N,)`, what each row counts; None where all count the same.
    """

    places: Sequence[Place]
    inputs: Array | dict[str, Array]
    target: Array | None
    kept: dict[str, Any]
    finite: npt.NDArray[np.bool_]
    weights: Array | None = None

    def __len__(self) -> int:
        return len(self.places)

    def where(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """Return only the rows where `mask`, `(N,)`, is True."""
        if mask.all():
            return self

        def chosen(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: chosen(part) for name, part in values.items()}
            return None if values is None else values.filter(mask) if hasattr(values, "filter") else values[mask]

        others = (self.inputs, self.target, self.kept, self.finite, self.weights)
        return Rows(list(compress(self.places, mask)), *map(chosen, others))


def choose(
    table: Table,
    inputs: Sequence[str] = (),
    targets: Sequence[str] = (),
    kept: Sequence[str] = (),
    ignored: Sequence[str] = (),
    weight: str | None = None,
) -> Columns:
    """Choose the columns by use; without `inputs`, take all columns that have no other use, or the array `x`."""
    others = [*targets, *kept, *ignored, *([] if weight is None else [weight])]
    _check_names(table, [*inputs, *others])
    if not inputs:
        inputs = ["x"] if table.arrays else [name for name in table.names if name not in others]
        _check_names(table, inputs)
        if "" in inputs:
            raise ArgumentError(
                f"expected a name for every input column of {table.path}; found one without, such as an index that was "
                "saved along. Name those to use: --inputs a,b,c."
            )
    if not inputs:
        raise ArgumentError(f"expected input columns in {table.path}; found none beside those for something else.")
    both = [name for name in inputs if name in targets]
    if both:
        raise ArgumentError(f"expected inputs and targets to differ; found {listed(map(repr, both), _SHOWN)} in both.")
    return Columns(tuple(inputs), tuple(targets), tuple(kept), weight)


def _check_names(table: Table, asked: Sequence[str]) -> None:
    for name in asked:
        if name not in table.names:
            close = get_close_matches(name, table.names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has {listed(map(repr, table.names), _SHOWN)}."
            raise ArgumentError(f"expected {table.word} {name!r} in {table.path}; it is not there. {hint}")
        if table.names.count(name) > 1:
            raise DataError(f"expected one {table.word} {name!r} in {table.path}; found several. Rename them.")


def read_batches(table: Table, columns: Columns, batch_size: int = 256) -> Iterator[Rows]:
    """Read the rows of a table, in its order, at most `batch_size` at a time."""
    if batch_size < 1:
        raise ArgumentError(f"expected a batch size of at least 1; found {batch_size}.")
    with readable(table.path, "data"):
        for places, numbers, carried in table.read(columns, batch_size):
            if columns.labels is None:
                target = _target(table, columns, numbers)
            else:
                where = [f"{table.unit} {place} of {table.path}" for place in places]
                target = columns.labels.codes(carried[columns.targets[0]], where)
            finite = np.ones(len(places), dtype=bool)
            for value in (*numbers.values(), *([] if target is None else [target])):
                if value.dtype.kind == "f":
                    finite &= np.isfinite(value).reshape(len(value), -1).all(1)
            values = {name: numbers[name] for name in columns.inputs}
            inputs = values if table.arrays else np.column_stack(list(values.values()))
            copied = {name: carried[name] for name in columns.kept}
            yield Rows(places, inputs, target, copied, finite, _weights(table, columns, numbers))


def _target(table: Table, columns: Columns, numbers: dict[str, Array]) -> Array | None:
    values = [numbers[name] for name in columns.targets]
    if len(values) < 2:
        return values[0] if values else None
    wide = [name for name, value in zip(columns.targets, values, strict=True) if value.ndim > 1]
    if wide:
        raise ArgumentError(
            "expected one value per row in each of several targets; found more in "
            f"{listed(map(repr, wide), _SHOWN)} of {table.path}. Name one target, an array with a column for each "
            "output."
        )
    return np.column_stack(values)


def _weights(table: Table, columns: Columns, numbers: dict[str, Array]) -> Array | None:
    if columns.weight is None:
        return None
    values = numbers[columns.weight]
    if values[:1].size > 1:
        raise ArgumentError(
            f"expected one weight per row in {columns.weight!r} of {table.path}; found values of shape "
            f"{values.shape[1:]}. Name another: --row-weights."
        )
    return values.reshape(len(values)).astype(np.float64)
