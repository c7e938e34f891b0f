"""Rows of csv and parquet files.

csv is read in blocks of lines, so that a row's line number is known and memory does not grow with the file. pyarrow
parses a block. One with quotes, or with a cell that is not plainly a number, goes through Python's csv module cell by
cell, which takes what pyarrow does not (`true`, ` NA `, `+5`, `inf`), or says which cell is wrong.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from pyarrow import compute

from latedrop.cli.tables.rows import STANDARD, Array, Block, Columns, Table, is_number, is_numeric, number_of
from latedrop.errors import ArgumentError, DataError, FileError

__all__ = ["open_csv", "open_parquet"]

_WORDS = ("na", "n/a", "nan", "null", "none")
_MISSING = ["", "NaN", *(case(word) for word in _WORDS for case in (str, str.upper, str.capitalize))]
_ENCODING: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape"}


def open_csv(path: str) -> Table:
    """Open a csv file, or csv on standard input: commas, semicolons or tabs, whichever the first line has most of."""
    with _opened(path) as file:  # standard input stays open
        standard = [_Lines(path, file)]
        names = standard[0].names()

    def read(columns: Columns, size: int) -> Iterator[Block]:
        if path == STANDARD:  # the rows follow in the stream that gave the names
            if not standard:
                raise ArgumentError(
                    "expected a file to read twice; standard input can be read once. Write it to a file."
                )
            yield from standard.pop().blocks(names, columns, size)
            return
        with _opened(path) as file:
            lines = _Lines(path, file)
            yield from lines.blocks(lines.names(), columns, size)

    return Table(path, tuple(names), arrays=False, count=None, unit="line", read=read)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open the text of a csv file, unpacked where its name ends in .gz; every line ends in LF."""
    if path == STANDARD:
        binary = getattr(sys.stdin, "buffer", None) or io.BytesIO(sys.stdin.read().encode())
        yield io.TextIOWrapper(binary, **_ENCODING)
        return
    with gzip.open(path, "rt", **_ENCODING) if path.lower().endswith(".gz") else open(path, **_ENCODING) as file:
        yield file


