"""Rows of a csv file, or of csv on standard input."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import numpy as np

from latedrop.cli.tables.rows import STANDARD, Array, Block, Columns, Table
from latedrop.errors import ArgumentError, DataError

__all__ = ["open_csv"]

_MISSING = {"", "na", "n/a", "nan", "null", "none"}


def open_csv(path: str) -> Table:
    """Commas, semicolons or tabs between cells, whichever the first line has most of."""
    opened = _records(path)
    _, names = next(opened, (0, []))
    names = [name.strip() for name in names]
    if not names:
        raise DataError(f"expected a first line with column names in {path}; found nothing.")
    if all(_is_number(name) for name in names):
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
            yield places, numbers, {name: list(by_column[at[name]]) for name in columns.kept}

    return Table(path, tuple(names), arrays=False, count=None, unit="line", read=read)


def _records(path: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of every line that is not blank, the header's first, and the number of that line."""
    with ExitStack() as stack:
        file: Any = sys.stdin
        if path != STANDARD:
            file = stack.enter_context(open(path, encoding="utf-8-sig", newline=""))
        try:
            head = file.readline().removeprefix("\ufeff")
            reader = csv.reader(chain([head], file), delimiter=max(",;\t", key=head.count))
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except UnicodeDecodeError as error:
            raise DataError(f"expected {path} as UTF-8 text; found other bytes. Save it as UTF-8.") from error
        except csv.Error as error:
            raise DataError(f"expected csv in {path}; in line {reader.line_num} found: {error}.") from error


def _numbers(path: str, name: str, cells: Sequence[str], places: Sequence[int]) -> Array:
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        pass
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        if cell.strip().lower() in _MISSING:
            values[i] = np.nan
        elif _is_number(cell):
            values[i] = float(cell)
        else:
            raise DataError(
                f"expected numbers in column {name!r} of {path}; found {cell[:40]!r} in line {places[i]}. Encode it as "
                f"numbers, or leave the column out: --ignore {name}."
            )
    return values


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
