"""Rows in files, a few at a time: csv and parquet columns, npz and pt arrays.

`open_table` looks at a file's names alone; `read_batches` then yields `Rows`, of which it holds one at a time, so that
the file may be larger than memory. In a csv or parquet file the inputs are columns of numbers; in a npz or pt file they
are arrays whose first axis counts the rows. Nothing is unpickled. Parquet needs pyarrow
(`pip install "latedrop[parquet]"`).
"""

from latedrop.cli.tables.parquet_files import parquet_package
from latedrop.cli.tables.reading import choose, open_table, read_batches
from latedrop.cli.tables.rows import STANDARD, Columns, Rows, Table

__all__ = ["STANDARD", "Columns", "Rows", "Table", "choose", "open_table", "parquet_package", "read_batches"]
