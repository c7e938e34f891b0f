"""Images of a folder as inputs, named by a column of a table, and the transform from an image to an array.

    value = (pixel / 255 - mean) / std

A transform is a text: settings such as `size=224,normalize=imagenet`, or `package.module:function`. Channels come
first. Settings apply in this order: mode, size, mean and std.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from latedrop.cli.tables.rows import Array, Block, Columns, Table
from latedrop.errors import ArgumentError, DataError
from latedrop.named import load_function
from latedrop.terminal import need

__all__ = ["image_transform", "open_images"]

Transform: TypeAlias = Callable[[Any], Array]
"""From an image of Pillow to an array, mostly `(C, H, W)` in float32."""

_IMAGENET = {"mean": "0.485/0.456/0.406", "std": "0.229/0.224/0.225"}
_MODES = {"RGB": 3, "L": 1}
_KEYS = ("mode", "size", "mean", "std", "normalize")
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

    def read(columns: Columns, size: int) -> Iterator[Block]:
        if column not in columns.inputs:  # nobody asks for images
            yield from table.read(columns, size)
            return
        named = replace(columns, inputs=(), kept=tuple(dict.fromkeys((column, *columns.kept))))
        for places, numbers, carried in table.read(named, size):
            names = carried[column].to_pylist()
            where = [f"{table.unit} {place} of {table.path}" for place in places]
            images = _stacked(folder, names, where, change)
            yield places, {column: images, **numbers}, {name: carried[name] for name in columns.carried}

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


def image_transform(text: str) -> Transform:
    """Return the transform that a text means; the empty text keeps an image as it is, as RGB from 0 to 1."""
    if ":" not in text:
        return _of_settings(text)
    function = load_function(text)
    return lambda image: np.asarray(function(image))


def _of_settings(text: str) -> Transform:
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    settings = {key: value for key, _, value in parts}
    wrong = ["".join(part) for part in parts if part[0] not in _KEYS or not part[1]]
    if wrong:
        raise ArgumentError(
            f"expected --transform as settings among {', '.join(f'{key}=' for key in _KEYS)} separated by commas, "
            f"or package.module:function; found {wrong[0]!r}."
        )
    mode = settings.get("mode", "RGB")
    if mode not in _MODES:
        raise ArgumentError(f"expected mode=RGB or mode=L in --transform; found {mode!r}.")
    if "normalize" in settings:
        if settings["normalize"] != "imagenet" or "mean" in settings or "std" in settings:
            raise ArgumentError(f"expected normalize=imagenet, or mean= and std=, in --transform; found {text}.")
        settings |= _IMAGENET
    size = _size(settings.get("size"))
    mean, std = _numbers(settings.get("mean", "0")), _numbers(settings.get("std", "1"))
    if any(len(values) not in (1, _MODES[mode]) for values in (mean, std)) or min(std) <= 0:
        raise ArgumentError(
            f"expected one number, or one for each of the {_MODES[mode]} channels, in mean= and std= of --transform, "
            f"std above 0; found {mean} and {std}."
        )
    shift, spread = (np.array(values, np.float32).reshape(-1, 1, 1) for values in (mean, std))

    def transform(image: Any) -> Array:
        if image.mode.startswith(_DEEP):
            raise ValueError(f"it has more than 8 bits per channel, mode {image.mode}; pass a function as --transform")
        image = image.convert(mode)
        if size is not None:
            image = image.resize(size[::-1], resample=2)  # bilinear, over all pixels that a new one covers
        pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1).transpose(2, 0, 1) / 255
        changed: Array = (pixels - shift) / spread
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


def _numbers(text: str) -> tuple[float, ...]:
    """Return the numbers for the channels: `0.5`, or `0.485/0.456/0.406`."""
    try:
        return tuple(map(float, text.split("/")))
    except ValueError:
        raise ArgumentError(
            f"expected numbers with / between, one for each channel, in --transform; found {text!r}."
        ) from None
