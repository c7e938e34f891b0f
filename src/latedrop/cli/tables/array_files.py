"""Arrays side by side in a npz file, or tensors in a pt file; their first axis counts the rows."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.cli.tables.rows import Array, Block, Columns, Table
from latedrop.errors import DataError, FileError, LatedropError
from latedrop.files import npy_head

__all__ = ["open_npz", "open_pt"]

_Slices: TypeAlias = Callable[[int, int], Array]
"""Gives the rows of an array from one index to another; asked for in order."""
_MOST_PACKED = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # bytes that one byte of an archive can become


def open_npz(path: str) -> Table:
    """Open a npz file; its arrays are decompressed as they are read, those in Fortran order as a whole."""
    with _archive(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        shapes = {name: _opened(path, name, archive)[1] for name in names}

    def read(columns: Columns, size: int) -> Iterator[Block]:
        with _archive(path) as archive, ExitStack() as stack:
            slices = {}
            for name in columns.all:
                file, shape, fortran, dtype = _opened(path, name, archive)
                slices[name] = _npy_slices(path, name, stack.enter_context(file), shape, fortran, dtype)
            yield from _blocks(path, columns, shapes, slices, size)

    return _table(path, shapes, read)


@contextmanager
def _archive(path: str) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (LatedropError, OSError):
        raise
    except Exception as error:  # whatever a damaged archive raises: zipfile, zlib and codecs have no common base
        raise FileError(f"expected a npz file at {path}; it is damaged or another one: {error}.") from error


def _opened(path: str, name: str, archive: zipfile.ZipFile) -> tuple[IO[bytes], tuple[int, ...], bool, np.dtype[Any]]:
    """Open an array of a npz file after its head, which agrees with its size: file, shape, order and dtype."""
    about = archive.getinfo(f"{name}.npy")
    if about.file_size > _MOST_PACKED.get(about.compress_type, 0) * about.compress_size:
        raise FileError(
            f"expected array {name!r} in {path}; the sizes that the archive promises cannot be. Save it again."
        )
    file = archive.open(about)
    try:
        return file, *npy_head(file, about.file_size)
    except DataError as error:
        raise FileError(f"expected array {name!r} in {path}; it is damaged: {error}") from error


def _npy_slices(
    path: str, name: str, file: IO[bytes], shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any]
) -> _Slices:
    if dtype.hasobject:
        raise DataError(
            f"expected numbers in array {name!r} of {path}; found Python objects, which only unpickling would bring "
            "back. Save it with a numeric dtype."
        )
    if dtype.kind not in "fiubU":
        raise DataError(f"expected real numbers in array {name!r} of {path}; found dtype {dtype}. Convert it.")
    if fortran and len(shape) > 1:
        whole = np.frombuffer(file.read(), dtype).reshape(shape, order="F")
        return lambda first, last: whole[first:last]
    size = dtype.itemsize * prod(shape[1:])

    def rows(first: int, last: int) -> Array:
        content = file.read((last - first) * size)
        if len(content) < (last - first) * size:
            raise FileError(f"expected {shape[0]} rows of array {name!r} in {path}; found fewer. The file is damaged.")
        return np.frombuffer(content, dtype).reshape(last - first, *shape[1:])

    return rows


def open_pt(path: str) -> Table:
    """Open a pt file; it is mapped into memory where the file allows, so that its tensors need not fit."""
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
    tensors = {str(name): value.detach() for name, value in content.items()}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}

    def read(columns: Columns, size: int) -> Iterator[Block]:
        for name in columns.all:
            if tensors[name].is_complex() or tensors[name].layout is not torch.strided:
                raise DataError(f"expected real, dense tensors in {path}; {name!r} is another one. Convert it.")
        slices: dict[str, _Slices] = {name: partial(_tensor_rows, tensors[name]) for name in columns.all}
        yield from _blocks(path, columns, shapes, slices, size)

    return _table(path, shapes, read)


def _tensor_rows(tensor: Tensor, first: int, last: int) -> Array:
    part = tensor[first:last]
    return (part.float() if part.dtype == torch.bfloat16 else part).numpy()


def _table(path: str, shapes: dict[str, tuple[int, ...]], read: Callable[[Columns, int], Iterator[Block]]) -> Table:
    lengths = {shape[:1] for shape in shapes.values()}
    count = lengths.pop()[0] if len(lengths) == 1 and () not in lengths else None
    return Table(path, tuple(shapes), arrays=True, count=count, unit="index", read=read)


def _blocks(
    path: str, columns: Columns, shapes: dict[str, tuple[int, ...]], slices: dict[str, _Slices], size: int
) -> Iterator[Block]:
    """Read rows of several arrays side by side; their lengths must agree."""
    lengths = {shapes[name][:1] for name in slices}
    if len(lengths) > 1 or () in lengths:
        listed = ", ".join(f"{name!r} {shapes[name]}" for name in slices)
        raise DataError(f"expected arrays with as many rows each in {path}; found shapes {listed}.")
    ((count,),) = lengths
    for first in range(0, count, size):
        last = min(first + size, count)
        block = {name: rows(first, last) for name, rows in slices.items()}
        for name in columns.numbers:
            if block[name].dtype.kind == "U":
                raise DataError(f"expected numbers in array {name!r} of {path}; found text. Encode it as numbers.")
        numbers = {name: block[name] for name in columns.numbers}
        yield range(first, last), numbers, {name: block[name] for name in columns.carried}
