"""Rows of csv and parquet files, read by pyarrow.

pyarrow parses csv in chunks of whole rows that are cut here, so that a row's line number is known and memory does not
grow with the file. If a cell is not plainly a number, that chunk is read cell by cell, which takes what pyarrow does
not (`true`, ` NA `, `+5`, `inf`), or says which cell is wrong.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from latedrop.cli.tables.rows import STANDARD, Array, Block, Columns, Table, is_number, is_numeric, number_of
from latedrop.errors import ArgumentError, DataError, FileError

__all__ = ["open_csv", "open_parquet"]

_LINE_BYTES = 128  # of a row, typically
_MIN_CHUNK, _MAX_CHUNK = 1 << 16, 1 << 22  # bytes of csv that are parsed at once
_MAX_ROW = 1 << 22  # bytes of one row; a quote that is never closed makes one of the whole file
_WORDS = ("na", "n/a", "nan", "null", "none")
_MISSING = ["", "NaN", *(case(word) for word in _WORDS for case in (str, str.upper, str.capitalize))]
_QUOTED = rb'(?:(?<=[%s\n])|\A)"[^"]*(?:""[^"]*)*(?:"|\Z)'


def open_csv(path: str) -> Table:
    """Open a csv file, or csv on standard input: commas, semicolons or tabs, whichever the first line has most of."""
    with _opened(path) as file:  # standard input stays open
        standard = [_Text(path, file)]
        names = standard[0].names()

    def read(columns: Columns, size: int) -> Iterator[Block]:
        if path == STANDARD:  # the rows follow in the stream that gave the names
            if not standard:
                raise ArgumentError(
                    "expected a file to read twice; standard input can be read once. Write it to a file."
                )
            yield from _csv_blocks(standard.pop(), names, columns, size)
            return
        with _opened(path) as file:
            text = _Text(path, file)
            text.names()
            yield from _csv_blocks(text, names, columns, size)

    return Table(path, tuple(names), arrays=False, count=None, unit="line", read=read)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open the bytes of a csv file, unpacked where its name ends in .gz."""
    if path == STANDARD:
        yield getattr(sys.stdin, "buffer", None) or io.BytesIO(sys.stdin.read().encode())
        return
    with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as file:
        yield file


class _Text:
    """The text of a csv file, cut at the ends of rows; line ends inside quotes belong to their cell.

    Attributes:
        path: where it comes from.
        between: what separates cells; known after `names`.
    """

    def __init__(self, path: str, file: Any) -> None:
        self.path, self.between = path, ","
        self._take = file.read1 if path == STANDARD else file.read  # what a pipe has, without waiting for more
        self._rest, self._line = b"", 1
        self._quoted = re.compile(_QUOTED % b",;\t")

    def names(self) -> list[str]:
        """Read the first line that is not blank: the names of the columns."""
        self._line, text = self.read(_MIN_CHUNK)
        text = text.removeprefix(b"\xef\xbb\xbf")
        blank = len(text) - len(text.lstrip(b"\n"))
        end = self.masked(text).find(b"\n", blank) + 1 or len(text)
        head, self._rest = text[blank:end], text[end:] + self._rest
        self._line += text.count(b"\n", 0, end)
        if not head:
            raise DataError(f"expected a first line with column names in {self.path}; found nothing.")
        plain = self.masked(head, b"")
        self.between = max(",;\t", key=lambda mark: plain.count(mark.encode()))
        self._quoted = re.compile(_QUOTED % self.between.encode())
        width = self.masked(head).count(self.between.encode()) + 1
        names = [str(column[0]).strip() for column in _parse(head, self.between, width, (), range(width)).columns]
        if all(map(is_number, names)):
            raise DataError(
                f"expected a first line with column names in {self.path}; found only numbers. Put a line of names on "
                "top."
            )
        return names

    def read(self, size: int) -> tuple[int, bytes]:
        r"""Read whole rows of some `size` bytes, with `\n` after each, and the number of the first line."""
        while True:
            more = self._bytes(size)
            text = self._rest + more
            end = self.masked(text).rfind(b"\n") + 1 if more else len(text)
            if end or not more:
                break
            if len(text) > _MAX_ROW:
                raise DataError(
                    f"expected csv in {self.path}; in line {self._line} found: a row of more than {_MAX_ROW >> 20} MB. "
                    "Is a quote not closed?"
                )
            self._rest = text
        line, text, self._rest = self._line, text[:end], text[end:]
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                line += text.count(b"\n", 0, error.start)
                raise DataError(
                    f"expected {self.path} as UTF-8 text; found other bytes in line {line}, "
                    f"{text[error.start : error.start + 4]!r}. Save it as UTF-8."
                ) from error
        self._line += text.count(b"\n")
        return line, text

    def _bytes(self, size: int) -> bytes:
        try:
            more: bytes = self._take(size)
            while more.endswith(b"\r") and (byte := self._take(1)):
                more += byte
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(f"expected gzip in {self.path}; it is damaged or something else: {error}.") from error
        return more.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in more else more

    def masked(self, text: bytes, cover: bytes = b"q") -> bytes:
        """Cover quoted cells, so that every line end and separator that is left ends a row or a cell."""
        return self._quoted.sub(lambda cell: cover * len(cell[0]), text) if b'"' in text else text


