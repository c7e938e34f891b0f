"""Rows in files, a few at a time: csv and parquet columns, npz and pt arrays.

`open_table` looks at a file's names alone; `read_batches` then yields `Rows`, of which it holds one at a time, so that
the file may be larger than memory. `write_rows` takes them the same way; the file that it writes appears complete or
not at all. In a csv or parquet file the inputs are columns of numbers; in a npz or pt file they are arrays whose first
axis counts the rows. Nothing is unpickled. Parquet needs pyarrow (`pip install "latedrop[parquet]"`).
"""

from __future__ import annotations

import csv
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, compress, islice
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, FileError, LatedropError

__all__ = ["STANDARD", "Columns", "Rows", "Table", "choose", "open_table", "parquet_package", "read_batches"]

STANDARD = "-"
"""The path of standard input and output."""

Array: TypeAlias = npt.NDArray[Any]
_Block: TypeAlias = "tuple[Sequence[int], dict[str, Array], dict[str, Any]]"
_Reader: TypeAlias = Callable[["Columns", int], "Iterator[_Block]"]

_MISSING = {"", "na", "n/a", "nan", "null", "none"}
_SHOWN = 12


@dataclass(frozen=True)
class Table:
    """A file with rows.

    Attributes:
        path: where it is; `-` is standard input.
        names: of its columns or arrays, in the file's order.
        arrays: whether a row of an input can have any shape; else it is one value.
        count: how many rows, where that is known without reading them.
        unit: what `Rows.places` counts: the file's lines from 1, or its rows from 0.
        read: makes the iterator over rows; use `read_batches`.
    """

    path: str
    names: tuple[str, ...]
    arrays: bool
    count: int | None
    unit: str
    read: _Reader


