"""Rows of csv and parquet files.

csv is read in blocks of lines, so that a row's line number is known and memory does not grow with the file. pyarrow
parses a block; one with quotes goes through Python's csv module. Where numbers are not plain (`true`, ` NA `, `+5`,
`inf`), all cells of a block are text.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
from pyarrow import compute

from latedrop.cli.tables.rows import STANDARD, Block, Columns, Table, is_number
from latedrop.errors import ArgumentError, DataError, FileError

__all__ = ["open_csv", "open_parquet"]

_CASES = str, str.upper, str.capitalize
_MISSING = ["", "NaN", *(case(word) for word in ("na", "n/a", "nan", "null", "none") for case in _CASES)]
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
        numbers, width = set(columns.numbers).difference(columns.kept), len(names)
        while lines := self._take(size):
            block = self._parsed(lines, width, at, numbers) or self._parsed(lines, width, at, set())
            places, cells = block or self._by_row(lines, width, at)
            if len(places):
                yield places, cells

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

    def _parsed(self, lines: list[str], width: int, at: dict[str, int], numbers: set[str]) -> Block | None:
        """Let pyarrow parse lines, `numbers` as such; None if there are quotes, or a number that is not plain."""
        content = "".join(lines)
        if '"' in content:
            return None
        kinds = {str(i): pyarrow.float64() if name in numbers else pyarrow.string() for name, i in at.items()}
        one_block, numbered = len(content) * 4 + 1, [str(i) for i in range(width)]
        try:
            table = pyarrow.csv.read_csv(
                pyarrow.BufferReader(content.encode()),
                # One thread: with OMP_NUM_THREADS=1, threads of pyarrow beside torch abort the process when it exits.
                pyarrow.csv.ReadOptions(use_threads=False, block_size=one_block, column_names=numbered),
                pyarrow.csv.ParseOptions(delimiter=self._between),
                pyarrow.csv.ConvertOptions(column_types=kinds, include_columns=list(kinds), null_values=_MISSING),
            )
        except pyarrow.ArrowException:
            return None
        places: Sequence[int] = range(self._read - len(lines) + 1, self._read + 1)
        if "\n" in lines:
            places = [place for place, line in zip(places, lines, strict=True) if line != "\n"]
        block = {name: table[str(i)].combine_chunks() for name, i in at.items()}
        # A number such as inf, which pyarrow takes in more ways than Python, goes through Python.
        finite = all(compute.all(compute.is_finite(block[name])).as_py() is not False for name in numbers)
        return (places, block) if finite and len(table) == len(places) else None

    def _by_row(self, lines: list[str], width: int, at: dict[str, int]) -> Block:
        """Split lines by Python's csv module, or say in which line what is wrong."""
        rows = list(self._rows(lines))
        for place, row in rows:
            if len(row) != width:
                raise DataError(
                    f"expected {width} cells in every line of {self._path}; found {len(row)} in line {place}."
                )
        cells = {name: pyarrow.array([row[i] for _, row in rows], pyarrow.string()) for name, i in at.items()}
        return [place for place, _ in rows], cells

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


def open_parquet(path: str) -> Table:
    """Open a parquet file; columns that are no numbers can only be carried along."""

    def read(columns: Columns, size: int) -> Iterator[Block]:
        first = 0
        with _explained(path), pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=size, columns=columns.all, use_threads=False):
                yield range(first, first + len(batch)), {name: batch.column(name) for name in columns.all}
                first += len(batch)

    with _explained(path), pyarrow.parquet.ParquetFile(path) as file:
        names, count = tuple(file.schema_arrow.names), file.metadata.num_rows
    return Table(path, names, arrays=False, count=count, unit="index", read=read)


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except pyarrow.ArrowException as error:
        raise FileError(f"expected a parquet file at {path}; it is damaged or another one: {error}") from error
