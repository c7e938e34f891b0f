"""Images of a folder as inputs, named by a column of a table, and the transform from an image to an array.

A transform is a text: settings such as `size=224,normalize=imagenet`, or `package.module:function`. Channels come
first, from 0 to 1 or normalised.
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

_IMAGENET = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)[:, :, None, None]
_VALUES = {"size": [], "mode": ["RGB", "L"], "normalize": ["imagenet"]}
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
                    f"{images[-1].shape}. Pass --transform size=224, or another that makes them alike."
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


def image_transform(text: str) -> Transform:
    """Return the transform that a text means; the empty text keeps an image as it is, as RGB from 0 to 1."""
    if ":" not in text:
        return _of_settings(text)
    function = load_function(text)
    return lambda image: np.asarray(function(image))


def _of_settings(text: str) -> Transform:
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    settings = {key: value for key, _, value in parts}
    wrong = ["".join(part) for part in parts if part[0] not in _VALUES or not part[1]]
    wrong += [f"{key}={value}" for key, value in settings.items() if value not in (_VALUES.get(key) or [value])]
    if wrong:
        raise ArgumentError(
            "expected --transform as settings among size=224, mode=L and normalize=imagenet, separated by commas, or "
            f"package.module:function; found {wrong[0]!r}."
        )
    mode, size = settings.get("mode", "RGB"), _size(settings.get("size"))
    normalized = "normalize" in settings
    if normalized and mode != "RGB":
        raise ArgumentError("expected normalize=imagenet without mode=L in --transform; found both.")

    def transform(image: Any) -> Array:
        if image.mode.startswith(_DEEP):
            raise ValueError(f"it has more than 8 bits per channel, mode {image.mode}; pass a function as --transform")
        image = image.convert(mode)
        if size is not None:
            image = image.resize(size[::-1], resample=2)  # bilinear, over all pixels that a new one covers
        pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1).transpose(2, 0, 1) / 255
        changed: Array = (pixels - _IMAGENET[0]) / _IMAGENET[1] if normalized else pixels
        return changed

    return transform


def _size(text: str | None) -> tuple[int, int] | None:
    """Return height and width: `224`, or `240x320`."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentError(f"expected size=224, or size=240x320 for height and width, in --transform; found {text!r}.")
    return int(parts[0]), int(parts[-1])
