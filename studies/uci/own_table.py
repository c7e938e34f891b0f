"""A table of one's own for the study: a csv file with a header, numbers in every cell, and one column as the target.

It is split by the rule of the published sets (`data.permutations`): 20 times, 5 times from 20,000 rows on. Networks
have the paper's most frequent sizes: 50 hidden units, Adam at 1e-3, 64 rows per step, and as many epochs, 10 to 1000,
as make about 5000 steps.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter
from pathlib import Path

import numpy as np

from latedrop.errors import DataError, FileError
from studies.uci.data import Table, UciSet

__all__ = ["LEAST_ROWS", "own_set"]

LEAST_ROWS = 100
_MANY_ROWS = 20_000
_HIDDEN, _LEARNING_RATE, _BATCH, _STEPS, _EPOCHS = 50, 1e-3, 64, 5000, (10, 1000)


def own_set(path: Path, target: str) -> tuple[UciSet, Table]:
    """The set of a csv file, and its table with the target last.

    Raises:
        FileError: the file cannot be read.
        DataError: it is no table of numbers, has no such column, too few rows, or nothing to predict.
    """
    names, lines = _cells(path)
    if target not in names:
        raise DataError(f"expected the column {target!r} of --target in {path}; found {', '.join(names)}.")
    if len(names) < 2:
        raise DataError(f"expected columns to predict {target!r} from in {path}; found no other column.")
    if len(lines) < LEAST_ROWS:
        raise DataError(
            f"expected at least {LEAST_ROWS} rows in {path}, to train, fit and test on; found {len(lines)}."
        )
    order = [name for name in names if name != target] + [target]
    table = np.stack([_column(path, name, names.index(name), lines) for name in order], 1)
    if np.ptp(table[:, -1]) == 0:
        raise DataError(
            f"expected a target that varies in column {target!r} of {path}; found {table[0, -1]:g} in every row. "
            "Pass another --target."
        )
    return _described(path.stem, table), table


def _described(name: str, table: Table) -> UciSet:
    rows, columns = table.shape
    trained = round(0.9 * rows) * 4 / 5
    epochs = min(max(round(_STEPS / math.ceil(trained / _BATCH)), _EPOCHS[0]), _EPOCHS[1])
    return UciSet(
        name,
        rows,
        columns,
        _HIDDEN,
        _LEARNING_RATE,
        _BATCH,
        epochs,
        5 if rows >= _MANY_ROWS else 20,
        float(table[:, -1].mean()),
        (0.0, 0.0),
        "",
        hashlib.sha256(np.ascontiguousarray(table, "<f8").tobytes()).hexdigest(),
    )


def _cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and the cells of every line that is not blank with its number."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=head.count))
            found = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except OSError as error:
        raise FileError(f"expected a csv file at {path}; {error.strerror or error}. Check --csv.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"expected a csv file in UTF-8 at {path}; {error}. Save it as such.") from error
    if not found:
        raise DataError(f"expected a first line with column names in {path}; found nothing.")
    (_, names), *lines = found
    if all(_number(name) is not None for name in names):
        raise DataError(f"expected a first line with column names in {path}; found only numbers. Put names on top.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"expected different column names in {path}; found {twice[0]!r} more than once. Rename one.")
    for line, cells in lines:
        if len(cells) != len(names):
            raise DataError(f"expected {len(names)} cells in every line of {path}; found {len(cells)} in line {line}.")
    return names, lines


def _column(path: Path, name: str, index: int, lines: list[tuple[int, list[str]]]) -> Table:
    values = []
    for line, cells in lines:
        value = _number(cells[index])
        if value is None and cells[index].lower() in ("", "na", "n/a", "nan", "null", "none", "?"):
            raise DataError(
                f"expected a number in every cell of {path}; found a gap in column {name!r}, line {line}. "
                "Fill it, or leave the row out."
            )
        if value is None:
            raise DataError(
                f"expected numbers in column {name!r} of {path}; found {cells[index]!r} in line {line}. "
                "Leave the column out, or write it as numbers."
            )
        values.append(value)
    return np.array(values, dtype=np.float64)


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
