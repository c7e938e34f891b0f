"""Rows out to a file, a few at a time: csv, parquet or npz.

`write_rows` gives a function that takes some rows after another, as columns by name. The file is written aside and
renamed at the end: nobody finds half of it, whatever comes in between. Standard output, `-`, takes csv as it comes.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
from pyarrow import compute

from latedrop import files
from latedrop.cli.tables import STANDARD
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.files import FORMULA, aside, safe_cell

__all__ = ["ROW_FILES", "check_apart", "check_output", "check_outputs", "write_rows"]

ROW_FILES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".npz")

_Append: TypeAlias = "Callable[[Mapping[str, Any]], None]"
_GROUP = 16_384  # rows of a parquet row group: few and large ones are quick to read


def check_output(path: str, *suffixes: str) -> None:
    """Raise where `path` cannot be written, or does not end as it should: before the work, so that none is lost."""
    where = Path(path)
    if path == STANDARD:
        raise ArgumentError("expected a file to write; found -, and only rows can go to standard output.")
    if suffixes and not where.name.lower().endswith(suffixes):
        raise ArgumentError(f"expected an output that ends in {' or '.join(suffixes)}; found {path!r}.")
    if where.is_dir():
        raise FileError(f"expected a file to write at {path}; found a folder. Pass another path.")
    if not where.absolute().parent.is_dir():
        raise FileError(f"expected the folder of {path}; it is not there. Make it, or pass another path.")


def check_outputs(
    outputs: Mapping[str, str | None], inputs: Mapping[str, str | None], endings: Sequence[str] | None = ()
) -> None:
    """Check, before the work, that all that is asked for can be written, and is none of the files that are read.

    Both are by the names of their options; `endings` are those of --output, None where it is a folder or checked later.
    """
    endings_of = {"--output": endings, "--report": (".html", ".htm"), "--detector": (".json",)}
    for name, path in outputs.items():
        suffixes = endings_of[name]
        if path is not None and suffixes is not None and not (path == STANDARD and suffixes is ROW_FILES):
            check_output(path, *suffixes)
    check_apart(outputs, inputs)


def check_apart(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]) -> None:
    """Raise where an output of a command, by the name of its option, is one of its inputs, or another output.

    An input may be `package.module:name`, which is a file if the current folder has one of that name.
    """
    standard = {STANDARD: sys.__stdout__}
    read: dict[str, Any] = {name: sys.stdin if path == STANDARD else path for name, path in inputs.items()}
    for name, path in inputs.items():
        if path is not None and ":" in path and not Path(path).exists():
            read[name] = Path(*path.partition(":")[0].split(".")).with_suffix(".py")
    files.check_apart({name: standard.get(path or "", path) for name, path in outputs.items()}, read)
    for name, output in outputs.items():
        for other, folder in inputs.items():
            if output and folder and Path(folder).is_dir() and Path(folder).resolve() in Path(output).resolve().parents:
                raise ArgumentError(
                    f"expected {name} outside of the folder of {other}, {folder}; found {output}, which would be read "
                    f"as data the next time. Pass another {name}."
                )


@contextmanager
def write_rows(path: str, standard: IO[str] | None = None) -> Iterator[_Append]:
    """Open a file for rows, by its ending; every call of the function adds some, all with the same columns.

    The path `-` is `standard`, by default standard output. A column is an array `(N, ...)`, a list of N texts, or one
    of pyarrow's. csv and parquet take one value per row and column; csv leaves NaN empty, and texts that a spreadsheet
    would run get an apostrophe in front.
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
    with ExitStack() as stack:
        if name.endswith(".npz"):
            yield stack.enter_context(_npz_writer(part))
        elif name.endswith(".parquet"):
            yield stack.enter_context(_parquet_writer(part))
        else:
            raw: Any = stack.enter_context(part.open("wb"))
            if name.endswith(".gz"):  # without name and time in its head: the same rows give the same bytes
                raw = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
            file = stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
            yield _csv_writer(file, "\t" if ".tsv" in name[-7:] else ",")


def _csv_writer(file: IO[str], between: str = ",") -> _Append:
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
    """Write columns of N values each as lines of csv; what is missing is empty."""
    cells = [_cells(values, between) for values in columns.values()]
    if len(cells) == 1:  # a blank line would be no row
        cells = [compute.if_else(compute.equal(cells[0], ""), '""', cells[0])]
    lines = compute.binary_join_element_wise(*cells, between)
    if not len(lines):
        return ""
    joined = compute.binary_join(pyarrow.ListArray.from_arrays([0, len(lines)], lines), "\n")
    return f"{joined[0]}\n"


def _cells(values: Any, between: str) -> Any:
    """Return values as text; texts that a spreadsheet would run get an apostrophe, and quotes where they need them."""
    cells = values if isinstance(values, pyarrow.Array) else pyarrow.array(values, from_pandas=True)
    if pyarrow.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
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
    with ExitStack() as stack:
        writer: Any = None
        schema: Any = None
        waiting: list[Any] = []

        def flush() -> None:
            nonlocal writer
            if waiting:
                writer = writer or stack.enter_context(pyarrow.parquet.ParquetWriter(part, schema))
                writer.write_table(pyarrow.Table.from_batches(waiting).combine_chunks())
                waiting.clear()

        def append(columns: Mapping[str, Any]) -> None:
            nonlocal schema
            _check_flat(columns)
            batch = pyarrow.record_batch({name: pyarrow.array(value) for name, value in columns.items()})
            schema = schema or batch.schema
            waiting.append(batch if batch.schema == schema else _as_before(batch, schema))
            if sum(map(len, waiting)) >= _GROUP:
                flush()

        yield append
        flush()


def _as_before(batch: Any, schema: Any) -> Any:
    """A batch in the types of the first one: files of one folder may differ in them."""
    columns = []
    for name, values in zip(schema.names, batch.columns, strict=True):
        try:
            columns.append(values.cast(schema.field(name).type))
        except pyarrow.ArrowException as error:
            raise DataError(
                f"expected values of one kind in {name!r}; found {schema.field(name).type} and {values.type}. Write "
                "csv."
            ) from error
    return pyarrow.record_batch(columns, schema=schema)


@contextmanager
def _npz_writer(part: Path) -> Iterator[_Append]:
    """A npy file says first how many rows it has: each array goes to a file without a name until that is known."""
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        rows = 0

        def append(columns: Mapping[str, Any]) -> None:
            nonlocal rows
            for name, values in columns.items():
                array = _array(name, values)
                if name not in files:
                    files[name] = stack.enter_context(TemporaryFile(dir=part.parent))
                    shapes[name] = array.dtype, array.shape[1:]
                if (array.dtype, array.shape[1:]) != shapes[name]:
                    raise DataError(
                        f"expected values of one kind in {name!r}; found {shapes[name][0]} and {array.dtype}. Write "
                        "csv or parquet."
                    )
                files[name].write(array.tobytes())
            rows += len(array)

        yield append
        with zipfile.ZipFile(part, "w") as archive:
            for name, file in files.items():
                dtype, shape = shapes[name]
                header = {"descr": dtype.str, "fortran_order": False, "shape": (rows, *shape)}
                file.seek(0)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, header)
                    shutil.copyfileobj(file, member)


def _array(name: str, values: Any) -> npt.NDArray[Any]:
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
    for name, values in columns.items():
        if getattr(values, "ndim", 1) > 1:
            raise DataError(
                f"expected one value per row in {name!r} for csv or parquet; found shape {values.shape}. Write npz."
            )
