"""Rows of a csv file, or of csv on standard input."""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

import numpy as np

from latedrop.cli.tables.cells import is_number, number_of
from latedrop.cli.tables.csv_chunks import Start, Unusual, Waiting, plain_chunks
from latedrop.cli.tables.rows import STANDARD, Array, Block, Columns, Table
from latedrop.errors import ArgumentError, DataError, FileError

__all__ = ["open_csv"]

_QUOTED = re.compile('"[^"]*"')


def open_csv(path: str) -> Table:
    """Commas, semicolons or tabs between cells, whichever the first line has most of."""
    opened = _records(path)
    _, names = next(opened, (0, []))
    if path != STANDARD:
        opened.close()  # it is opened again to be read
    names = [name.strip() for name in names]
    if not names:
        raise DataError(f"expected a first line with column names in {path}; found nothing.")
    if all(is_number(name) for name in names):
        raise DataError(
            f"expected a first line with column names in {path}; found only numbers. Put a line of names on top."
        )
    used = False

    def read(columns: Columns, size: int) -> Iterator[Block]:
        nonlocal used
        start = _start(path)
        if start is not None:
            yield from _read_chunks(path, start, tuple(names), columns, size)
            return
        records = opened
        if path != STANDARD:
            records = _records(path)
            next(records)
        elif used:
            raise ArgumentError("expected a file to read twice; standard input can be read once. Write it to a file.")
        used = True
        while block := list(islice(records, size)):
            yield _block(path, names, columns, block)

    return Table(path, tuple(names), arrays=False, count=None, unit="line", read=read)


def _start(path: str) -> Start | None:
    """Where the rows of a file begin; None where it has to be read line by line."""
    if path == STANDARD or find_spec("pyarrow") is None:
        return None
    with _opened(path, "rb") as file:
        number, head = 1, file.readline()
        while head and not head.strip(b"\r\n"):
            number, head = number + 1, file.readline()
        odd = head.count(b'"') % 2 or head.count(b"\r") != head.count(b"\r\n")
        return None if odd else Start(file.tell(), number + 1, _between(head.decode("utf-8", "replace")))


def _read_chunks(path: str, start: Start, names: tuple[str, ...], columns: Columns, size: int) -> Iterator[Block]:
    """Many lines at a time as long as there is nothing unusual, then line by line."""
    waiting = Waiting()
    with _opened(path, "rb") as file:
        try:
            for chunk in plain_chunks(file, start, names, columns, size):
                waiting.add(chunk)
                while waiting.rows >= size:
                    yield waiting.take(size)
        except Unusual as found:
            file.seek(found.start.byte)
            lines = io.TextIOWrapper(file, encoding="utf-8", newline="")
            records = _numbered(path, lines, found.start.between, found.start.line)
            while block := list(islice(records, size - waiting.rows)):
                waiting.add(_block(path, names, columns, block))
                yield waiting.take(waiting.rows)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(_damaged(path, error)) from error
    if waiting.rows:
        yield waiting.take(waiting.rows)


def _block(path: str, names: Sequence[str], columns: Columns, records: list[tuple[int, list[str]]]) -> Block:
    places = [line for line, _ in records]
    for line, cells in records:
        if len(cells) != len(names):
            raise DataError(f"expected {len(names)} cells in every line of {path}; found {len(cells)} in line {line}.")
    by_column = list(zip(*(cells for _, cells in records), strict=True))
    at = {name: names.index(name) for name in columns.all}
    numbers = {name: _numbers(path, name, by_column[at[name]], places) for name in columns.numbers}
    return places, numbers, {name: list(by_column[at[name]]) for name in columns.carried}


def _records(path: str) -> Generator[tuple[int, list[str]], None, None]:
    """The cells of every line that is not blank, the header's first, and the number of that line."""
    with ExitStack() as stack:
        file: Any = sys.stdin if path == STANDARD else stack.enter_context(_opened(path))
        with _explained(path):
            head = [file.readline().removeprefix("\ufeff")]
            while head[-1] and not head[-1].strip("\r\n"):
                head.append(file.readline())
        yield from _numbered(path, chain(head, file), _between(head[-1]))


def _between(head: str) -> str:
    """Commas, semicolons or tabs, whichever a line has most of."""
    return max(",;\t", key=_QUOTED.sub("", head).count)


def _numbered(path: str, lines: Iterable[str], between: str, first: int = 1) -> Iterator[tuple[int, list[str]]]:
    """The cells of every line that is not blank, and its number; the first line has the number `first`."""
    with _explained(path):
        reader = csv.reader(lines, delimiter=between)
        before, number = first - 1, first
        try:
            for cells in reader:
                if cells:
                    yield number, cells
                number = before + reader.line_num + 1  # text in quotes may go on over several lines
        except csv.Error as error:
            number = before + reader.line_num
            raise DataError(f"expected csv in {path}; in line {number} found: {error}.") from error


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"expected {path} as UTF-8 text; found other bytes{_undecoded(path)}. Save it as UTF-8."
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(_damaged(path, error)) from error


def _damaged(path: str, error: Exception) -> str:
    return f"expected gzip in {path}; it is damaged or something else: {error}."


def _opened(path: str, mode: str = "rt") -> Any:
    """A file, unpacked where its name ends in .gz."""
    options: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8-sig", "newline": ""}
    return gzip.open(path, mode, **options) if path.lower().endswith(".gz") else open(path, mode, **options)


def _undecoded(path: str) -> str:
    """Where the first line is that is not UTF-8."""
    if path == STANDARD:
        return ""
    with _opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f" in line {number}, {line[error.start : error.start + 4]!r}"
    return ""


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
