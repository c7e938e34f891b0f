"""Labels of classes in a column, as text or numbers, and the whole numbers from 0 that they stand for.

With names, a label is the name of its class. Where no name is a number a label may also be the class's number. Without
names it is a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError
from latedrop.terminal import listed

__all__ = ["Labels", "distinct", "is_number", "is_numeric", "number_of"]

_MOST = 10_000
_SHOWN = 12
_TRUTHS = {"true": 1.0, "false": 0.0}
_MISSING = {"", "na", "n/a", "nan", "null", "none"}


@dataclass(frozen=True)
class Labels:
    """How the values of a column are read.

    Attributes:
        column: its name, for messages.
        names: of the classes, in the order of the model's outputs; empty where labels are numbers.
        sure: whether it is known that they are classes; else any numbers may do.
    """

    column: str
    names: tuple[str, ...] = ()
    sure: bool = False

    def codes(self, values: Any, places: Sequence[str]) -> npt.NDArray[Any]:
        """Return numbers `(N,)` in double precision, NaN where a label is missing; `places` says where each row is.

        Arrays of other shapes come back as they are: whoever uses them says what is wrong.
        """
        labels = _plain(values, self.column)
        if labels.dtype.kind != "U" and labels[:1].size != 1:
            return labels
        labels = labels.reshape(len(labels))
        if self.names or labels.dtype.kind == "U":
            classes = [self._code(label) for label in labels.tolist()]
            if None in classes:
                self._refuse(labels, classes.index(None), places)
            codes = np.array(classes, np.float64)
        else:
            codes = labels.astype(np.float64)
        broken = np.flatnonzero(np.isfinite(codes) & (codes != np.round(codes)))
        if self.sure and len(broken):
            self._refuse(labels, int(broken[0]), places)
        return codes

    def _code(self, label: str | float) -> float | None:
        """Return the number of a label's class, NaN where the label is missing, None where there is no such class."""
        number: float | None
        if isinstance(label, str):
            if label.strip() in self._by_name:
                return self._by_name[label.strip()]
            number = number_of(label)
        else:
            number = float(label)
        if number is None or math.isnan(number) or not self._by_number:
            return number
        return self._by_number.get(number)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: code for code, name in enumerate(self.names)}

    @cached_property
    def _by_number(self) -> dict[float, int]:
        return {float(name): code for code, name in enumerate(self.names) if is_number(name)}

    def _refuse(self, labels: npt.NDArray[Any], index: int, places: Sequence[str]) -> NoReturn:
        label = str(labels[index])
        where = f"found {label[:40]!r} at {places[index]}"
        if self.names:
            raise DataError(
                f"expected labels among {listed(self.names, _SHOWN, quote=True)} in {self.column!r}; {where}. Leave "
                "such rows out, or name all classes in the order of the model's outputs: --class-names."
            )
        if number_of(label) is None:
            raise DataError(
                f"expected numbers in {self.column!r}; {where}. Text needs the classes' names, in the order of the "
                "model's outputs: --class-names."
            )
        raise DataError(
            f"expected labels as whole numbers in {self.column!r}; {where}. Numbers that are no classes are "
            "--task regression."
        )


def _plain(values: Any, column: str) -> npt.NDArray[Any]:
    """Return an array of numbers, or of texts, which are empty where they are missing."""
    if isinstance(values, np.ndarray):
        return values
    from pyarrow import types  # what else readers give

    kind = values.type.value_type if types.is_dictionary(values.type) else values.type
    if types.is_string(kind) or types.is_large_string(kind):
        return np.array([value or "" for value in values.to_pylist()], dtype=np.str_)
    if not is_numeric(kind):
        raise DataError(f"expected labels as text or numbers in {column!r}; its type is {kind}. Convert it.")
    numbers: npt.NDArray[Any] = values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return numbers


def is_numeric(kind: Any) -> bool:
    """Return True if a type of pyarrow holds numbers, truth values or nothing."""
    from pyarrow import types

    tests = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null
    return any(test(kind) for test in tests)


def distinct(column: str, parts: Iterable[Any]) -> tuple[str, ...] | bool:
    """Return the different texts of a column, sorted, where it holds text; of numbers, whether all are whole.

    False, too, of more than ten thousand values, and of arrays with several numbers in a row.
    """
    seen: set[str] = set()
    for values in parts:
        labels = _plain(values, column)
        if labels.dtype.kind != "U":
            if labels[:1].size != 1:
                return False
            labels = labels[np.isfinite(labels)] if labels.dtype.kind == "f" else labels
        seen |= {str(value).strip() for value in np.unique(labels)}
        if len(seen) > _MOST:
            return False
    numbers = [number_of(value) for value in seen]
    if None in numbers:
        return tuple(sorted(seen - {""}))
    return all(math.isnan(number) or number.is_integer() for number in numbers if number is not None)


def number_of(cell: str) -> float | None:
    """Return the number that a cell holds, NaN where it is missing; None of a text.

    >>> number_of(" 2.5"), number_of("true"), number_of("1_0")
    (2.5, 1.0, None)
    """
    plain = cell.strip().lower()
    if plain in _MISSING:
        return math.nan
    if plain in _TRUTHS:
        return _TRUTHS[plain]
    return float(cell) if is_number(cell) else None


def is_number(cell: str) -> bool:
    """Return True where a cell reads as a number; Python would take `1_0` for 10, in a file it is a name."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
