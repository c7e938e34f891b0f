"""What all kinds of tables share: a file with names, what its columns are for, and some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.cli.tables.labels import Labels

__all__ = ["STANDARD", "Array", "Block", "Columns", "Place", "Reader", "Rows", "Table"]

STANDARD = "-"
"""The path of standard input and output."""

Array: TypeAlias = npt.NDArray[Any]
Place: TypeAlias = int | str
"""A line or an index; in a folder, with the file's name: `part1.csv:7`."""
Block: TypeAlias = "tuple[Sequence[Place], dict[str, Array], dict[str, Any]]"
"""Places, numbers by name, and what is carried along by name."""
Reader: TypeAlias = Callable[["Columns", int], "Iterator[Block]"]


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
        """Only the rows where `mask`, `(N,)`, is True, with nothing carried along."""
        inputs = self.inputs
        return Rows(
            list(compress(self.places, mask)),
            {name: value[mask] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[mask],
            None if self.target is None else self.target[mask],
            {},
            self.finite[mask],
            None if self.weights is None else self.weights[mask],
        )
