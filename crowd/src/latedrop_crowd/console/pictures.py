"""Encode pictures for the page: frames as JPEG, and layers of numbers as transparent PNGs."""

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop_crowd.console.sources import Pixels

__all__ = ["density_layer", "doubt_layer", "jpeg", "png", "regions_layer"]

_WIDEST, _FINER = 1280, 6
# Colour scales of maps, from low to high values, in equal steps.
_DENSITY = ((10, 80, 130), (20, 130, 165), (60, 185, 200), (140, 225, 225), (235, 255, 250))
_DOUBT = ((90, 60, 160), (160, 70, 190), (225, 90, 180), (255, 140, 160), (255, 225, 215))


def jpeg(pixels: Pixels, quality: int = 82) -> bytes:
    """Encode a frame as JPEG, at most 1280 pixels wide."""
    image = _image(pixels)
    if image.width > _WIDEST:
        image = image.resize((_WIDEST, round(image.height * _WIDEST / image.width)))
    return _written(image, "JPEG", quality=quality)


def png(pixels: npt.NDArray[Any]) -> bytes:
    """Encode pixels `(H, W)`, `(H, W, 3)` or `(H, W, 4)` as PNG, without loss."""
    return _written(_image(pixels), "PNG", compress_level=1)


def density_layer(density: npt.NDArray[np.float64]) -> bytes:
    """Draw a density map `(h, w)`."""
    return png(_coloured(density, _DENSITY))


def doubt_layer(std: npt.NDArray[np.float64]) -> bytes:
    """Draw standard deviations `(h, w)`, minus their median over the map."""
    return png(_coloured(np.clip(std - np.median(std), 0, None), _DOUBT))


def regions_layer(regions: npt.NDArray[np.bool_]) -> bytes:
    """Draw uncertain regions, a mask `(h, w)`, with an outline and a light fill."""
    large = np.pad(regions, 1).repeat(_FINER, 0).repeat(_FINER, 1)
    inner = large.copy()
    for axis, step in ((0, 2), (0, -2), (1, 2), (1, -2)):
        inner &= np.roll(large, step, axis)
    layer = np.zeros((*large.shape, 4), dtype=np.uint8)
    layer[large] = (255, 186, 60, 240)
    layer[inner] = (255, 186, 60, 60)
    return png(layer[_FINER:-_FINER, _FINER:-_FINER])


def _coloured(
    values: npt.NDArray[np.float64], colours: tuple[tuple[int, int, int], ...], most: float = 0.84
) -> npt.NDArray[np.uint8]:
    """Colour values; larger ones are more opaque. The scale ends at the 99.5 % quantile of the positive values."""
    above = values[values > 0]
    top = max(float(np.quantile(above, 0.995)) if len(above) else 1.0, 1e-6)
    level = np.clip(values / top, 0, 1) ** 0.6
    at = np.linspace(0, 1, len(colours))
    layer = np.stack([np.interp(level, at, [colour[i] for colour in colours]) for i in range(3)], -1)
    alpha = 255 * most * np.clip((level - 0.12) / 0.6, 0, 1)
    return np.concatenate([layer, alpha[:, :, None]], -1).astype(np.uint8)


def _image(pixels: npt.NDArray[Any]) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels))


def _written(image: Any, kind: str, **options: Any) -> bytes:
    into = BytesIO()
    image.save(into, kind, **options)
    return into.getvalue()
