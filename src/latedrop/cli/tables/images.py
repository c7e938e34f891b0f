"""Images of a folder as inputs, named by a column of a table, and the transform from an image to an array.

A transform is a function that is named as `package.module:function`. Without one, channels come first, from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from latedrop.cli.tables.rows import Array, Table
from latedrop.errors import ArgumentError, DataError
from latedrop.named import load_function
from latedrop.terminal import need

__all__ = ["image_transform", "open_images"]

Transform: TypeAlias = Callable[[Any], Array]
"""From an image of Pillow to an array, mostly `(C, H, W)` in float32."""

_DEEP = ("I", "F")  # modes of more than 8 bits begin so, and would be cut off without a word


def open_images(table: Table, folder: str, column: str, transform: str = "") -> Table:
    """Return a table whose input is `column`: the image of that name in `folder`, as `transform` makes it.

    Images are opened when their rows are read, a batch at a time. Nothing is turned by what a camera noted.
    """
    need("images", "PIL")
    change = image_transform(transform)
    if table.arrays:
        raise DataError(
            f"expected a table with names of images, csv or parquet; found {table.path}, which holds arrays."
        )
    if not Path(folder).is_dir():
        raise DataError(f"expected a folder of images at {folder}; there is none.")

    def stacked(names: Sequence[Any], where: Sequence[str]) -> Array:
        images: list[Array] = []
        for name, place in zip(names, where, strict=True):
            images.append(_image(folder, name, place, change))
            if images[-1].shape != images[0].shape:
                raise DataError(
                    f"expected images of one shape; found {images[0].shape} and, for {name!r} at {place}, "
                    f"{images[-1].shape}. Pass a --transform that makes them alike."
                )
        return np.stack(images)

    return replace(table, arrays=True, images=(column, stacked))


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


def image_transform(name: str) -> Transform:
    """Return the function `package.module:function`; without a name, one that keeps an image as RGB from 0 to 1."""
    if not name:
        return _plain
    if ":" not in name:
        raise ArgumentError(
            f"expected --transform as package.module:function; found {name!r}. Name the function that the training "
            "used; it takes an image of Pillow."
        )
    function = load_function(name)
    return lambda image: np.asarray(function(image))


def _plain(image: Any) -> Array:
    if image.mode.startswith(_DEEP):
        raise ValueError(f"it has more than 8 bits per channel, mode {image.mode}; pass a function as --transform")
    pixels: Array = np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / np.float32(255)
    return pixels
