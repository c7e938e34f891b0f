"""Images of a folder, with a table of their names and targets: what the inputs are is the images themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latedrop.cli.tables.rows import Array, Block, Columns, Table
from latedrop.cli.tables.transforms import Transform, image_transform
from latedrop.errors import DataError
from latedrop.terminal import need

__all__ = ["open_images"]


def open_images(table: Table, folder: str, column: str, transform: str = "") -> Table:
    """A table whose input is `column`: for each row the image of that name in `folder`, as `transform` makes it.

    Images are opened when their rows are read, a batch at a time. Nothing is turned by what a camera noted.
    """
    need("images", "PIL")
    change = image_transform(transform)
    if table.arrays:
        raise DataError(
            f"expected a table with names of images, csv, parquet or feather; found {table.path}, which holds arrays."
        )
    if not Path(folder).is_dir():
        raise DataError(f"expected a folder of images at {folder}; there is none.")

    def read(columns: Columns, size: int) -> Iterator[Block]:
        if column not in columns.inputs:  # nobody asks for images
            yield from table.read(columns, size)
            return
        named = replace(columns, inputs=(), kept=tuple(dict.fromkeys((column, *columns.kept))))
        for places, numbers, kept in table.read(named, size):
            names = kept[column] if isinstance(kept[column], list) else kept[column].to_pylist()
            where = [f"{table.unit} {place} of {table.path}" for place in places]
            images = _stacked(folder, names, where, change)
            yield places, {column: images, **numbers}, {name: kept[name] for name in columns.carried}

    return replace(table, arrays=True, read=read, images=column)


def _stacked(folder: str, names: list[Any], where: list[str], change: Transform) -> Array:
    images: list[Array] = []
    for name, place in zip(names, where, strict=True):
        images.append(_image(folder, name, place, change))
        if images[-1].shape != images[0].shape:
            raise DataError(
                f"expected images of one shape; found {images[0].shape} and, for {name!r} at {place}, "
                f"{images[-1].shape}. Pass --transform size=224, or another that makes them alike."
            )
    return np.stack(images)


def _image(folder: str, name: Any, place: str, change: Transform) -> Array:
    from PIL import Image

    path = Path(folder) / str(name or "")
    if not name or not path.is_file():
        raise DataError(f"expected image {str(name or '')!r}, named at {place}, in {folder}; it is not there.")
    try:
        with Image.open(path) as image:
            made = change(image)
    except Exception as error:  # whatever a damaged file, or the user's function, raises
        raise DataError(
            f"expected an image at {path}, named at {place}; it cannot be used: {error or type(error).__name__}."
        ) from error
    if made.dtype.kind not in "fiub" or made.ndim == 0:
        raise DataError(f"expected numbers from --transform; found {made.dtype} of shape {made.shape} for {path}.")
    return made
