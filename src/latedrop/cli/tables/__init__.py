"""Rows in files, a few at a time: columns of csv, parquet and feather, arrays of npz and pt, images that a table names.

`open_table` looks at a file's names alone; `read_batches` then yields `Rows`, of which it holds one at a time, so that
the file may be larger than memory. A folder is its files, one after the other. In a csv, parquet or feather file the
inputs are columns of numbers; in a npz or pt file they are arrays whose first axis counts the rows. Nothing is
unpickled. Parquet and feather need pyarrow (`pip install "latedrop[parquet]"`), images Pillow
(`pip install "latedrop[images]"`).
"""

from latedrop.cli.tables.arrow_files import arrow_package
from latedrop.cli.tables.images import open_images
from latedrop.cli.tables.labels import Labels, check_count, distinct
from latedrop.cli.tables.reading import choose, open_table, read_batches
from latedrop.cli.tables.rows import STANDARD, Columns, Place, Rows, Table

__all__ = [
    "STANDARD",
    "Columns",
    "Labels",
    "Place",
    "Rows",
    "Table",
    "arrow_package",
    "check_count",
    "choose",
    "distinct",
    "open_images",
    "open_table",
    "read_batches",
]
