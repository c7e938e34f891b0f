"""What a cell of text says: a number, true or false, nothing, or a text."""

from __future__ import annotations

import math

__all__ = ["is_number", "number_of"]

_TRUTHS = {"true": 1.0, "false": 0.0}
_MISSING = {"", "na", "n/a", "nan", "null", "none"}


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
