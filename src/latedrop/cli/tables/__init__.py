"""Rows in files, a few at a time: columns of csv, parquet and feather, arrays of npz and pt, images that a table names.

`open_table` looks at a file's names alone; `read_batches` then yields `Rows`, of which it holds one at a time, so that
the file may be larger than memory. A folder is its files, one after the other. pyarrow reads csv, parquet and feather;
their inputs are columns of numbers. In a npz or pt file inputs are arrays whose first axis counts the rows. Nothing is
unpickled. Images need Pillow (`pip install "latedrop[images]"`).
"""

from latedrop.cli.tables.images import image_transform, open_images
from latedrop.cli.tables.labels import Labels, check_count, distinct
from latedrop.cli.tables.reading import open_table
from latedrop.cli.tables.rows import STANDARD, Columns, Place, Rows, Table, choose, read_batches

__all__ = [
    "STANDARD",
    "Columns",
    "Labels",
    "Place",
    "Rows",
    "Table",
    "check_count",
    "choose",
    "distinct",
    "image_transform",
    "open_images",
    "open_table",
    "read_batches",
]
