"""Columns as the text of a csv file, by pyarrow: the same that `csv.writer` would write, several times faster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop.files import FORMULA, safe_cell

__all__ = ["csv_text"]

_PLAIN_FROM, _PLAIN_TO = 1e-4, 1e6  # numbers between are written without an exponent by numpy and by pyarrow
_QUOTED, _FORMULA = '["\r\n]', f"^[{re.escape(FORMULA)}]"


def csv_text(columns: Mapping[str, Any], between: str) -> str | None:
    """The lines of two columns or more, N values each; None where pyarrow is absent or something needs another look."""
    if len(columns) < 2 or find_spec("pyarrow") is None:
        return None
    import pyarrow
    from pyarrow import compute

    cells: list[Any] = []
    for values in columns.values():
        found = _numbers(values) if isinstance(values, np.ndarray) else _texts(values, between)
        if found is None:
            return None
        cells += [found, between]
    joined = compute.binary_join_element_wise(*cells[:-1], "\n", "")
    if isinstance(joined, pyarrow.ChunkedArray):
        joined = joined.combine_chunks()
    if joined.null_count:
        return None
    offsets = np.frombuffer(joined.buffers()[1], np.int32, len(joined) + 1, 4 * joined.offset)
    text: str = joined.buffers()[2].slice(offsets[0], offsets[-1] - offsets[0]).to_pybytes().decode()
    return text


def _numbers(values: npt.NDArray[Any]) -> Any:
    """As numpy writes them, NaN as nothing."""
    import pyarrow
    from pyarrow import compute

    if values.ndim != 1 or values.dtype.kind not in "fiu" or values.dtype.itemsize not in (4, 8):
        return None
    found = compute.cast(pyarrow.array(np.ascontiguousarray(values)), pyarrow.string())
    if values.dtype.kind != "f":
        return found
    size = np.abs(values)
    other = ~((size > _PLAIN_FROM) & (size < _PLAIN_TO)) | (values == np.rint(values))
    if other.any():
        written = ["" if cell == "nan" else cell for cell in values[other].astype(str).tolist()]
        found = compute.replace_with_mask(found, pyarrow.array(other), pyarrow.array(written, pyarrow.string()))
    return found


def _texts(values: Any, between: str) -> Any:
    """Texts that need no quotes; those that a spreadsheet would run get their apostrophe."""
    import pyarrow
    from pyarrow import compute

    if isinstance(values, list):
        if not all(type(value) is str for value in values):
            return None
        values = pyarrow.array(values, pyarrow.string())
    if values.type != pyarrow.string() or values.null_count:
        return None
    if compute.any(compute.match_substring_regex(values, _QUOTED)).as_py():
        return None
    if compute.any(compute.match_substring(values, between)).as_py():
        return None
    odd = compute.match_substring_regex(values, _FORMULA)
    if compute.any(odd).as_py():
        safe = [safe_cell(text) for text in values.filter(odd).to_pylist()]
        values = compute.replace_with_mask(values, odd, pyarrow.array(safe, pyarrow.string()))
    return values
