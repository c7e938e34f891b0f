"""Rows of a parquet or a feather file; both need pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from latedrop.cli.tables.rows import Block, Columns, Table
from latedrop.errors import DataError, FileError, LatedropError

__all__ = ["arrow_package", "open_feather", "open_parquet"]


def arrow_package() -> Any:
    """Pyarrow with its parts for files, or what to do to have it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise LatedropError(
            'expected pyarrow for parquet and feather files; it is not installed. Run: pip install "latedrop[parquet]"'
        ) from error
    return pyarrow


def open_parquet(path: str) -> Table:
    """Columns of numbers; others can only be carried along."""
    arrow = arrow_package()

    def opened(names: list[str]) -> Any:
        return arrow.parquet.ParquetFile(path, pre_buffer=False)

    def batches(file: Any, size: int, names: list[str]) -> Iterable[Any]:
        return file.iter_batches(batch_size=size, columns=names)  # type: ignore[no-any-return]

    with _explained(path, "parquet"), opened([]) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
    return _table(path, "parquet", opened, batches, schema, count)


def open_feather(path: str) -> Table:
    """The same; one of the file's own batches is held at a time. Files of the first version of feather are refused."""
    arrow = arrow_package()

    def opened(names: list[str]) -> Any:
        fields = sorted(schema.names.index(name) for name in names)  # none is all
        return arrow.ipc.open_file(arrow.memory_map(path), options=arrow.ipc.IpcReadOptions(included_fields=fields))

    def batches(file: Any, size: int, names: list[str]) -> Iterator[Any]:
        for index in range(file.num_record_batches):
            whole = file.get_batch(index)
            for start in range(0, len(whole), size):
                yield whole.slice(start, size)

    with _explained(path, "feather"), opened([]) as file:
        schema = file.schema
        count = file.count_rows() if hasattr(file, "count_rows") else None
    return _table(path, "feather", opened, batches, schema, count)


def _table(
    path: str,
    kind: str,
    opened: Callable[[list[str]], Any],
    batches: Callable[[Any, int, list[str]], Iterable[Any]],
    schema: Any,
    count: int | None,
) -> Table:
    def read(columns: Columns, size: int) -> Iterator[Block]:
        wanted = columns.numbers
        _check_types(path, schema, wanted)
        first = 0
        with _explained(path, kind), opened(columns.all) as file:
            for block in batches(file, size, columns.all):
                numbers = {
                    name: block.column(name).cast("float64", safe=False).to_numpy(zero_copy_only=False)
                    for name in wanted
                }
                places = range(first, first + len(block))
                yield places, numbers, {name: block.column(name) for name in columns.carried}
                first += len(block)

    return Table(path, tuple(schema.names), arrays=False, count=count, unit="index", read=read)


@contextmanager
def _explained(path: str, kind: str) -> Iterator[None]:
    try:
        yield
    except arrow_package().ArrowException as error:
        raise FileError(f"expected a {kind} file at {path}; it is damaged or another one: {error}") from error


def _check_types(path: str, schema: Any, names: list[str]) -> None:
    from pyarrow import types

    tests = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null
    for name in names:
        kind = schema.field(name).type
        if not any(test(kind) for test in tests):
            raise DataError(
                f"expected numbers in column {name!r} of {path}; its type is {kind}. Encode it as numbers, or leave it "
                f"out: --ignore {name}."
            )
