"""Names of columns: in data frames that come in, and in those that go out.

A calibration remembers the names of its input and target columns. Inputs whose columns stand in another order are put
into the one that the model was calibrated with; columns that are missing, or too many, are refused.
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
"""The names of columns: `inputs` and `targets`, as far as these are known."""

_SHOWN = 6


def names_of(data: Any) -> dict[str, tuple[str, ...]] | None:
    """Return the column names of a pair `(x, y)`; None where neither has any. Names that stand twice tell nothing.

    >>> import pandas
    >>> names_of((pandas.DataFrame({"a": [1.0], "b": [2.0]}), pandas.Series([3.0], name="price")))
    {'inputs': ('a', 'b'), 'targets': ('price',)}
    """
    if not is_pair(data):
        return None
    named = {key: _columns(part) for key, part in zip(("inputs", "targets"), data, strict=True)}
    return {key: names for key, names in named.items() if names and len(set(names)) == len(names)} or None


def in_order(x: Any, names: Names | None, key: str = "inputs") -> Any:
    """Return a data frame with its columns in the order of `names`; anything else as it is.

    Raises `DataError` where columns are missing or too many.

    >>> import pandas
    >>> list(in_order(pandas.DataFrame({"b": [2.0], "a": [1.0]}), {"inputs": ("a", "b")}).columns)
    ['a', 'b']
    """
    known, there = list((names or {}).get(key, ())), list(_columns(x) if hasattr(x, "columns") else ())
    if not known or not there or there == known:
        return x
    missing, more = [name for name in known if name not in there], [name for name in there if name not in known]
    if missing or more or len(there) != len(known):
        wrong = [f"without {listed(map(repr, missing), _SHOWN)}"] if missing else []
        wrong += [f"with {listed(map(repr, more), _SHOWN)} besides"] if more else []
        raise DataError(
            f"expected the {key} in the columns that the calibration was made with, "
            f"{listed(map(repr, known), _SHOWN)}; found a table {' and '.join(wrong) or 'with columns twice'}. Select "
            "these columns; their order does not matter."
        )
    return x[known]


def pair_in_order(data: Any, names: Names | None) -> Any:
    """Return a pair `(x, y)` with the columns of both in order; anything else as it is."""
    if names is None or not is_pair(data):
        return data
    return in_order(data[0], names), in_order(data[1], names, "targets")


def index_of(x: Any) -> Any:
    """Return the index of a data frame of pandas, None for anything else."""
    return getattr(x, "index", None) if is_table(x) and hasattr(x, "iloc") else None


def _columns(table: Any) -> tuple[str, ...]:
    """Return the names of a table's columns, or of a series; none where they are no texts."""
    if not is_table(table):
        return ()
    names = tuple(table.columns) if hasattr(table, "columns") else (getattr(table, "name", None),)
    return names if all(isinstance(name, str) and name for name in names) else ()
