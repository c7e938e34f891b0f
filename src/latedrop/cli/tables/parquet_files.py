"""Rows of a parquet file; needs pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from latedrop.cli.tables.rows import Block, Columns, Table
from latedrop.errors import DataError, FileError, LatedropError

__all__ = ["open_parquet", "parquet_package"]


def parquet_package() -> Any:
    """pyarrow.parquet, or what to do to have it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise LatedropError(
            'expected pyarrow for parquet files; it is not installed. Run: pip install "latedrop[parquet]"'
        ) from error
    return pyarrow.parquet


def open_parquet(path: str) -> Table:
    """Columns of numbers; others can only be carried along."""
    parquet = parquet_package()
    import pyarrow

    @contextmanager
    def opened() -> Iterator[Any]:
        try:
            with parquet.ParquetFile(path, pre_buffer=False) as file:
                yield file
        except pyarrow.ArrowException as error:
            raise FileError(f"expected a parquet file at {path}; it is damaged or another one: {error}") from error

    def read(columns: Columns, size: int) -> Iterator[Block]:
        wanted = columns.numbers
        with opened() as file:
            for name in wanted:
                kind = file.schema_arrow.field(name).type
                if not any(test(kind) for test in _number_types()):
                    raise DataError(
                        f"expected numbers in column {name!r} of {path}; its type is {kind}. Encode it as numbers, or "
                        f"leave it out: --ignore {name}."
                    )
            first = 0
            for block in file.iter_batches(batch_size=size, columns=columns.all):
                numbers = {
                    name: block.column(name).cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
                    for name in wanted
                }
                places = range(first, first + len(block))
                yield places, numbers, {name: block.column(name) for name in columns.kept}
                first += len(block)

    with opened() as file:
        names, count = tuple(file.schema_arrow.names), file.metadata.num_rows
    return Table(path, names, arrays=False, count=count, unit="index", read=read)


def _number_types() -> tuple[Callable[[Any], bool], ...]:
    from pyarrow import types

    return types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null
