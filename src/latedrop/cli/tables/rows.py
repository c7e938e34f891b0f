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
        """What its names are names of."""
        return "array" if self.arrays and self.images is None else "column"


@dataclass(frozen=True)
class Columns:
    """What each column is for: the model's inputs, the targets, to be carried along as it is, or what rows count.

    With `labels` the one target may be text, and `labels` says what number each stands for.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    weight: str | None = None
    labels: Labels | None = None

    @property
    def numbers(self) -> list[str]:
        """Inputs, targets and weights, each once."""
        weight = () if self.weight is None else (self.weight,)
        return list(dict.fromkeys((*self.inputs, *(() if self.labels else self.targets), *weight)))

    @property
    def carried(self) -> list[str]:
        """What is read as it is, each once."""
        return list(dict.fromkeys((*self.kept, *(self.targets if self.labels else ()))))

    @property
    def all(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys((*self.numbers, *self.carried)))


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        places: the line or index of each in its file.
        inputs: `(N, columns)` of a csv or parquet file, else the arrays `(N, ...)` by name.
        target: `(N,)`, `(N, targets)` or an array `(N, ...)`; the numbers of classes where these are labels; None where
            no target was asked for.
        kept: what is carried along, by name, N values each.
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
        """Only the rows where `mask`, `(N,)`, is True."""
        inputs, kept = self.inputs, self.kept.items()
        return Rows(
            list(compress(self.places, mask)),
            {name: value[mask] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[mask],
            None if self.target is None else self.target[mask],
            {name: values.filter(mask) if hasattr(values, "filter") else values[mask] for name, values in kept},
            self.finite[mask],
            None if self.weights is None else self.weights[mask],
        )


def choose(
    table: Table,
    inputs: Sequence[str] = (),
    targets: Sequence[str] = (),
    kept: Sequence[str] = (),
    ignored: Sequence[str] = (),
    weight: str | None = None,
) -> Columns:
    """Which columns serve for what; without `inputs`, all that are none of the others, or the array `x`."""
    weights = [] if weight is None else [weight]
    for asked in (inputs, targets, kept, ignored, weights):
        _check_names(table, asked)
    if not inputs:
        others = {*targets, *kept, *ignored, *weights}
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


def read_batches(table: Table, columns: Columns, batch_size: int = 256) -> Iterator[Rows]:
    """The rows of a table, in its order, at most `batch_size` at a time."""
    if batch_size < 1:
        raise ArgumentError(f"expected a batch size of at least 1; found {batch_size}.")
    with readable(table.path, "data"):
        for places, numbers, kept in table.read(columns, batch_size):
            finite = np.ones(len(places), dtype=bool)
            for value in numbers.values():
                if value.dtype.kind == "f":
                    finite &= np.isfinite(value).reshape(len(value), -1).all(1)
            target = _target(table, columns, numbers)
            if columns.labels is not None:
                (name,) = columns.targets
                target = columns.labels.codes(kept[name], _placed(table, places))
                finite &= np.isfinite(target).reshape(len(target), -1).all(1)
                kept = {name: kept[name] for name in columns.kept}
            found = [numbers[name] for name in columns.inputs]
            inputs = dict(zip(columns.inputs, found, strict=True)) if table.arrays else np.column_stack(found)
            weights = None if columns.weight is None else _weights(table, columns.weight, numbers)
            yield Rows(places, inputs, target, kept, finite, weights)


def _weights(table: Table, name: str, numbers: dict[str, Array]) -> Array:
    found = numbers[name]
    if found[:1].size > 1:
        raise ArgumentError(
            f"expected one weight per row in {name!r} of {table.path}; found values of shape {found.shape[1:]}. Name "
            "another: --row-weights."
        )
    return found.reshape(len(found)).astype(np.float64)


def _placed(table: Table, places: Sequence[Place]) -> Callable[[int], str]:
    return lambda i: f"{table.unit} {places[i]} of {table.path}"


def _target(table: Table, columns: Columns, numbers: dict[str, Array]) -> Array | None:
    found = [numbers[name] for name in columns.targets if columns.labels is None]
    if len(found) < 2:
        return found[0] if found else None
    wide = [name for name, value in zip(columns.targets, found, strict=True) if value.ndim > 1]
    if wide:
        raise ArgumentError(
            "expected one value per row in each of several targets; found more in "
            f"{listed(map(repr, wide), _SHOWN)} of {table.path}. Name one target, an array with a column for each "
            "output."
        )
    return np.column_stack(found)


def _check_names(table: Table, asked: Sequence[str]) -> None:
    for name in asked:
        if name not in table.names:
            close = get_close_matches(name, table.names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has {listed(map(repr, table.names), _SHOWN)}."
            raise ArgumentError(f"expected {table.word} {name!r} in {table.path}; it is not there. {hint}")
        if table.names.count(name) > 1:
            raise DataError(f"expected one {table.word} {name!r} in {table.path}; found several. Rename them.")