def _csv_blocks(text: _Text, names: Sequence[str], columns: Columns, size: int) -> Iterator[Block]:
    """Parse chunk after chunk, and cut what comes out into blocks of `size` rows."""
    chunk = min(max(_LINE_BYTES * size, _MIN_CHUNK), _MAX_CHUNK)
    at = {name: names.index(name) for name in columns.all}
    waiting: Any = None
    while True:
        line, content = text.read(chunk)
        if content:
            table = _chunk(text, line, content, len(names), columns, at)
            waiting = table if waiting is None else pyarrow.concat_tables([waiting, table])
        while waiting is not None and len(waiting) and (len(waiting) >= size or not content):
            part, waiting = waiting.slice(0, size), waiting.slice(size)
            numbers = {name: part.column(f"number {name}").to_numpy() for name in columns.numbers}
            carried = {name: part.column(f"text {name}").combine_chunks() for name in columns.carried}
            yield part.column("place").to_pylist(), numbers, carried
        if not content:
            return


def _parse(content: bytes, between: str, width: int, numbers: Iterable[int], texts: Iterable[int]) -> Any:
    """Let pyarrow parse rows of `width` cells; columns are named by their numbers."""
    types = {str(i): pyarrow.float64() for i in numbers} | {str(i): pyarrow.string() for i in texts}
    return pyarrow.csv.read_csv(
        pyarrow.BufferReader(content),
        # One thread: with OMP_NUM_THREADS=1, threads of pyarrow beside torch abort the process when it exits early.
        pyarrow.csv.ReadOptions(
            use_threads=False, column_names=[str(i) for i in range(width)], block_size=len(content) + 1
        ),
        pyarrow.csv.ParseOptions(delimiter=between, newlines_in_values=b'"' in content),
        pyarrow.csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=_MISSING, strings_can_be_null=False
        ),
    )


def _chunk(text: _Text, line: int, content: bytes, width: int, columns: Columns, at: dict[str, int]) -> Any:
    """Parse some rows: their places, numbers and texts, each column under a name of its own."""
    places = _places(line, content, text.masked(content))
    plain = {name: at[name] for name in columns.numbers if name not in columns.carried}
    try:
        parsed = _parse(content, text.between, width, plain.values(), [at[name] for name in columns.carried])
    except pyarrow.ArrowException:
        parsed = None
    if parsed is None or len(parsed) != len(places) or not all(_is_plain(parsed[str(i)]) for i in plain.values()):
        plain, parsed = {}, _texts(text, line, content, width, [at[name] for name in columns.all], places)
    made: dict[str, Any] = {"place": np.asarray(places, dtype=np.int64)}
    made |= {f"text {name}": parsed[str(at[name])] for name in columns.carried}
    for name in columns.numbers:
        cells = parsed[str(at[name])]
        made[f"number {name}"] = cells if name in plain else _numbers(text.path, name, cells.to_pylist(), places)
    return pyarrow.table(made)


def _is_plain(column: Any) -> bool:
    """Return False for numbers such as inf, which pyarrow takes in more ways than Python."""
    return bool(np.count_nonzero(np.isfinite(column.to_numpy())) == len(column) - column.null_count)


def _texts(text: _Text, line: int, content: bytes, width: int, chosen: list[int], places: Sequence[int]) -> Any:
    """Parse columns as text, or say in which line the cells are too many or too few."""
    for place, row in zip(places, filter(None, text.masked(content).split(b"\n")), strict=True):
        cells = row.count(text.between.encode()) + 1
        if cells != width:
            raise DataError(f"expected {width} cells in every line of {text.path}; found {cells} in line {place}.")
    try:
        parsed = _parse(content, text.between, width, (), chosen)
    except pyarrow.ArrowException as error:
        raise DataError(f"expected csv in {text.path}; from line {line} on found: {error}") from error
    if len(parsed) != len(places):
        raise DataError(f"expected csv in {text.path}; from line {line} on found quotes that do not pair up.")
    return parsed


def _places(line: int, content: bytes, masked: bytes) -> Sequence[int]:
    """Return the line number of every row that is not blank."""
    if masked is content and b"\n\n" not in content and not content.startswith(b"\n"):
        return range(line, line + content.count(b"\n") + (not content.endswith(b"\n")))
    places, start = [], 0
    for row in masked.split(b"\n"):
        if row:
            places.append(line)
        line += 1 + content.count(b"\n", start, start + len(row))
        start += len(row) + 1
    return places


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
