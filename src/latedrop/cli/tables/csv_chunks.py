"""Large csv files, read by pyarrow where it is installed: many lines at a time, with the rows that `csv_files` gives.

Only what can be nothing else than plain cells is read here: lines of as many cells as the header has, without quotes,
numbers that both readers understand alike. At the first thing that is not, `Unusual` says from where on the other
reader has to go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from latedrop.cli.tables.rows import Array, Block, Columns

__all__ = ["Start", "Unusual", "Waiting", "plain_chunks"]

_LINE, _LEAST, _MOST = 128, 1 << 16, 1 << 22  # bytes: of a line, mostly; and of a chunk
_MISSING = [
    cell
    for word in ("na", "n/a", "nan", "null", "none")
    for cell in (word, word.upper(), word.capitalize(), word.replace("nan", "NaN"))
]


@dataclass(frozen=True)
class Start:
    """Where the rows of a file begin: the byte, the number of that line, and what is between cells."""

    byte: int
    line: int
    between: str


class Unusual(Exception):  # noqa: N818
    """Cells that the other reader has to look at, from this place on."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self.start = start


def plain_chunks(file: IO[bytes], start: Start, names: tuple[str, ...], columns: Columns, size: int) -> Iterator[Block]:
    """The rows of a file, some `size` of them at a time, or `Unusual`."""
    chunk = min(max(_LINE * size, _LEAST), _MOST)
    file.seek(start.byte)
    byte, line, rest = start.byte, start.line, b""
    while True:
        read = file.read(chunk)
        end = len(read) if not read else read.rfind(b"\n") + 1
        text, rest = (rest + read[:end], read[end:]) if end or not read else (b"", rest + read)
        if text:
            here = Start(byte, line, start.between)
            block = _parsed(text, here, names, columns)
            yield block
            byte, line = byte + len(text), line + len(block[0])
        if not read:
            return


def _parsed(text: bytes, here: Start, names: tuple[str, ...], columns: Columns) -> Block:
    import pyarrow
    from pyarrow import csv

    if not _plain(text):
        raise Unusual(here)
    at = {name: str(names.index(name)) for name in columns.all}
    types = {at[name]: pyarrow.float64() for name in columns.numbers}
    kept = {at[name] for name in columns.carried}
    if kept & types.keys():  # as numbers and as text
        raise Unusual(here)
    types |= dict.fromkeys(kept, pyarrow.string())
    try:
        table = csv.read_csv(
            pyarrow.BufferReader(text),
            csv.ReadOptions(column_names=[str(i) for i in range(len(names))], block_size=len(text) + 1),
            csv.ParseOptions(delimiter=here.between, quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=["", *_MISSING],
                strings_can_be_null=False,
            ),
        )
    except pyarrow.ArrowException as error:
        raise Unusual(here) from error
    numbers = {}
    for name in columns.numbers:
        column = table.column(at[name])
        numbers[name] = values = column.to_numpy()
        if int((~np.isfinite(values)).sum()) != column.null_count:  # such as inf, which this reader takes in more ways
            raise Unusual(here)
    carried = {name: table.column(at[name]).to_pylist() for name in columns.carried}
    return range(here.line, here.line + len(table)), numbers, carried


def _plain(text: bytes) -> bool:
    """Whether every line is a row, in UTF-8, without quotes."""
    if b'"' in text or b"\0" in text or text.startswith((b"\n", b"\r")):
        return False
    if b"\n\n" in text or text.count(b"\r") != text.count(b"\r\n") or b"\n\r" in text:
        return False
    if not text.isascii():
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            return False
    return True


class Waiting:
    """Rows that were read and not yet handed out."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self.rows = 0

    def add(self, block: Block) -> None:
        """Rows that follow those before."""
        self._blocks.append(block)
        self.rows += len(block[0])

    def take(self, count: int) -> Block:
        """So many of the oldest, which must be there."""
        taken: list[Block] = []
        self.rows -= count
        while count:
            places = self._blocks[0][0]
            if len(places) <= count:
                taken.append(self._blocks.pop(0))
            else:
                taken.append(_cut(self._blocks[0], 0, count))
                self._blocks[0] = _cut(self._blocks[0], count, len(places))
            count -= len(taken[-1][0])
        return taken[0] if len(taken) == 1 else _joined(taken)


def _cut(block: Block, start: int, end: int) -> Block:
    places, numbers, kept = block
    return (
        places[start:end],
        {name: values[start:end] for name, values in numbers.items()},
        {name: values[start:end] for name, values in kept.items()},
    )


def _joined(blocks: list[Block]) -> Block:
    places: Any = [place for block in blocks for place in block[0]]
    numbers: dict[str, Array] = {name: np.concatenate([block[1][name] for block in blocks]) for name in blocks[0][1]}
    return places, numbers, {name: [text for block in blocks for text in block[2][name]] for name in blocks[0][2]}
