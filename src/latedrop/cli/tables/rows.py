"""Tables of all kinds: a file with names, what each column is for, batches of rows, and labels of classes.

A label is the name of its class. Where no name is a number, it may also be the class's number. Without names it is a
number from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import compress
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from pyarrow import types

from latedrop.errors import ArgumentError, DataError
from latedrop.files import readable
from latedrop.terminal import listed

__all__ = [
    "STANDARD",
    "Array",
    "Block",
    "Columns",
    "Labels",
    "Reader",
    "Rows",
    "Table",
    "choose",
    "distinct",
    "is_number",
    "read_batches",
]

STANDARD = "-"
"""The path of standard input and output."""

Array: TypeAlias = npt.NDArray[Any]
Block: TypeAlias = "tuple[Sequence[int], dict[str, Any]]"
"""Places, and columns by name, of numpy or pyarrow; those of csv are text, or numbers where these are plain."""
Reader: TypeAlias = Callable[["Columns", int], "Iterator[Block]"]
_SHOWN = 12
_MOST_CLASSES = 10_000
_TRUTHS = {"true": 1.0, "false": 0.0}
_MISSING = {"", "na", "n/a", "nan", "null", "none"}


@dataclass(frozen=True)
class Table:
    """A file with rows.

    Attributes:
        path: where it is; `-` is standard input.
        names: of its columns or arrays, in the file's order.
        arrays: whether a row of an input can have any shape; else it is one value.
        count: how many rows, where that is known without reading them.
        unit: what `Rows.places` counts: the file's lines from 1, or its rows from 0.
        read: makes the iterator over rows; use `read_batches`.
        images: the column that names images, which are the inputs, and what opens them; None where there are none.
    """

    path: str
    names: tuple[str, ...]
    arrays: bool
    count: int | None
    unit: str
    read: Reader
    images: tuple[str, Callable[[Sequence[Any], Sequence[str]], Array]] | None = None

    @property
    def word(self) -> str:
        """Return the word for a named part in messages, "array" or "column"."""
        return "array" if self.arrays and self.images is None else "column"

    def where(self, places: Sequence[int]) -> list[str]:
        """Return where rows are, for messages."""
        return [f"{self.unit} {place} of {self.path}" for place in places]


@dataclass(frozen=True)
class Columns:
    """Name the columns used as inputs, as targets, and those copied to the output (`kept`).

    With `labels` there is one target, which may be text; `labels` maps it to class numbers.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    labels: Labels | None = None

    @property
    def numbers(self) -> list[str]:
        """Return the columns used as numbers (inputs and targets)."""
        return [*self.inputs, *(() if self.labels else self.targets)]

    @property
    def all(self) -> list[str]:
        """Return all columns, without duplicates."""
        return list(dict.fromkeys((*self.inputs, *self.targets, *self.kept)))


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
    """

    places: Sequence[int]
    inputs: Array | dict[str, Array]
    target: Array | None
    kept: dict[str, Any]
    finite: npt.NDArray[np.bool_]

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

        others = (self.inputs, self.target, self.kept, self.finite)
        return Rows(list(compress(self.places, mask)), *map(chosen, others))


def choose(
    table: Table,
    inputs: Sequence[str] = (),
    targets: Sequence[str] = (),
    kept: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Columns:
    """Choose the columns by use; without `inputs`, take all columns that have no other use, or the array `x`."""
    others = [*targets, *kept, *ignored]
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
    return Columns(tuple(inputs), tuple(targets), tuple(kept))


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
        for places, values in table.read(columns, batch_size):
            numbers: dict[str, Array] = {}
            for name in columns.numbers:
                if table.images is not None and name == table.images[0]:
                    numbers[name] = table.images[1](values[name].to_pylist(), table.where(places))
                else:
                    numbers[name] = _numbers(table, name, values[name], places)
            if columns.labels is None:
                target = _target(table, columns, numbers)
            else:
                target = columns.labels.codes(values[columns.targets[0]], table.where(places))
            finite = np.ones(len(places), dtype=bool)
            for value in (*numbers.values(), *([] if target is None else [target])):
                if value.dtype.kind == "f":
                    finite &= np.isfinite(value).reshape(len(value), -1).all(1)
            parts = {name: numbers[name] for name in columns.inputs}
            inputs = parts if table.arrays else np.column_stack(list(parts.values()))
            yield Rows(places, inputs, target, {name: values[name] for name in columns.kept}, finite)


def _numbers(table: Table, name: str, values: Any, places: Sequence[int]) -> Array:
    """Return a column as numbers, NaN where a value is missing; `DataError` where there is something else."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind == "U":
            raise DataError(f"expected numbers in array {name!r} of {table.path}; found text. Encode it as numbers.")
        return values
    if _is_numeric(values.type):
        return _floats(values)
    if table.unit != "line":
        raise DataError(
            f"expected numbers in column {name!r} of {table.path}; its type is {values.type}. Encode it as numbers, or "
            f"leave it out: --ignore {name}."
        )
    cells = values.to_pylist()
    with suppress(ValueError):
        if not any("_" in cell for cell in cells):
            return np.array(cells, dtype=np.float64)
    numbers = [_number_of(cell) for cell in cells]
    if None in numbers:
        wrong = numbers.index(None)
        remedy = f"Encode it as numbers, or leave the column out: --ignore {name}."
        if _number_of(cells[wrong].replace(",", ".")) is not None:
            remedy = "Write a decimal point in place of the comma."
        raise DataError(
            f"expected numbers in column {name!r} of {table.path}; found {cells[wrong][:40]!r} in line "
            f"{places[wrong]}. {remedy}"
        )
    return np.array(numbers, dtype=np.float64)


