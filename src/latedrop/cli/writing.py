"""Write rows to a csv, parquet or npz file, a few at a time.

`write_rows` gives a function that appends rows, passed as columns by name. The rows go to a temporary file that is
renamed at the end, so that an interrupted run leaves no half-written file. Standard output, `-`, gets csv at once.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
from pyarrow import compute

from latedrop.cli.tables import STANDARD
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.files import FORMULA, aside, check_apart, safe_cell

__all__ = ["ROW_FILES", "check_output", "check_outputs", "write_rows"]

ROW_FILES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".npz")

_Append: TypeAlias = "Callable[[Mapping[str, Any]], None]"
_GROUP = 16_384  # rows of a parquet row group; large groups are fast to read


def check_output(path: str, *suffixes: str) -> None:
    """Raise before the work starts if `path` cannot be written or has none of the allowed endings."""
    where = Path(path)
    if path == STANDARD:
        raise ArgumentError("expected a file to write; found -, but only rows can go to standard output. Pass a path.")
    if suffixes and not where.name.lower().endswith(suffixes):
        raise ArgumentError(f"expected an output that ends in {' or '.join(suffixes)}; found {path!r}. Rename it.")
    if where.is_dir():
        raise FileError(f"expected a file to write at {path}; found a folder. Pass another path.")
    if not where.absolute().parent.is_dir():
        raise FileError(f"expected the folder of {path}; it is not there. Make it, or pass another path.")


def check_outputs(
    outputs: Mapping[str, str | None], inputs: Mapping[str, str | None], endings: Sequence[str] = ()
) -> None:
    """Check before the work starts that every output can be written, and is not one of the inputs.

    Keys are names of options. `endings` are the allowed endings of --output.
    """
    for name, path in outputs.items():
        suffixes = endings if name == "--output" else (".html", ".htm")
        if path is not None and not (path == STANDARD and suffixes is ROW_FILES):
            check_output(path, *suffixes)
    written = {name: _file_of(path, sys.__stdout__) for name, path in outputs.items()}
    check_apart(written, {name: _file_of(path, sys.stdin) for name, path in inputs.items()})


def _file_of(path: str | None, standard: Any) -> Any:
    """Return a path, or the number of the stream that `-` means; None where that has none."""
    if path != STANDARD:
        return path
    try:
        return standard.fileno()
    except (AttributeError, OSError):
        return None


@contextmanager
def write_rows(path: str, standard: IO[str] | None = None) -> Iterator[_Append]:
    """Open a file in the format of its ending, and give a function that appends rows, always with the same columns.

    The path `-` means `standard`, by default standard output. A column is an array `(N, ...)`, a list of N strings, or
    a pyarrow array. csv and parquet take one value per row and column. In csv, NaN is an empty cell, and text that a
    spreadsheet would run as a formula gets a leading apostrophe.
    """
    if path == STANDARD:
        file = standard or sys.stdout
        yield _csv_writer(file)
        file.flush()
        return
    check_output(path, *ROW_FILES)
    with aside(path) as part, _writer(part, Path(path).name.lower()) as append:
        yield append


@contextmanager
def _writer(part: Path, name: str) -> Iterator[_Append]:
    """Open the temporary file `part` in the format of `name`."""
    with ExitStack() as stack:
        if name.endswith(".npz"):
            yield stack.enter_context(_npz_writer(part))
        elif name.endswith(".parquet"):
            yield stack.enter_context(_parquet_writer(part))
        else:
            raw: Any = stack.enter_context(part.open("wb"))
            if name.endswith(".gz"):  # no name and time in the header, so that equal rows give equal bytes
                raw = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
            file = stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
            yield _csv_writer(file, "\t" if ".tsv" in name[-7:] else ",")


def _csv_writer(file: IO[str], between: str = ",") -> _Append:
    """Return a function that appends rows as csv, with a header before the first ones."""
    begun = False

    def append(columns: Mapping[str, Any]) -> None:
        nonlocal begun
        _check_flat(columns)
        if not begun:
            file.write(_csv_text({name: [name] for name in columns}, between))
            begun = True
        file.write(_csv_text(columns, between))

    return append


def _csv_text(columns: Mapping[str, Any], between: str) -> str:
    """Format columns of N values as N lines of csv; missing values are empty."""
    cells = [_cells(values, between) for values in columns.values()]
    if len(cells) == 1:  # readers skip blank lines, so an empty single cell is quoted
        cells = [compute.if_else(compute.equal(cells[0], ""), '""', cells[0])]
    lines = compute.binary_join_element_wise(*cells, between)
    if not len(lines):
        return ""
    joined = compute.binary_join(pyarrow.ListArray.from_arrays([0, len(lines)], lines), "\n")
    return f"{joined[0]}\n"


def _cells(values: Any, between: str) -> Any:
    """Return values as text for csv: formulas get a leading apostrophe, special characters are quoted."""
    cells = values if isinstance(values, pyarrow.Array) else pyarrow.array(values, from_pandas=True)
    if pyarrow.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if pyarrow.types.is_large_string(cells.type):  # as pandas writes text
        cells = cells.cast(pyarrow.string())
    if pyarrow.types.is_boolean(cells.type):
        cells = compute.if_else(cells, "True", "False")
    if not (pyarrow.types.is_string(cells.type) or pyarrow.types.is_large_string(cells.type)):
        return compute.fill_null(cells.cast(pyarrow.string()), "")
    cells = compute.fill_null(cells, "")
    odd = compute.match_substring_regex(cells, f"^[{re.escape(FORMULA)}]")
    if compute.any(odd).as_py():
        safe = [safe_cell(text) for text in cells.filter(odd).to_pylist()]
        cells = compute.replace_with_mask(cells, odd, pyarrow.array(safe, cells.type))
    special = compute.match_substring_regex(cells, f'["\r\n{between}]')
    if compute.any(special).as_py():
        quoted = compute.binary_join_element_wise('"', compute.replace_substring(cells, '"', '""'), '"', "")
        cells = compute.if_else(special, quoted, cells)
    return cells


@contextmanager
def _parquet_writer(part: Path) -> Iterator[_Append]:
    """Give a function that appends rows to a parquet file, in row groups of `_GROUP` rows or more."""
    with ExitStack() as stack:
        writer: Any = None
        waiting: list[Any] = []

        def flush() -> None:
            nonlocal writer
            rows = pyarrow.concat_tables(waiting).combine_chunks()
            writer = writer or stack.enter_context(pyarrow.parquet.ParquetWriter(part, rows.schema))
            writer.write_table(rows)
            waiting.clear()

        def append(columns: Mapping[str, Any]) -> None:
            _check_flat(columns)
            waiting.append(pyarrow.table({name: pyarrow.array(value) for name, value in columns.items()}))
            if sum(map(len, waiting)) >= _GROUP:
                flush()

        yield append
        if waiting:
            flush()


@contextmanager
def _npz_writer(part: Path) -> Iterator[_Append]:
    """Give a function that appends rows to a npz file, which are held until the end: a npy head counts them."""
    parts: dict[str, list[npt.NDArray[Any]]] = {}

    def append(columns: Mapping[str, Any]) -> None:
        for name, values in columns.items():
            parts.setdefault(name, []).append(_array(name, values))

    yield append
    with part.open("wb") as file:
        whole: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        np.savez(file, **whole)


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    """Return a column as an array of numbers; raise `DataError` for text."""
    if isinstance(values, pyarrow.Array) and pyarrow.types.is_string(values.type):
        values = values.to_pylist()
    try:
        array = np.array(values, dtype=np.float64) if isinstance(values, list) else np.asarray(values)
    except ValueError:
        array = np.array(values)
    if array.dtype.kind not in "fiub":
        raise DataError(f"expected numbers to keep in a npz file; found text in {name!r}. Write csv or parquet.")
    return array


def _check_flat(columns: Mapping[str, Any]) -> None:
    """Raise `DataError` if a column has more than one value per row."""
    for name, values in columns.items():
        if getattr(values, "ndim", 1) > 1:
            raise DataError(
                f"expected one value per row in {name!r} for csv or parquet; found shape {values.shape}. Write npz."
            )
