"""Rows of a csv file, or of csv on standard input."""

from __future__ import annotations

import csv
import gzip
import re
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, islice
from typing import Any

import numpy as np

from latedrop.cli.tables.cells import is_number, number_of
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
        records = opened
        if path != STANDARD:
            records = _records(path)
            next(records)
        elif used:
            raise ArgumentError("expected a file to read twice; standard input can be read once. Write it to a file.")
        used = True
        at = {name: names.index(name) for name in columns.all}
        while block := list(islice(records, size)):
            places = [line for line, _ in block]
            for line, cells in block:
                if len(cells) != len(names):
                    raise DataError(
                        f"expected {len(names)} cells in every line of {path}; found {len(cells)} in line {line}."
                    )
            by_column = list(zip(*(cells for _, cells in block), strict=True))
            numbers = {name: _numbers(path, name, by_column[at[name]], places) for name in columns.numbers}
            yield places, numbers, {name: list(by_column[at[name]]) for name in columns.carried}

    return Table(path, tuple(names), arrays=False, count=None, unit="line", read=read)


def _records(path: str) -> Generator[tuple[int, list[str]], None, None]:
    """The cells of every line that is not blank, the header's first, and the number of that line."""
    with ExitStack() as stack:
        file: Any = sys.stdin if path == STANDARD else stack.enter_context(_opened(path))
        try:
            head = [file.readline().removeprefix("\ufeff")]
            while head[-1] and not head[-1].strip("\r\n"):
                head.append(file.readline())
            between = _QUOTED.sub("", head[-1])
            reader = csv.reader(chain(head, file), delimiter=max(",;\t", key=between.count))
            first = 1
            for cells in reader:
                if cells:
                    yield first, cells
                first = reader.line_num + 1  # text in quotes may go on over several lines
        except UnicodeDecodeError as error:
            raise DataError(
                f"expected {path} as UTF-8 text; found other bytes{_undecoded(path)}. Save it as UTF-8."
            ) from error
        except csv.Error as error:
            raise DataError(f"expected csv in {path}; in line {reader.line_num} found: {error}.") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(f"expected gzip in {path}; it is damaged or something else: {error}.") from error


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
