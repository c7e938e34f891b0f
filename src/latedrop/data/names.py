"""Read and check the column names of data frames.

A calibration stores the names of its input and target columns. Later inputs are reordered to this order; missing or
additional columns are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latedrop.data.arrays import is_table
from latedrop.data.batches import is_pair
from latedrop.errors import DataError
from latedrop.terminal import listed

__all__ = ["Names", "in_order", "index_of", "names_of", "pair_in_order"]

Names = Mapping[str, Sequence[str]]
"""Column names under the keys `inputs` and `targets`; a key is missing if its names are unknown."""

_SHOWN = 6


def names_of(data: Any) -> dict[str, tuple[str, ...]] | None:
    """Return the column names of a pair `(x, y)`; None if neither has any. Names with duplicates are ignored.

    >>> import pandas
    >>> names_of((pandas.DataFrame({"a": [1.0], "b": [2.0]}), pandas.Series([3.0], name="price")))
    {'inputs': ('a', 'b'), 'targets': ('price',)}
    """
    if not is_pair(data):
        return None
    named = {key: _columns(part) for key, part in zip(("inputs", "targets"), data, strict=True)}
    return {key: names for key, names in named.items() if names and len(set(names)) == len(names)} or None


def in_order(x: Any, names: Names | None, key: str = "inputs") -> Any:
    """Return a data frame with its columns in the order of `names`; return any other `x` unchanged.

    Raise `DataError` if columns are missing, or if there are others.

    >>> import pandas
    >>> list(in_order(pandas.DataFrame({"b": [2.0], "a": [1.0]}), {"inputs": ("a", "b")}).columns)
    ['a', 'b']
    """
    known, given = list((names or {}).get(key, ())), list(_columns(x) if hasattr(x, "columns") else ())
    if not known or not given or given == known:
        return x
    missing, more = [name for name in known if name not in given], [name for name in given if name not in known]
    if missing or more or len(given) != len(known):
        wrong = [f"without {listed(map(repr, missing), _SHOWN)}"] if missing else []
        wrong += [f"with {listed(map(repr, more), _SHOWN)} besides"] if more else []
        raise DataError(
            f"expected the {key} in the columns that the calibration was made with, "
            f"{listed(map(repr, known), _SHOWN)}; found a table {' and '.join(wrong) or 'with columns twice'}. Select "
            "these columns; their order does not matter."
        )
    return x[known]


def pair_in_order(data: Any, names: Names | None) -> Any:
    """Return a pair `(x, y)` with the columns of both in order; return any other data unchanged."""
    if names is None or not is_pair(data):
        return data
    return in_order(data[0], names), in_order(data[1], names, "targets")


def index_of(x: Any) -> Any:
    """Return the index of a pandas data frame; None for any other object."""
    return getattr(x, "index", None) if is_table(x) and hasattr(x, "iloc") else None


def _columns(table: Any) -> tuple[str, ...]:
    """Return the column names of a table or the name of a series; empty if one is not a non-empty string."""
    if not is_table(table):
        return ()
    names = tuple(table.columns) if hasattr(table, "columns") else (getattr(table, "name", None),)
    return names if all(isinstance(name, str) and name for name in names) else ()
