"""Check option objects: frozen dataclasses whose annotations give the allowed values of each field.

A flag is `bool`, a choice of texts `Literal`, a whole number `int` or `Annotated[int, AtLeast(1)]`, a function
`Callable`, a list of names `Sequence[str]`; each may also be a part of a union. A class checks its fields of other
types itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from latedrop.errors import ArgumentError

__all__ = ["AtLeast", "check_options", "shown"]


@dataclass(frozen=True)
class AtLeast:
    """Set the minimum of an integer field."""

    number: int


def check_options(options: Any, page: str = "") -> None:
    """Check the fields of a new object, or raise `ArgumentError`; convert numpy's booleans and integers to Python's.

    `page` names the documentation of the fields, if that is not the class.
    """
    owner: Any = type(options)
    for name, (kind, default) in _annotations(owner).items():
        value = getattr(options, name)
        if value is default:
            continue
        expected = _unmet(kind, value)
        if expected:
            page = page or f"latedrop.{owner.__name__}"
            raise ArgumentError(f"expected {name} to be {expected}; found {shown(value)}. See help({page}).")
        if isinstance(value, (np.bool_, np.integer)):
            object.__setattr__(options, name, value.item())


def shown(value: Any) -> str:
    """Format a value for a message, on one line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of thousands of digits, or an object of others
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def _annotations(kind: type) -> dict[str, tuple[Any, Any]]:
    """Return type and default of each field."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: (hints[field.name], field.default) for field in fields(kind) if field.init}


def _unmet(kind: Any, value: Any) -> str:
    """Return the description of the expected kind if a value is not of it; else an empty text."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        unmet = [_unmet(part, value) for part in args]
        return " or ".join(filter(None, (", ".join(unmet[:-1]), unmet[-1]))) if all(unmet) else ""
    if origin is Literal:
        return "" if isinstance(value, str) and value in args else f"one of {args}"
    if kind is bool:
        return "" if isinstance(value, (bool, np.bool_)) else "True or False"
    least = args[1].number if origin is Annotated and isinstance(args[1], AtLeast) else None
    if kind is int or least is not None:
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        words = "a whole number" if least is None else f"a whole number of at least {least}"
        return "" if whole and (least is None or value >= least) else words
    if origin is Callable:
        return "" if callable(value) else "a function"
    if origin is Sequence and args == (str,):
        texts = not isinstance(value, str) and isinstance(value, Collection) and all(isinstance(v, str) for v in value)
        return "" if texts else "a list of texts"
    if kind in (str, type(None)):
        return "" if isinstance(value, kind) else "a text" if kind is str else "None"
    return ""
