"""Arrays side by side in a npz file, or tensors in a pt file; their first axis counts the rows."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.cli.tables.rows import Array, Block, Columns, Table
from latedrop.errors import DataError, FileError, LatedropError
from latedrop.files import npy_head

__all__ = ["open_npz", "open_pt"]

_Stream: TypeAlias = "tuple[tuple[int, ...], Callable[[int, int], Array]]"
"""The shape of an array, and what reads its rows from one index to another, in order."""
_MOST_PACKED = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # bytes that one byte of an archive can become


def open_npz(path: str) -> Table:
    """Decompressed as it is read, so that no array has to fit memory, unless its columns lie one after another."""
    with _archive(path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        lengths = set()
        for name, member in members.items():
            lengths.add(_opened(path, name, archive, member)[1][:1])

    def read(columns: Columns, size: int) -> Iterator[Block]:
        with _archive(path) as archive, ExitStack() as stack:
            streams = {}
            for name in columns.all:
                file, *head = _opened(path, name, archive, members[name])
                streams[name] = _stream(path, name, stack.enter_context(file), *head)
            yield from _blocks(path, columns, streams, size)

    return Table(path, tuple(members), arrays=True, count=_one_length(lengths), unit="index", read=read)


@contextmanager
def _archive(path: str) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (LatedropError, OSError):
        raise
    except Exception as error:  # whatever a damaged archive raises: zipfile, zlib and codecs have no common base
        raise FileError(f"expected a npz file at {path}; it is damaged or another one: {error}.") from error


def _opened(
    path: str, name: str, archive: zipfile.ZipFile, member: str
) -> tuple[IO[bytes], tuple[int, ...], bool, Any]:
    """An array of a npz file after its head, which agrees with its size: file, shape, order and dtype."""
    about = archive.getinfo(member)
    if about.file_size > _MOST_PACKED.get(about.compress_type, 0) * about.compress_size:
        raise FileError(
            f"expected array {name!r} in {path}; the sizes that the archive promises cannot be. Save it again."
        )
    file = archive.open(member)
    try:
        return file, *npy_head(file, about.file_size)
    except DataError as error:
        raise FileError(f"expected array {name!r} in {path}; it is damaged: {error}") from error


def _stream(
    path: str, name: str, file: IO[bytes], shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any]
) -> _Stream:
    """The shape of an array in a npz file, and what reads its rows from one index to another, in order."""
    _check_type(path, name, dtype)
    if fortran and len(shape) > 1:
        whole = np.frombuffer(file.read(), dtype).reshape(shape, order="F")
        return shape, lambda first, last: whole[first:last]
    size = dtype.itemsize * prod(shape[1:])

    def rows(first: int, last: int) -> Array:
        content = file.read((last - first) * size)
        if len(content) < (last - first) * size:
            raise FileError(f"expected {shape[0]} rows of array {name!r} in {path}; found fewer. The file is damaged.")
        return np.frombuffer(content, dtype).reshape(last - first, *shape[1:])

    return shape, rows


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


def open_pt(path: str) -> Table:
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

    def read(columns: Columns, size: int) -> Iterator[Block]:
        for name in columns.all:
            if tensors[name].is_complex() or tensors[name].layout is not torch.strided:
                raise DataError(f"expected real, dense tensors in {path}; {name!r} is another one. Convert it.")
        streams = {name: (tuple(tensors[name].shape), _slices(tensors[name])) for name in columns.all}
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
    streams: dict[str, _Stream],
    size: int,
) -> Iterator[Block]:
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
        numbers = {name: block[name] for name in columns.numbers}
        for name, value in numbers.items():
            if value.dtype.kind == "U":
                raise DataError(f"expected numbers in array {name!r} of {path}; found text. Encode it as numbers.")
        yield range(first, last), numbers, {name: block[name] for name in columns.carried}
