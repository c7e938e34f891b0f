"""Arrays side by side in a npz file; their first axis counts the rows."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from latedrop.cli.tables.rows import Array, Block, Columns, Table
from latedrop.errors import DataError, FileError, LatedropError
from latedrop.files import npy_head

__all__ = ["open_npz"]

_MOST_PACKED = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # bytes that one byte of an archive can become


def open_npz(path: str) -> Table:
    """Open a npz file; only the heads of its arrays are read, until rows are asked for."""
    with _archive(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        shapes = {name: _opened(path, name, archive)[1] for name in names}

    def read(columns: Columns, size: int) -> Iterator[Block]:
        with _archive(path) as archive:
            arrays = {name: _array(path, name, archive) for name in columns.all}
        found = {values.shape[:1] for values in arrays.values()}
        if len(found) > 1 or () in found:
            shown = ", ".join(f"{name!r} {values.shape}" for name, values in arrays.items())
            raise DataError(f"expected arrays with as many rows each in {path}; found shapes {shown}.")
        ((rows,),) = found
        for first in range(0, rows, size):
            part = slice(first, min(first + size, rows))
            yield range(rows)[part], {name: values[part] for name, values in arrays.items()}

    lengths = {shape[:1] for shape in shapes.values()}
    count = lengths.pop()[0] if len(lengths) == 1 and () not in lengths else None
    return Table(path, tuple(shapes), arrays=True, count=count, unit="index", read=read)


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


def _array(path: str, name: str, archive: zipfile.ZipFile) -> Array:
    """Read a whole array of a npz file."""
    file, shape, fortran, dtype = _opened(path, name, archive)
    if dtype.hasobject:
        raise DataError(
            f"expected numbers in array {name!r} of {path}; found Python objects, which only unpickling would bring "
            "back. Save it with a numeric dtype."
        )
    if dtype.kind not in "fiubU":
        raise DataError(f"expected real numbers in array {name!r} of {path}; found dtype {dtype}. Convert it.")
    return np.frombuffer(file.read(), dtype).reshape(shape, order="F" if fortran else "C")