class _Lines:
    """The lines of a csv file, in blocks of whole rows."""

    def __init__(self, path: str, file: Any) -> None:
        self._path, self._file, self._read, self._between = path, file, 0, ","

    def names(self) -> list[str]:
        """Read the first line that is not blank: the names of the columns."""
        line = "\n"
        while line == "\n":
            line = next(iter(self._take(1)), "")
        if not line:
            raise DataError(f"expected a first line with column names in {self._path}; found nothing.")
        self._between = max(",;\t", key=lambda mark: len(next(csv.reader([line], delimiter=mark))))
        names = [cell.strip() for cell in next(self._rows([line]))[1]]
        if all(map(is_number, names)):
            raise DataError(
                f"expected a first line with column names in {self._path}; found only numbers. Put a line of names on "
                "top."
            )
        return names

    def blocks(self, names: Sequence[str], columns: Columns, size: int) -> Iterator[Block]:
        """Parse the lines after the names, `size` at a time."""
        at = {name: names.index(name) for name in columns.all}
        while lines := self._take(size):
            block = self._parsed(lines, len(names), columns, at) or self._by_cell(lines, len(names), columns, at)
            if len(block[0]):
                yield block

    def _take(self, count: int) -> list[str]:
        """Read lines; `FileError` for a damaged gzip, `DataError` for bytes that are no UTF-8."""
        try:
            lines = list(islice(self._file, count))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(f"expected gzip in {self._path}; it is damaged or something else: {error}.") from error
        if not all(map(str.isascii, lines)):
            for number, line in enumerate(lines, self._read + 1):
                try:
                    line.encode()
                except UnicodeEncodeError as error:
                    wrong = line[error.start :].encode("utf-8", "surrogateescape")[:4]
                    raise DataError(
                        f"expected {self._path} as UTF-8 text; found other bytes in line {number}, {wrong!r}. Save it "
                        "as UTF-8."
                    ) from error
        self._read += len(lines)
        return lines

    def _parsed(self, lines: list[str], width: int, columns: Columns, at: dict[str, int]) -> Block | None:
        """Let pyarrow parse lines; None if they are not plainly numbers, or text without quotes."""
        content = "".join(lines)
        if '"' in content:
            return None
        types = {str(at[name]): pyarrow.float64() for name in columns.numbers}
        types |= {str(at[name]): pyarrow.string() for name in columns.carried}  # also of what is both
        one_block = len(content) * 4 + 1
        try:
            table = pyarrow.csv.read_csv(
                pyarrow.BufferReader(content.encode()),
                # One thread: with OMP_NUM_THREADS=1, threads of pyarrow beside torch abort the process when it exits.
                pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=one_block, column_names=[str(i) for i in range(width)]
                ),
                pyarrow.csv.ParseOptions(delimiter=self._between),
                pyarrow.csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=_MISSING),
            )
            numbers = {name: _floats(table[str(at[name])]) for name in columns.numbers}
        except pyarrow.ArrowException:
            return None
        places: Sequence[int] = range(self._read - len(lines) + 1, self._read + 1)
        if "\n" in lines:
            places = [place for place, line in zip(places, lines, strict=True) if line != "\n"]
        # A number such as inf, which pyarrow takes in more ways than Python, goes through Python.
        if len(table) != len(places) or any(values is None for values in numbers.values()):
            return None
        return places, numbers, {name: table[str(at[name])].combine_chunks() for name in columns.carried}

    def _by_cell(self, lines: list[str], width: int, columns: Columns, at: dict[str, int]) -> Block:
        """Parse lines by Python's csv module, or say in which line what is wrong."""
        rows = list(self._rows(lines))
        for place, row in rows:
            if len(row) != width:
                raise DataError(
                    f"expected {width} cells in every line of {self._path}; found {len(row)} in line {place}."
                )
        places = [place for place, _ in rows]
        cells = {name: [row[at[name]] for _, row in rows] for name in columns.all}
        numbers = {name: _numbers(self._path, name, cells[name], places) for name in columns.numbers}
        return places, numbers, {name: pyarrow.array(cells[name], pyarrow.string()) for name in columns.carried}

    def _rows(self, lines: list[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows that begin in these lines, which may end in later ones, and the line where each begins."""
        first = self._read - len(lines) + 1

        def following() -> Iterator[str]:
            yield from lines
            while line := self._take(1):  # of a quote that is still open
                yield from line

        reader = csv.reader(following(), delimiter=self._between)
        while reader.line_num < len(lines):
            place = first + reader.line_num
            try:
                row = next(reader)
            except csv.Error as error:
                raise DataError(
                    f"expected csv in {self._path}; in line {place} found: {error}. Is a quote not closed?"
                ) from error
            if row:
                yield place, row


def _floats(column: Any) -> Any:
    """Return a column as floats, missing ones as NaN; None if there are other numbers that are not finite."""
    if not pyarrow.types.is_floating(column.type):
        missing = compute.is_in(column, value_set=pyarrow.array(_MISSING))
        column = compute.if_else(missing, None, column).cast(pyarrow.float64())
    values = column.to_numpy()
    return values if np.isfinite(values).sum() == len(column) - column.null_count else None


def _numbers(path: str, name: str, cells: Sequence[str], places: Sequence[int]) -> Array:
    with suppress(ValueError):
        if not any("_" in cell for cell in cells):
            return np.array(cells, dtype=np.float64)
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        number = number_of(cell)
        if number is None:
            raise DataError(
                f"expected numbers in column {name!r} of {path}; found {cell[:40]!r} in line {places[i]}. Encode it as "
                f"numbers, or leave the column out: --ignore {name}."
            )
        values[i] = number
    return values


def open_parquet(path: str) -> Table:
    """Open a parquet file; columns that are no numbers can only be carried along."""

    def read(columns: Columns, size: int) -> Iterator[Block]:
        for name in columns.numbers:
            kind = schema.field(name).type
            if not is_numeric(kind):
                raise DataError(
                    f"expected numbers in column {name!r} of {path}; its type is {kind}. Encode it as numbers, or "
                    f"leave it out: --ignore {name}."
                )
        first = 0
        with _explained(path), pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=size, columns=columns.all, use_threads=False):
                wide = {name: batch.column(name).cast("float64", safe=False) for name in columns.numbers}
                numbers = {name: values.to_numpy(zero_copy_only=False) for name, values in wide.items()}
                places = range(first, first + len(batch))
                yield places, numbers, {name: batch.column(name) for name in columns.carried}
                first += len(batch)

    with _explained(path), pyarrow.parquet.ParquetFile(path) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
    return Table(path, tuple(schema.names), arrays=False, count=count, unit="index", read=read)


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except pyarrow.ArrowException as error:
        raise FileError(f"expected a parquet file at {path}; it is damaged or another one: {error}") from error
