"""Labels of classes in a column, as text or numbers, and the whole numbers from 0 that they stand for.

With names, a label is the name of its class. Where no name is a number a label may also be the class's number. Without
names it is a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError
from latedrop.terminal import listed

__all__ = ["Labels", "check_count", "distinct", "is_number", "number_of"]

_Values: TypeAlias = "npt.NDArray[Any] | list[str]"
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

    def codes(self, values: Any, place: Callable[[int], str]) -> npt.NDArray[Any]:
        """Numbers `(N,)` in double precision, NaN where a label is missing; `place` says where a row is.

        Arrays of other shapes come back as they are: whoever uses them says what is wrong.
        """
        found = _plain(values, self.column)
        if isinstance(found, np.ndarray):
            if found.dtype.kind != "U" and found[:1].size != 1:
                return found
            found = found.reshape(len(found))
        numbers = self._by_name(found, place) if self.names else self._numbers(found, place)
        if self.sure:
            wrong = np.flatnonzero(np.isfinite(numbers) & (numbers != np.round(numbers)))
            if len(wrong):
                self._refuse(str(found[wrong[0]]), place(int(wrong[0])))
        return numbers

    def _numbers(self, values: _Values, place: Callable[[int], str]) -> npt.NDArray[np.float64]:
        if isinstance(values, np.ndarray) and values.dtype.kind != "U":
            return values.astype(np.float64)
        numbers = np.empty(len(values))
        for i, cell in enumerate(values):
            number = number_of(cell)
            if number is None:
                self._refuse(str(cell), place(i))
            numbers[i] = number
        return numbers

    def _by_name(self, values: _Values, place: Callable[[int], str]) -> npt.NDArray[np.float64]:
        known: dict[Any, int] = {name: code for code, name in enumerate(self.names)}
        known |= {float(name): code for name, code in list(known.items()) if is_number(name)}
        numbered = len(known) == len(self.names)  # no name is a number: a number is the class's own
        codes = np.empty(len(values))
        for i, value in enumerate(values):
            if isinstance(value, str):
                value = value.strip()
                if value in known:
                    codes[i] = known[value]
                    continue
                number = number_of(value)
            else:
                number = float(value)
            if number is None or (number == number and not numbered and number not in known):
                self._refuse(str(value), place(i))
            codes[i] = number if numbered or number != number else known[number]
        return codes

    def _refuse(self, label: str, where: str) -> NoReturn:
        if self.names:
            raise DataError(
                f"expected labels among {listed(self.names, _SHOWN, quote=True)} in {self.column!r}; found "
                f"{label[:40]!r} at {where}. Leave such rows out, or name all classes in the order of the "
                "model's outputs: --class-names."
            )
        if number_of(label) is None:
            raise DataError(
                f"expected numbers in {self.column!r}; found {label[:40]!r} at {where}. Text needs the classes' names, "
                "in the order of the model's outputs: --class-names."
            )
        raise DataError(
            f"expected labels as whole numbers in {self.column!r}; found {label[:40]!r} at {where}. Numbers that are "
            "no classes are --task regression."
        )


def _plain(values: Any, column: str) -> _Values:
    """As an array, or a list of texts, none of them None."""
    if isinstance(values, np.ndarray | list):
        return values
    from pyarrow import types  # what else readers give

    kind = values.type.value_type if types.is_dictionary(values.type) else values.type
    if types.is_string(kind) or types.is_large_string(kind):
        return [value or "" for value in values.to_pylist()]
    tests = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null
    if not any(test(kind) for test in tests):
        raise DataError(f"expected labels as text or numbers in {column!r}; its type is {kind}. Convert it.")
    found: npt.NDArray[Any] = values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return found


def distinct(column: str, parts: Iterable[Any]) -> tuple[str, ...] | bool:
    """The different texts of a column, sorted, where it holds text; of numbers, whether all are whole.

    False, too, of more than ten thousand values, and of arrays with several numbers in a row.
    """
    seen: set[str] = set()
    for values in parts:
        found = _plain(values, column)
        if isinstance(found, np.ndarray) and found.dtype.kind != "U":
            if found[:1].size != 1:
                return False
            found = np.unique(found[np.isfinite(found)] if found.dtype.kind == "f" else found)
        seen |= {str(value).strip() for value in found}
        if len(seen) > _MOST:
            return False
    numbers = [number_of(value) for value in seen]
    if any(number is None for number in numbers):
        return tuple(sorted(seen - {""}))
    return all(number != number or float(number).is_integer() for number in numbers if number is not None)


def check_count(names: Sequence[str], classes: int, column: str, path: str) -> None:
    """`DataError` where the texts of a column are not as many as the model's classes."""
    if len(names) != classes:
        raise DataError(
            f"expected labels of {classes} classes in {column!r} of {path}, as the model has that many; found "
            f"{len(names)}: {listed(names, _SHOWN, quote=True)}. Name all classes in the order of the model's outputs: "
            "--class-names."
        )


def number_of(cell: str) -> float | None:
    """The number that a cell holds, NaN where it is missing; None of a text.

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
    """Whether it reads as a number; Python would take `1_0` for 10, in a file it is a name."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
