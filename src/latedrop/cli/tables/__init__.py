"""Rows in files, a few at a time: columns of csv and parquet, arrays of npz, images that a table names.

`open_table` looks at a file's names alone; `read_batches` then yields `Rows`, of which it holds one at a time, so that
a table or a set of images may be larger than memory. A folder is its files, one after the other. pyarrow reads csv and
parquet; their inputs are columns of numbers. In a npz file inputs are arrays whose first axis counts the rows. Nothing
is unpickled. Images need Pillow (`pip install "latedrop[images]"`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from latedrop.cli.tables.array_files import open_npz
from latedrop.cli.tables.arrow_files import open_csv, open_parquet
from latedrop.cli.tables.images import image_transform, open_images
from latedrop.cli.tables.rows import (
    STANDARD,
    Block,
    Columns,
    Labels,
    Place,
    Rows,
    Table,
    choose,
    distinct,
    read_batches,
)
from latedrop.errors import ArgumentError, DataError
from latedrop.files import readable
from latedrop.terminal import listed

__all__ = [
    "STANDARD",
    "Columns",
    "Labels",
    "Place",
    "Rows",
    "Table",
    "choose",
    "distinct",
    "image_transform",
    "open_images",
    "open_table",
    "read_batches",
]

_OPENERS: dict[str, Callable[[str], Table]] = {
    **dict.fromkeys((".csv", ".tsv", ".csv.gz", ".tsv.gz"), open_csv),
    ".parquet": open_parquet,
    ".npz": open_npz,
}
_log = logging.getLogger(__name__)
_SHOWN, _SHOWN_FILES = 12, 4


def open_table(path: str) -> Table:
    """Open a file or a folder of files; only heads are read. `-` is csv from standard input, read once."""
    is_folder = path != STANDARD and Path(path).is_dir()
    with readable(path, "a folder of data" if is_folder else "data"):
        table = _open_folder(path) if is_folder else _opener(path)(path)
    count = "" if table.count is None else f"{table.count} rows, "
    _log.info("data %s: %s%ss %s", table.path, count, table.word, listed(table.names, _SHOWN))
    return table


def _opener(path: str) -> Callable[[str], Table]:
    name = ".csv" if path == STANDARD else Path(path).name.lower()
    for ending, opener in _OPENERS.items():
        if name.endswith(ending):
            return opener
    raise ArgumentError(
        f"expected data that end in {', '.join(_OPENERS)}, a folder of these, or - for csv from standard input; "
        f"found {path!r}."
    )


def _open_folder(path: str) -> Table:
    """Open the files of a folder, all of one kind, in the order of their names; places are `file:place`."""
    files = _files(path)
    opener = _opener(files[0].name)
    tables = (opener(str(file)) for file in files)  # looked at one by one: a thousand open files are too many
    first = next(tables)
    counts = [first.count]
    for file, other in zip(files[1:], tables, strict=True):
        if set(other.names) != set(first.names):
            differing = listed(map(repr, sorted(set(first.names) ^ set(other.names))), _SHOWN_FILES)
            raise DataError(
                f"expected the same {first.word}s in all files of {path}; found that {file.name} and {files[0].name} "
                f"differ in {differing}."
            )
        counts.append(other.count)

    def read(columns: Columns, size: int) -> Iterator[Block]:
        for file in files:
            for places, values in opener(str(file)).read(columns, size):
                yield [f"{file.name}:{place}" for place in places], values

    count = None if None in counts else sum(n for n in counts if n is not None)
    return Table(path, first.names, first.arrays, count, first.unit, read)


def _files(path: str) -> list[Path]:
    """List the data files of a folder; those that start with a dot or an underscore, as `_SUCCESS`, are left out."""
    entries = [entry for entry in sorted(Path(path).iterdir()) if not entry.name.startswith((".", "_"))]
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders:
        raise DataError(
            f"expected files side by side in the folder {path}; found folders in it: {listed(folders, _SHOWN_FILES)}. "
            "Name one of them, or put the files side by side."
        )
    files = [entry for entry in entries if entry.name.lower().endswith(tuple(_OPENERS))]
    kinds = {_opener(file.name): file.name for file in reversed(files)}
    if len(kinds) != 1:
        names = listed(sorted(kinds.values()), _SHOWN_FILES)
        raise DataError(f"expected files of one kind, {', '.join(_OPENERS)}, in the folder {path}; found {names}.")
    return files