def _floats(values: Any) -> Array:
    numbers: Array = values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return numbers


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


@dataclass(frozen=True)
class Labels:
    """How the labels in a column are read.

    Attributes:
        column: its name, for messages.
        names: of the classes, in the order of the model's outputs; empty where labels are numbers.
    """

    column: str
    names: tuple[str, ...] = ()

    def codes(self, values: Any, places: Sequence[str]) -> npt.NDArray[Any]:
        """Return numbers `(N,)` in double precision, NaN where a label is missing; `places` says where each row is.

        Arrays of other shapes are returned unchanged: whoever uses them says what is wrong.
        """
        labels = _plain(values, self.column)
        if labels.dtype.kind != "U" and labels[:1].size != 1:
            return labels
        unique, at = np.unique(labels.reshape(len(labels)), return_inverse=True)
        classes = [self._code(label) for label in unique.tolist()]
        codes = np.array([math.nan if code is None else code for code in classes])
        wrong = np.isfinite(codes) & (codes != np.round(codes)) | np.array([code is None for code in classes])
        if wrong.any():
            first = int(np.argmax(wrong[at]))
            self._refuse(str(unique[at[first]]), places[first])
        return codes[at]

    def _code(self, label: str | float) -> float | None:
        """Return the number of a label's class, NaN where the label is missing, None where there is no such class."""
        if isinstance(label, str) and label.strip() in self._by_name:
            return self._by_name[label.strip()]
        number = _number_of(label) if isinstance(label, str) else float(label)
        if number is None or math.isnan(number) or not self._by_number:
            return number
        return self._by_number.get(number)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: code for code, name in enumerate(self.names)}

    @cached_property
    def _by_number(self) -> dict[float, int]:
        return {float(name): code for code, name in enumerate(self.names) if is_number(name)}

    def _refuse(self, label: str, place: str) -> NoReturn:
        where = f"found {label[:40]!r} at {place}"
        if self.names:
            raise DataError(
                f"expected labels among {listed(self.names, _SHOWN, quote=True)} in {self.column!r}; {where}. Leave "
                "such rows out, or name all classes in the order of the model's outputs: --class-names."
            )
        if _number_of(label) is None:
            raise DataError(
                f"expected numbers in {self.column!r}; {where}. Text needs the classes' names, in the order of the "
                "model's outputs: --class-names."
            )
        raise DataError(
            f"expected labels as whole numbers in {self.column!r}; {where}. Numbers that are no classes are "
            "--task regression."
        )


def distinct(column: str, parts: Iterable[Any]) -> tuple[str, ...] | bool:
    """Return the different texts of a column, sorted, if it holds text; of numbers, whether all are whole.

    The answer is also False for more than ten thousand values, and for arrays with several numbers in a row.
    """
    seen: set[str] = set()
    for values in parts:
        labels = _plain(values, column)
        if labels.dtype.kind != "U":
            if labels[:1].size != 1:
                return False
            labels = labels[np.isfinite(labels)] if labels.dtype.kind == "f" else labels
        seen |= {str(value).strip() for value in np.unique(labels)}
        if len(seen) > _MOST_CLASSES:
            return False
    numbers = [_number_of(value) for value in seen]
    if None in numbers:
        return tuple(sorted(seen - {""}))
    return all(math.isnan(number) or number.is_integer() for number in numbers if number is not None)


def _plain(values: Any, column: str) -> npt.NDArray[Any]:
    """Return an array of numbers, or of texts, which are empty where they are missing."""
    if isinstance(values, np.ndarray):
        return values
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if types.is_string(values.type) or types.is_large_string(values.type):
        return np.array([value or "" for value in values.to_pylist()], dtype=np.str_)
    if not _is_numeric(values.type):
        raise DataError(f"expected labels as text or numbers in {column!r}; its type is {values.type}. Convert it.")
    return _floats(values)


def _is_numeric(kind: Any) -> bool:
    """Return True if a type of pyarrow holds numbers, truth values or nothing."""
    tests = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null
    return any(test(kind) for test in tests)


def _number_of(cell: str) -> float | None:
    """Return the number in a cell, NaN for a missing value, or None for text.

    >>> _number_of(" 2.5"), _number_of("true"), _number_of("1_0")
    (2.5, 1.0, None)
    """
    plain = cell.strip().lower()
    if plain in _MISSING:
        return math.nan
    if plain in _TRUTHS:
        return _TRUTHS[plain]
    return float(cell) if is_number(cell) else None


def is_number(cell: str) -> bool:
    """Return True if a cell reads as a number; Python would take `1_0` for 10, in a file it is a name."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
