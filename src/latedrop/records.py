"""JSON that others may have touched: a checksum over it, and a check of every field, with its name in the message.

A checksum tells that a file was edited by mistake; whoever edits on purpose makes it fit. So every field is checked on
its own: `Fields(record, "calibration").take("scales", numbers, least=0.0)`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import inf, isfinite
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from latedrop.errors import DataError, FileError, LatedropError

__all__ = [
    "Fields",
    "checksum_of",
    "each",
    "flag",
    "mapping",
    "number",
    "numbers",
    "or_none",
    "parsed",
    "read_text",
    "sealed",
    "text",
    "tuples_in",
    "understood",
    "unsealed",
    "whole",
    "wholes",
    "wrong",
]

_T = TypeVar("_T")
Check = Callable[..., _T]
"""From a value, the name of its field and options to the value; `DataError` where it is not as it should be."""


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """The text of a file; `FileError` where it cannot be read, or is no text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FileError(f"expected {what} at {path}; the system says: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise FileError(f"expected {what} at {path}; found a file that is not UTF-8 text.") from error


def parsed(content: str, what: str, remedy: str, *, finite: bool = False) -> Any:
    """The value of JSON; `DataError` where it is none, nested too deeply, or has a key twice; with `finite`, or NaN."""
    options: dict[str, Any] = {"parse_constant": _refused, "parse_float": _finite} if finite else {}
    options |= {"object_pairs_hook": _once}
    try:
        return json.loads(content.removeprefix("\ufeff"), **options)
    except (ValueError, RecursionError) as error:
        found = "lists inside lists without end" if isinstance(error, RecursionError) else str(error)
        found = "an empty file" if not content.strip() else found
        raise DataError(
            f"expected the JSON of {what}; it is truncated or something else ({found}). {remedy}"
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def sealed(name: str, record: Mapping[str, Any]) -> str:
    """Readable JSON of a record under its name, with a checksum over its content."""
    return json.dumps({name: record, "checksum": checksum_of(record)}, indent=1)


def unsealed(document: Any, name: str, what: str, schema: int, remedy: str, edited: str) -> dict[str, Any]:
    """The record that `sealed` put under `name`, of a format that it names; `DataError` where it is none, or edited."""
    record = document.get(name) if isinstance(document, dict) else None
    if not isinstance(record, dict):
        raise DataError(f"expected the JSON of {what}; found something else, without {name!r}. {remedy}")
    if record.get("format") != schema:
        raise DataError(f"expected {what}, format {schema}; found another. {remedy}")
    if checksum_of(record) != document.get("checksum"):
        raise DataError(
            "expected the content that was saved; the checksum does not match: the file was edited or damaged. "
            f"{edited}"
        )
    return {key: value for key, value in record.items() if key != "format"}


def checksum_of(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record's JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def tuples_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as it was before JSON made lists of its tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


@contextmanager
def understood(where: str | os.PathLike[str], what: str, remedy: str) -> Iterator[None]:
    """While a record is used whose fields are not checked one by one: `FileError` where one is not as it should be."""
    try:
        yield
    except LatedropError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        named = f"field {error} is missing" if isinstance(error, KeyError) else f"a field is of another kind ({error})"
        raise FileError(f"expected {what} with all fields in {where}; {named}. {remedy}") from error


class Fields:
    """A JSON object whose fields are taken one by one, each with a check.

    >>> row = Fields({"rate": 0.1, "draws": 5}, "row")
    >>> row.take("rate", number, least=0, most=1), row.take("draws", whole, least=2)
    (0.1, 5)
    >>> row.end()
    """

    def __init__(self, value: Any, name: str) -> None:
        if not isinstance(value, dict):
            wrong(name, "an object", value)
        self._left, self._name = dict(value), name

    def take(self, name: str, check: Check[_T], **options: Any) -> _T:
        """The checked value of a field, which must be there."""
        place = f"{self._name}.{name}"
        if name not in self._left:
            raise DataError(f"expected a field {place}; it is missing. The file was edited or damaged: make it again.")
        return check(self._left.pop(name), place, **options)

    def maybe(self, name: str, usual: _T, check: Check[_T], **options: Any) -> _T:
        """The checked value of a field, or the usual one where it is not there."""
        return self.take(name, check, **options) if name in self._left else usual

    def end(self) -> None:
        """Raise where fields are left that nobody took."""
        if self._left:
            names = ", ".join(repr(name)[:40] for name in list(self._left)[:3])
            raise DataError(f"expected no other fields in {self._name}; found {names}. Make the file again.")


def number(value: Any, name: str, *, least: float = -inf, most: float = inf) -> float:
    """A number between two ends, both included; never NaN."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000):
        found = float(value)
        if least <= found <= most:
            return found
    wrong(name, f"a number from {least:g} to {most:g}", value)


def whole(value: Any, name: str, *, least: float = -inf, most: float = inf) -> int:
    """A whole number between two ends, both included."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    wrong(name, f"a whole number from {least:g} to {most:g}", value)


def text(value: Any, name: str, *, among: Collection[str] | None = None) -> str:
    """A text, one of a few where these are given."""
    if isinstance(value, str) and (among is None or value in among):
        return value
    wrong(name, "a text" if among is None else f"one of {', '.join(among)}", value)


def flag(value: Any, name: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        wrong(name, "true or false", value)
    return value


def each(check: Check[_T]) -> Check[tuple[_T, ...]]:
    """For lists: every entry is checked; of one length where it is given, else not empty."""

    def checked(value: Any, name: str, *, length: int | None = None, **options: Any) -> tuple[_T, ...]:
        if not isinstance(value, list) or (len(value) != length if length is not None else not value):
            wrong(name, "a list that is not empty" if length is None else f"a list of {length}", value)
        return tuple(check(item, f"{name}[{i}]", **options) for i, item in enumerate(value))

    return checked


def mapping(check: Check[_T]) -> Check[dict[str, _T]]:
    """For objects: every value is checked."""

    def checked(value: Any, name: str, **options: Any) -> dict[str, _T]:
        if not isinstance(value, dict):
            wrong(name, "an object", value)
        return {key: check(item, f"{name}.{key}"[:80], **options) for key, item in value.items()}

    return checked


def or_none(check: Check[_T]) -> Check[_T | None]:
    """For what may be None."""
    return lambda value, name, **options: None if value is None else check(value, name, **options)


numbers, wholes = each(number), each(whole)


def wrong(name: str, expected: str, found: Any) -> NoReturn:
    """Raise for a field."""
    shown = repr(found)
    shown = f"{shown[:60]}..." if len(shown) > 60 else shown
    raise DataError(
        f"expected {name} to be {expected}; found {shown}. The file was edited or damaged, or a newer version made it: "
        "make it again."
    )


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        _refused(digits)
    return value
