"""Columns of numbers in an Arrow stream, looked at before it is unpacked: a few bytes could claim to be gigabytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop.serving.limits import RefusalError
from latedrop.terminal import listed, need

__all__ = ["ARROW", "table_columns", "table_stream"]

ARROW = "application/vnd.apache.arrow.stream"
_SHOWN = 6
_SCHEMA, _ROWS = 1, 3  # kinds of messages, of Arrow's format


def table_columns(body: bytes, columns: Sequence[str], most: int) -> npt.NDArray[np.float64]:
    """The numbers `(N, columns)`: those named, or all in their order where none are."""
    need("cli", "pyarrow")
    import pyarrow
    import pyarrow.ipc

    try:
        _check_messages(pyarrow, body, most)
        with pyarrow.ipc.open_stream(pyarrow.py_buffer(body)) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, ValueError, struct.error) as error:
        raise RefusalError(
            f"expected an Arrow stream; it is damaged or another one: {str(error)[:200]}.", 400
        ) from error
    if columns and set(table.column_names) != set(columns):
        wrong = sorted(set(table.column_names) ^ set(columns))
        raise RefusalError(
            f"expected the columns {listed(columns, _SHOWN)}; the table differs in "
            f"{listed((repr(name[:40]) for name in wrong), _SHOWN)}."
        )
    if len(set(table.column_names)) < table.num_columns or not table.num_columns:
        raise RefusalError("expected columns of different names in the Arrow stream; found none, or one name twice.")
    found = [_numbers(pyarrow, name, table.column(name)) for name in columns or table.column_names]
    return np.column_stack(found)


def table_stream(columns: dict[str, Any]) -> bytes:
    """Columns `(N,)` by name as an Arrow stream."""
    need("cli", "pyarrow")
    import pyarrow
    import pyarrow.ipc

    table = pyarrow.table(columns)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _numbers(pyarrow: Any, name: str, column: Any) -> npt.NDArray[np.float64]:
    kinds = pyarrow.types
    if not any(test(column.type) for test in (kinds.is_integer, kinds.is_floating, kinds.is_boolean)):
        raise RefusalError(f"expected numbers in column {name[:40]!r}; its type is {str(column.type)[:80]}.")
    found: npt.NDArray[np.float64] = column.cast("float64", safe=False).to_numpy()  # missing ones are NaN
    return found


def _check_messages(pyarrow: Any, body: bytes, most: int) -> None:
    """Raise unless there is nothing but a schema and plain batches, of `most` rows in all."""
    rows = 0
    reader = pyarrow.ipc.MessageReader.open_stream(pyarrow.py_buffer(body))
    for message in iter(lambda: _next(reader), None):
        head = bytes(message.metadata)
        (root,) = struct.unpack_from("<I", head)
        kind = head[at] if (at := _field(head, root, 1)) else 0
        if kind == _SCHEMA:
            continue
        at = _field(head, root, 2)
        if kind != _ROWS or not at:
            raise ValueError("it holds other things than columns of numbers")
        batch = at + struct.unpack_from("<I", head, at)[0]
        if _field(head, batch, 3):
            raise ValueError("it is compressed; send it as it is")
        at = _field(head, batch, 0)
        rows += struct.unpack_from("<q", head, at)[0] if at else 0
        if rows > most:
            raise RefusalError(f"expected at most {most} rows in a request; found {rows}.", 413)


def _next(reader: Any) -> Any:
    try:
        return reader.read_next_message()
    except StopIteration:
        return None


def _field(head: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table lies; 0 where it has none."""
    vtable = table - struct.unpack_from("<i", head, table)[0]
    if vtable < 0:
        raise ValueError("its head is damaged")
    (size,) = struct.unpack_from("<H", head, vtable)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", head, vtable + at)[0] if at + 2 <= size else 0
    return table + offset if offset else 0
