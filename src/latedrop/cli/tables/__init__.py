"""Rows in files, a few at a time: columns of csv and parquet, arrays of npz, images that a table names.

`open_table` looks at a file's names alone; `read_batches` then yields `Rows`, of which it holds one at a time, so that
a table or a set of images may be larger than memory. pyarrow reads csv and parquet; their inputs are columns of
numbers. In a npz file inputs are arrays whose first axis counts the rows. Nothing is unpickled. Images need Pillow
(`pip install "latedrop[images]"`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from latedrop.cli.tables.array_files import open_npz
from latedrop.cli.tables.arrow_files import open_csv, open_parquet
from latedrop.cli.tables.images import image_transform, open_images
from latedrop.cli.tables.rows import STANDARD, Columns, Labels, Rows, Table, choose, distinct, read_batches
from latedrop.errors import ArgumentError
from latedrop.files import readable
from latedrop.terminal import listed

__all__ = [
    "STANDARD",
    "Columns",
    "Labels",
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
_SHOWN = 12


def open_table(path: str) -> Table:
    """Open a file; only its head is read. `-` is csv from standard input, read once."""
    name = ".csv" if path == STANDARD else Path(path).name.lower()
    opener = next((opener for ending, opener in _OPENERS.items() if name.endswith(ending)), None)
    if opener is None:
        raise ArgumentError(
            f"expected data that end in {', '.join(_OPENERS)}, or - for csv from standard input; found {path!r}."
        )
    with readable(path, "data"):
        table = opener(path)
    count = "" if table.count is None else f"{table.count} rows, "
    _log.info("data %s: %s%ss %s", table.path, count, table.word, listed(table.names, _SHOWN))
    return table