@dataclass(frozen=True)
class Columns:
    """What each column is for: the model's inputs, the targets, or to be carried along as it is."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        places: the line or index of each in its file.
        inputs: `(N, columns)` of a csv or parquet file, else the arrays `(N, ...)` by name.
        target: `(N,)`, `(N, targets)` or an array `(N, ...)`; None where no target was asked for.
        kept: what is carried along, by name, N values each.
        finite: `(N,)`, whether a row has neither NaN nor inf.
    """

    places: Sequence[int]
    inputs: Array | dict[str, Array]
    target: Array | None
    kept: dict[str, Any]
    finite: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.places)

    def where(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """Only the rows where `mask`, `(N,)`, is True, with nothing carried along."""
        inputs = self.inputs
        return Rows(
            list(compress(self.places, mask)),
            {name: value[mask] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[mask],
            None if self.target is None else self.target[mask],
            {},
            self.finite[mask],
        )


def open_table(path: str) -> Table:
    """What the file holds; only its head is read. `-` is csv from standard input, which can be read once."""
    openers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".npz": _npz, ".pt": _pt, ".pth": _pt}
    opener = _csv if path == STANDARD else openers.get(Path(path).suffix.lower())
    if opener is None:
        raise ArgumentError(
            f"expected data that end in {', '.join(openers)}, or - for csv from standard input; found {path!r}."
        )
    try:
        return opener(path)
    except OSError as error:
        raise FileError(f"expected data at {path}; the system says: {error.strerror or error}.") from error


def choose(
    table: Table,
    inputs: Sequence[str] = (),
    targets: Sequence[str] = (),
    kept: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Columns:
    """Which columns serve for what; without `inputs`, all that are none of the others, or the array `x`."""
    for asked in (inputs, targets, kept, ignored):
        _check_names(table, asked)
    if not inputs:
        others = {*targets, *kept, *ignored}
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
        raise ArgumentError(f"expected inputs and targets to differ; found {_listed(both)} in both.")
    return Columns(tuple(inputs), tuple(targets), tuple(kept))


def read_batches(table: Table, columns: Columns, batch_size: int = 256) -> Iterator[Rows]:
    """The rows of a table, in its order, at most `batch_size` at a time."""
    if batch_size < 1:
        raise ArgumentError(f"expected a batch size of at least 1; found {batch_size}.")
    try:
        for places, numbers, kept in table.read(columns, batch_size):
            finite = np.ones(len(places), dtype=bool)
            for value in numbers.values():
                if value.dtype.kind == "f":
                    finite &= np.isfinite(value).reshape(len(value), -1).all(1)
            found = [numbers[name] for name in columns.inputs]
            inputs = dict(zip(columns.inputs, found, strict=True)) if table.arrays else np.column_stack(found)
            yield Rows(places, inputs, _target(table, columns, numbers), kept, finite)
    except OSError as error:
        raise FileError(f"expected to read {table.path}; the system says: {error.strerror or error}.") from error


def parquet_package() -> Any:
    """pyarrow.parquet, or what to do to have it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise LatedropError(
            'expected pyarrow for parquet files; it is not installed. Run: pip install "latedrop[parquet]"'
        ) from error
    return pyarrow.parquet


def _target(table: Table, columns: Columns, numbers: dict[str, Array]) -> Array | None:
    found = [numbers[name] for name in columns.targets]
    if len(found) < 2:
        return found[0] if found else None
    wide = [name for name, value in zip(columns.targets, found, strict=True) if value.ndim > 1]
    if wide:
        raise ArgumentError(
            f"expected one value per row in each of several targets; found more in {_listed(wide)} of {table.path}. "
            "Name one target, an array with a column for each output."
        )
    return np.column_stack(found)


def _check_names(table: Table, asked: Sequence[str]) -> None:
    what = "array" if table.arrays else "column"
    for name in asked:
        if name not in table.names:
            close = get_close_matches(name, table.names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has {_listed(table.names)}."
            raise ArgumentError(f"expected {what} {name!r} in {table.path}; it is not there. {hint}")
        if table.names.count(name) > 1:
            raise DataError(f"expected one {what} {name!r} in {table.path}; found several. Rename them.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > _SHOWN else shown or "none"


def _csv(path: str) -> Table:
    """Commas, semicolons or tabs between cells, whichever the first line has most of."""
    opened = _records(path)
    _, names = next(opened, (0, []))
    names = [name.strip() for name in names]
    if not names:
        raise DataError(f"expected a first line with column names in {path}; found nothing.")
    if all(_is_number(name) for name in names):
        raise DataError(
            f"expected a first line with column names in {path}; found only numbers. Put a line of names on top."
        )
    used = False

    def read(columns: Columns, size: int) -> Iterator[_Block]:
        nonlocal used
        records = opened
        if path != STANDARD:
            records = _records(path)
            next(records)
        elif used:
            raise ArgumentError("expected a file to read twice; standard input can be read once. Write it to a file.")
        used = True
        wanted = dict.fromkeys((*columns.inputs, *columns.targets))
        at = {name: names.index(name) for name in (*wanted, *columns.kept)}
        while block := list(islice(records, size)):
            places = [line for line, _ in block]
            for line, cells in block:
                if len(cells) != len(names):
                    raise DataError(
                        f"expected {len(names)} cells in every line of {path}; found {len(cells)} in line {line}."
                    )
            by_column = list(zip(*(cells for _, cells in block), strict=True))
            numbers = {name: _numbers(path, name, by_column[at[name]], places) for name in wanted}
            yield places, numbers, {name: list(by_column[at[name]]) for name in columns.kept}

    return Table(path, tuple(names), arrays=False, count=None, unit="line", read=read)


def _records(path: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of every line that is not blank, the header's first, and the number of that line."""
    with ExitStack() as stack:
        file: Any = sys.stdin
        if path != STANDARD:
            file = stack.enter_context(open(path, encoding="utf-8-sig", newline=""))
        try:
            head = file.readline().removeprefix("\ufeff")
            reader = csv.reader(chain([head], file), delimiter=max(",;\t", key=head.count))
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except UnicodeDecodeError as error:
            raise DataError(f"expected {path} as UTF-8 text; found other bytes. Save it as UTF-8.") from error
        except csv.Error as error:
            raise DataError(f"expected csv in {path}; in line {reader.line_num} found: {error}.") from error


def _numbers(path: str, name: str, cells: Sequence[str], places: Sequence[int]) -> Array:
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        pass
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        if cell.strip().lower() in _MISSING:
            values[i] = np.nan
        elif _is_number(cell):
            values[i] = float(cell)
        else:
            raise DataError(
                f"expected numbers in column {name!r} of {path}; found {cell[:40]!r} in line {places[i]}. Encode it as "
                f"numbers, or leave the column out: --ignore {name}."
            )
    return values


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _parquet(path: str) -> Table:
    parquet = parquet_package()
    import pyarrow

    @contextmanager
    def opened() -> Iterator[Any]:
        try:
            with parquet.ParquetFile(path, pre_buffer=False) as file:
                yield file
        except pyarrow.ArrowException as error:
            raise FileError(f"expected a parquet file at {path}; it is damaged or another one: {error}") from error

    def read(columns: Columns, size: int) -> Iterator[_Block]:
        wanted = list(dict.fromkeys((*columns.inputs, *columns.targets)))
        with opened() as file:
            for name in wanted:
                kind = file.schema_arrow.field(name).type
                if not any(test(kind) for test in _number_types()):
                    raise DataError(
                        f"expected numbers in column {name!r} of {path}; its type is {kind}. Encode it as numbers, or "
                        f"leave it out: --ignore {name}."
                    )
            first = 0
            for block in file.iter_batches(batch_size=size, columns=list(dict.fromkeys((*wanted, *columns.kept)))):
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


def _npz(path: str) -> Table:
    """Decompressed as it is read, so that no array has to fit memory, unless its columns lie one after another."""
    with _archive(path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        lengths = set()
        for name, member in members.items():
            with archive.open(member) as file:
                lengths.add(_head(path, name, file)[0][:1])

    def read(columns: Columns, size: int) -> Iterator[_Block]:
        wanted = list(dict.fromkeys((*columns.inputs, *columns.targets, *columns.kept)))
        with _archive(path) as archive, ExitStack() as stack:
            streams = {}
            for name in wanted:
                file = stack.enter_context(archive.open(members[name]))
                streams[name] = _stream(path, name, file)
            yield from _blocks(path, columns, streams, size)

    return Table(path, tuple(members), arrays=True, count=_one_length(lengths), unit="index", read=read)


@contextmanager
def _archive(path: str) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError) as error:
        raise FileError(f"expected a npz file at {path}; it is damaged or another one: {error}.") from error


def _stream(path: str, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], Callable[[int, int], Array]]:
    """The shape of an array in a npz file, and what reads its rows from one index to another, in order."""
    shape, fortran, dtype = _head(path, name, file)
    _check_type(path, name, dtype)
    if fortran and len(shape) > 1:
        whole = np.frombuffer(file.read(), dtype).reshape(shape, order="F")
        return shape, lambda first, last: whole[first:last]
    size = dtype.itemsize * int(np.prod(shape[1:]))

    def rows(first: int, last: int) -> Array:
        content = file.read((last - first) * size)
        if len(content) < (last - first) * size:
            raise FileError(f"expected {shape[0]} rows of array {name!r} in {path}; found fewer. The file is damaged.")
        return np.frombuffer(content, dtype).reshape(last - first, *shape[1:])

    return shape, rows


def _head(path: str, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether its columns lie one after another, and dtype."""
    try:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
    except ValueError as error:
        raise FileError(f"expected array {name!r} in {path}; it is damaged: {error}.") from error
    return shape, fortran, dtype


def _one_length(lengths: set[tuple[int, ...]]) -> int | None:
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else None


def _check_type(path: str, name: str, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise DataError(
            f"expected numbers in array {name!r} of {path}; found Python objects, which only unpickling would bring "
            "back. Save it with a numeric dtype."
        )
    if dtype.kind not in "fiubU":
        raise DataError(f"expected real numbers in array {name!r} of {path}; found dtype {dtype}. Convert it.")


def _pt(path: str) -> Table:
    """Mapped into memory where the file allows, so that its tensors need not fit."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # whatever the unpickler stumbles over
        raise FileError(
            f"expected tensors in {path}; it is damaged, or holds objects that only unpickling would bring back. "
            "Save a dict of tensors: torch.save({'x': x, 'y': y}, path)."
        ) from error
    if isinstance(content, Tensor):
        content = {"x": content}
    elif isinstance(content, (tuple, list)) and len(content) == 2:
        content = dict(zip("xy", content, strict=True))
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(
            f"expected a dict of tensors, a pair (x, y) or one tensor in {path}; found {type(content).__name__}. "
            "Save it so: torch.save({'x': x, 'y': y}, path)."
        )
    tensors = {str(name): value for name, value in content.items()}
    lengths = {tuple(value.shape[:1]) for value in tensors.values()}

    def read(columns: Columns, size: int) -> Iterator[_Block]:
        wanted = dict.fromkeys((*columns.inputs, *columns.targets, *columns.kept))
        for name in wanted:
            if tensors[name].is_complex() or tensors[name].layout is not torch.strided:
                raise DataError(f"expected real, dense tensors in {path}; {name!r} is another one. Convert it.")
        streams = {name: (tuple(tensors[name].shape), _slices(tensors[name])) for name in wanted}
        yield from _blocks(path, columns, streams, size)

    return Table(path, tuple(tensors), arrays=True, count=_one_length(lengths), unit="index", read=read)


def _slices(tensor: Tensor) -> Callable[[int, int], Array]:
    def rows(first: int, last: int) -> Array:
        part = tensor[first:last].detach()
        return (part.float() if part.dtype == torch.bfloat16 else part).numpy()

    return rows


def _blocks(
    path: str,
    columns: Columns,
    streams: dict[str, tuple[tuple[int, ...], Callable[[int, int], Array]]],
    size: int,
) -> Iterator[_Block]:
    """Rows of several arrays side by side; their lengths must agree."""
    shapes = {name: shape for name, (shape, _) in streams.items()}
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        found = ", ".join(f"{name!r} {shape}" for name, shape in shapes.items())
        raise DataError(f"expected arrays with as many rows each in {path}; found shapes {found}.")
    count = next(iter(lengths.values())) or 0
    for first in range(0, count, size):
        last = min(first + size, count)
        block = {name: rows(first, last) for name, (_, rows) in streams.items()}
        numbers = {name: block[name] for name in (*columns.inputs, *columns.targets)}
        for name, value in numbers.items():
            if value.dtype.kind == "U":
                raise DataError(f"expected numbers in array {name!r} of {path}; found text. Encode it as numbers.")
        yield range(first, last), numbers, {name: block[name] for name in columns.kept}
