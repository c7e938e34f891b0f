"""From an image to what a network takes, by a text: `size=224,normalize=imagenet`, `timm:resnet18`, or a function.

    value = (pixel / 255 - mean) / std

Channels come first. Settings stand in the order in which they are applied: mode, size, crop, mean and std.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from latedrop.cli.tables.rows import Array
from latedrop.errors import ArgumentError, LatedropError
from latedrop.named import load_function

__all__ = ["Transform", "image_transform"]

Transform: TypeAlias = Callable[[Any], Array]
"""From an image of Pillow to an array, mostly `(C, H, W)` in float32."""

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_MODES = {"RGB": 3, "L": 1}
_KEYS = ("mode", "size", "crop", "mean", "std", "normalize")
_DEEP = ("I", "F")  # modes of more than 8 bits begin so, and would be cut off without a word


def image_transform(text: str) -> Transform:
    """The transform that a text means; the empty text keeps an image as it is, as RGB from 0 to 1."""
    kind, colon, name = text.partition(":")
    if kind == "timm" and colon:
        return _of_timm(name)
    return _of_function(text) if colon else _of_settings(text)


def _of_settings(text: str) -> Transform:
    found = dict.fromkeys(_KEYS, "")
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = part.partition("=")
        if key not in _KEYS or not equals:
            raise ArgumentError(
                f"expected --transform as settings among {', '.join(f'{key}=' for key in _KEYS)} separated by commas, "
                f"timm:MODEL, or package.module:function; found {part!r}."
            )
        found[key] = value
    mode = found["mode"] or "RGB"
    if mode not in _MODES:
        raise ArgumentError(f"expected mode=RGB or mode=L in --transform; found {mode!r}.")
    if found["normalize"] not in ("", "imagenet") or (found["normalize"] and (found["mean"] or found["std"])):
        raise ArgumentError(
            "expected normalize=imagenet, or mean= and std=, in --transform; found "
            f"{', '.join(f'{key}={value}' for key, value in found.items() if value)}."
        )
    size, crop = _size("size", found["size"]), _size("crop", found["crop"])
    mean, std = _IMAGENET if found["normalize"] else (_numbers(found["mean"], (0.0,)), _numbers(found["std"], (1.0,)))
    if any(len(part) not in (1, _MODES[mode]) for part in (mean, std)) or not all(value > 0 for value in std):
        raise ArgumentError(
            f"expected one number, or one for each of the {_MODES[mode]} channels, in mean= and std= of --transform, "
            f"std above 0; found {mean} and {std}."
        )
    shift, spread = (np.array(part, np.float32).reshape(-1, 1, 1) for part in (mean, std))

    def transform(image: Any) -> Array:
        if image.mode.startswith(_DEEP):
            raise ValueError(f"it has more than 8 bits per channel, mode {image.mode}; pass a function as --transform")
        image = image.convert(mode)
        if size is not None:
            image = image.resize(size[::-1], resample=2)  # bilinear, over all pixels that a new one covers
        pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1).transpose(2, 0, 1) / 255
        return (_cropped(pixels, crop) - shift) / spread

    return transform


def _cropped(pixels: Array, crop: tuple[int, int] | None) -> Array:
    """The middle of an image."""
    if crop is None:
        return pixels
    free = pixels.shape[1] - crop[0], pixels.shape[2] - crop[1]
    if min(free) < 0:
        raise ValueError(f"{pixels.shape[1]}x{pixels.shape[2]} pixels are too few to crop {crop[0]}x{crop[1]}")
    top, left = free[0] // 2, free[1] // 2
    return pixels[:, top : top + crop[0], left : left + crop[1]]


def _size(key: str, text: str) -> tuple[int, int] | None:
    """Height and width: `224`, or `240x320`."""
    if not text:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentError(
            f"expected {key}=224, or {key}=240x320 for height and width, in --transform; found {text!r}."
        )
    return int(parts[0]), int(parts[-1])


def _numbers(text: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Numbers for the channels: `0.5`, or `0.485/0.456/0.406`."""
    try:
        return tuple(map(float, text.split("/"))) if text else default
    except ValueError:
        raise ArgumentError(
            f"expected numbers with / between, one for each channel, in --transform; found {text!r}."
        ) from None


def _of_function(name: str) -> Transform:
    function = load_function(name)

    def transform(image: Any) -> Array:
        return np.asarray(function(image))

    return transform


def _of_timm(name: str) -> Transform:
    """The transform of evaluation that belongs to a model of timm; no model is made."""
    try:
        data, models = import_module("timm.data"), import_module("timm.models")
    except Exception as error:  # with a torchvision of another torch, whatever that raises
        raise LatedropError(
            f"expected timm and torchvision for --transform timm:{name}; importing them raised "
            f"{type(error).__name__}: {error}. Install them for your torch."
        ) from error
    found = models.get_pretrained_cfg(name)
    if found is None:
        raise ArgumentError(f"expected a model of timm in --transform timm:{name}; it knows none of that name.")
    transform = data.create_transform(**data.resolve_data_config(pretrained_cfg=found.to_dict()))

    def apply(image: Any) -> Array:
        return np.asarray(transform(image.convert("RGB")))

    return apply
