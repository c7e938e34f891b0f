"""Open a table, choose its columns, read it batch by batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from latedrop.cli.tables.array_files import open_npz, open_pt
from latedrop.cli.tables.arrow_files import open_feather, open_parquet
from latedrop.cli.tables.csv_files import open_csv
from latedrop.cli.tables.folders import open_folder
from latedrop.cli.tables.rows import STANDARD, Array, Columns, Place, Rows, Table
from latedrop.errors import ArgumentError, DataError
from latedrop.files import readable
from latedrop.terminal import listed

__all__ = ["choose", "open_table", "read_batches"]

_OPENERS = {
    ".csv": open_csv,
    ".tsv": open_csv,
    ".csv.gz": open_csv,
    ".tsv.gz": open_csv,
    ".parquet": open_parquet,
    ".feather": open_feather,
    ".npz": open_npz,
    ".pt": open_pt,
    ".pth": open_pt,
}
_log = logging.getLogger(__name__)
_SHOWN = 12


def open_table(path: str) -> Table:
    """What a file or a folder of files holds; only heads are read. `-` is csv from standard input, read once."""
    name = Path(path).name.lower()
    if path != STANDARD and Path(path).is_dir():
        with readable(path, "a folder of data"):
            return _told(open_folder(path, _OPENERS))
    opener = open_csv if path == STANDARD else next((_OPENERS[end] for end in _OPENERS if name.endswith(end)), None)
    if opener is None:
        raise ArgumentError(
            f"expected data that end in {', '.join(_OPENERS)}, a folder of these, or - for csv from standard input; "
            f"found {path!r}."
        )
    with readable(path, "data"):
        return _told(opener(path))


def _told(table: Table) -> Table:
    count = "" if table.count is None else f"{table.count} rows, "
    _log.info("data %s: %s%ss %s", table.path, count, table.word, listed(table.names, _SHOWN))
    return table


def choose(
    table: Table,
    inputs: Sequence[str] = (),
    targets: Sequence[str] = (),
    kept: Sequence[str] = (),
    ignored: Sequence[str] = (),
    weight: str | None = None,
) -> Columns:
    """Which columns serve for what; without `inputs`, all that are none of the others, or the array `x`."""
    weights = [] if weight is None else [weight]
    for asked in (inputs, targets, kept, ignored, weights):
        _check_names(table, asked)
    if not inputs:
        others = {*targets, *kept, *ignored, *weights}
        inputs = ["x"] if table.arrays else [name for name in table.names if name not in others]
        _check_names(table, inputs)
        if "" in inputs:
            raise ArgumentError(
                f"expected a name for every input column of {table.path}; found one without, such as an index that was "
                "saved along. Name those to use: --inputs a,b,c."
            )
    if not inputs:
        raise ArgumentError(f"expected input columns in {table.path}; found none beside those for something else.")
    both = [name for name in inputs if name in targets]
    if both:
        raise ArgumentError(f"expected inputs and targets to differ; found {listed(map(repr, both), _SHOWN)} in both.")
    return Columns(tuple(inputs), tuple(targets), tuple(kept), weight)


def read_batches(table: Table, columns: Columns, batch_size: int = 256) -> Iterator[Rows]:
    """The rows of a table, in its order, at most `batch_size` at a time."""
    if batch_size < 1:
        raise ArgumentError(f"expected a batch size of at least 1; found {batch_size}.")
    with readable(table.path, "data"):
        for places, numbers, kept in table.read(columns, batch_size):
            finite = np.ones(len(places), dtype=bool)
            for value in numbers.values():
                if value.dtype.kind == "f":
                    finite &= np.isfinite(value).reshape(len(value), -1).all(1)
            target = _target(table, columns, numbers)
            if columns.labels is not None:
                (name,) = columns.targets
                target = columns.labels.codes(kept[name], _placed(table, places))
                finite &= np.isfinite(target).reshape(len(target), -1).all(1)
                kept = {name: kept[name] for name in columns.kept}
            found = [numbers[name] for name in columns.inputs]
            inputs = dict(zip(columns.inputs, found, strict=True)) if table.arrays else np.column_stack(found)
            weights = None if columns.weight is None else _weights(table, columns.weight, numbers)
            yield Rows(places, inputs, target, kept, finite, weights)


def _weights(table: Table, name: str, numbers: dict[str, Array]) -> Array:
    found = numbers[name]
    if found[:1].size > 1:
        raise ArgumentError(
            f"expected one weight per row in {name!r} of {table.path}; found values of shape {found.shape[1:]}. Name "
            "another: --row-weights."
        )
    return found.reshape(len(found)).astype(np.float64)


def _placed(table: Table, places: Sequence[Place]) -> Callable[[int], str]:
    return lambda i: f"{table.unit} {places[i]} of {table.path}"


def _target(table: Table, columns: Columns, numbers: dict[str, Array]) -> Array | None:
    found = [numbers[name] for name in columns.targets if columns.labels is None]
    if len(found) < 2:
        return found[0] if found else None
    wide = [name for name, value in zip(columns.targets, found, strict=True) if value.ndim > 1]
    if wide:
        raise ArgumentError(
            "expected one value per row in each of several targets; found more in "
            f"{listed(map(repr, wide), _SHOWN)} of {table.path}. Name one target, an array with a column for each "
            "output."
        )
    return np.column_stack(found)


def _check_names(table: Table, asked: Sequence[str]) -> None:
    for name in asked:
        if name not in table.names:
            close = get_close_matches(name, table.names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has {listed(map(repr, table.names), _SHOWN)}."
            raise ArgumentError(f"expected {table.word} {name!r} in {table.path}; it is not there. {hint}")
        if table.names.count(name) > 1:
            raise DataError(f"expected one {table.word} {name!r} in {table.path}; found several. Rename them.")
