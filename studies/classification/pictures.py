"""Images from pictures: a set as a folder for each class, and letters drawn in the fonts that come with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import DataError, FileError
from latedrop.terminal import need

__all__ = ["class_folders", "letters"]

_SUFFIXES = (".jpg", ".jpeg", ".png")
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz"  # O, o, I and l look like digits
_SIDE, _INNER = 28, 20  # pixels of an image, and of the longer side of a letter in it, as those of MNIST
_FONTS = ("DejaVu", "STIXGeneral", "cmr10", "cmss10", "cmtt10", "cmb10")


def class_folders(place: Path, classes: int, side: int) -> tuple[Tensor, Tensor]:
    """Bytes `(N, 3, side, side)` and labels `(N,)` of JPEG or PNG files in one folder for each class.

    The classes are numbered in the order of their names. The first files of all folders come first, then the second.

    Raises:
        FileError: there are not as many folders.
        DataError: one of them is empty, or a file is no picture of that size.
    """
    need("images", "PIL")
    folders = sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []
    if len(folders) != classes:
        raise FileError(f"expected {classes} folders, one for each class, in {place}; found {len(folders)}.")
    files = [sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES) for folder in folders]
    empty = [folder.name for folder, found in zip(folders, files, strict=True) if not found]
    if empty:
        raise DataError(f"expected JPEG or PNG files in every folder of {place}; found none in {', '.join(empty)}.")
    order = sorted((number, label) for label, found in enumerate(files) for number in range(len(found)))
    pixels = np.empty((len(order), side, side, 3), np.uint8)
    for row, (number, label) in enumerate(order):
        pixels[row] = _picture(files[label][number], side)
    labels = torch.tensor([label for _, label in order])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), labels


def _picture(path: Path, side: int) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            found = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"expected a picture at {path}; it cannot be read: {error}. Fetch it again.") from error
    if found.shape != (side, side, 3):
        raise DataError(f"expected pictures of {side} x {side} pixels; found {found.shape[:2]} at {path}.")
    return found


def letters() -> Tensor:
    """White letters on black, bytes `(N, 1, 28, 28)`, of all fonts in an order by chance, the same every time."""
    need("plots", "matplotlib")
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = sorted(path for path in folder.glob("*.ttf") if path.name.startswith(_FONTS) and "Display" not in path.name)
    found = torch.stack([_letter(path, letter) for path in fonts for letter in _LETTERS])
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0)), None]


def _letter(font: Path, letter: str) -> Tensor:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("L", (200, 200))
    ImageDraw.Draw(image).text((60, 40), letter, fill=255, font=ImageFont.truetype(str(font), 80))
    image = image.crop(image.getbbox())
    scale = _INNER / max(image.size)
    width, height = (max(1, round(scale * length)) for length in image.size)
    whole = Image.new("L", (_SIDE, _SIDE))
    whole.paste(image.resize((width, height), resample=2), ((_SIDE - width) // 2, (_SIDE - height) // 2))
    return torch.from_numpy(np.asarray(whole).copy())
