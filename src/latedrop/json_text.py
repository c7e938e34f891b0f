"""JSON that others may have touched: read with an error in our words where it is damaged, or is something else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from latedrop.errors import DataError, FileError, LatedropError

__all__ = ["parsed", "read_text", "understood"]


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
    try:
        return json.loads(content.removeprefix("\ufeff"), object_pairs_hook=_once, **options)
    except (ValueError, RecursionError) as error:
        problem = "lists inside lists without end" if isinstance(error, RecursionError) else str(error)
        problem = problem if content.strip() else "an empty file"
        raise DataError(
            f"expected the JSON of {what}; it is truncated or something else ({problem}). {remedy}"
        ) from error


@contextmanager
def understood(where: str | os.PathLike[str], what: str, remedy: str) -> Iterator[None]:
    """Raise `FileError` where plain data is used whose fields were not checked, and one is not as it should be."""
    try:
        yield
    except LatedropError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        named = f"field {error} is missing" if isinstance(error, KeyError) else f"a field is of another kind ({error})"
        raise FileError(f"expected {what} with all fields in {where}; {named}. {remedy}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        _refused(digits)
    return value
