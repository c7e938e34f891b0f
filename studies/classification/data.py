"""Sets of images with classes: digits, MNIST and Fashion-MNIST from IDX files, CIFAR-10; letters; and shifted images.

An IDX file has two zero bytes, a byte for the type of its numbers (8: bytes), one for the number of axes, their sizes
as big-endian 32-bit numbers, and the numbers. CIFAR-10 is a folder of pictures for each class. Letters, as strange
rows, are drawn in the fonts that come with matplotlib.

Every repeat has training, validation and test rows of its own: blocks of one fixed order of the rows that share none,
so that repeats are independent. The 1797 digits are too few for that; each repeat splits them anew.
"""

import gzip
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, interpolate, pad

from latedrop.errors import DataError, FileError
from latedrop.files import readable
from latedrop.terminal import need
from studies.regression.training import key

Bytes: TypeAlias = npt.NDArray[np.uint8]
Source = Literal["digits", "letters", "mnist", "fashion-mnist", "cifar-10"]
SOURCES: tuple[Source, ...] = ("digits", "letters", "mnist", "fashion-mnist", "cifar-10")
REPEATS = 5
"""As many as there are blocks of test rows."""
_IDX = {"train": "train-{}-idx{}-ubyte", "test": "t10k-{}-idx{}-ubyte"}
_DIGIT_ROWS = 1797


@dataclass(frozen=True)
class ImageSet:
    """Images, the network that is trained on them, and how many rows it gets.

    Attributes:
        name: of the results.
        source: of the images.
        network: `"mlp"` or `"cnn"`.
        train, validation, test: rows of a repeat.
        epochs: of training.
    """

    name: str
    source: Source
    network: Literal["mlp", "cnn"]
    train: int = 5000
    validation: int = 1000
    test: int = 2000
    epochs: int = 12

    @property
    def overlap(self) -> float:
        """Of repeats that share rows: test rows over all others; 0 where they share none."""
        return self.test / (self.train + self.validation) if self.source == "digits" else 0.0


_ALL = (
    ImageSet("digits-mlp", "digits", "mlp", 800, 400, _DIGIT_ROWS - 1200, 60),
    ImageSet("mnist-cnn", "mnist", "cnn"),
    ImageSet("fashion-mlp", "fashion-mnist", "mlp", epochs=20),
    ImageSet("fashion-cnn", "fashion-mnist", "cnn"),
    ImageSet("cifar-cnn", "cifar-10", "cnn"),
)
SETS = {item.name: item for item in _ALL}


@dataclass(frozen=True)
class Images:
    """All images of a source.

    Attributes:
        x: bytes `(N, channels, height, width)`, by `train` and `test`.
        y: labels `(N,)`, likewise.
    """

    x: dict[str, Tensor]
    y: dict[str, Tensor]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all images and labels."""
        sha = hashlib.sha256()
        for part in (self.x, self.y):
            for name in ("train", "test"):
                sha.update(part[name].contiguous().numpy().tobytes())
        return sha.hexdigest()


@dataclass(frozen=True)
class Parts:
    """The rows of a repeat: images `(N, channels, height, width)` from 0 to 1 and labels, by part."""

    x: dict[str, Tensor]
    y: dict[str, Tensor]


def load(source: Source, folder: Path | None) -> Images | None:
    """All images of a source; None where the folder has none of its files, or matplotlib is not there to draw letters.

    Raises:
        DataError: a file is damaged, or another.
        FileError: one of its files is missing.
        LatedropError: the digits without scikit-learn, pictures without Pillow.
    """
    if source == "digits":
        return _digits()
    if source == "letters":
        return _letters() if find_spec("matplotlib") is not None else None
    place = None if folder is None else folder / source
    if place is None or not place.is_dir():
        return None
    if source != "cifar-10":
        return _idx_pairs(place)
    pictures = {part: class_folders(place / part, 10, 32) for part in ("train", "test")}
    return Images({part: x for part, (x, _) in pictures.items()}, {part: y for part, (_, y) in pictures.items()})


def parts(item: ImageSet, images: Images, repeat: int, seed: int) -> Parts:
    """Training, validation and test rows of a repeat."""
    if item.source == "digits":
        order = _order(len(images.y["train"]), seed, item.source, repeat)
        names, sizes = ("train", "validation", "test"), [item.train, item.validation, item.test]
        rows = dict(zip(names, order[: sum(sizes)].split(sizes), strict=True))
        pools = dict.fromkeys(rows, "train")
    else:
        both = item.train + item.validation
        inner = _order(len(images.y["train"]), seed, item.source)[repeat * both : (repeat + 1) * both]
        outer = _order(len(images.y["test"]), seed, item.source)[repeat * item.test : (repeat + 1) * item.test]
        rows = {"train": inner[: item.train], "validation": inner[item.train :], "test": outer}
        pools = {"train": "train", "validation": "train", "test": "test"}
    x = {name: images.x[pools[name]][chosen].float() / 255 for name, chosen in rows.items()}
    y = {name: images.y[pools[name]][chosen] for name, chosen in rows.items()}
    short = [name for name, chosen in y.items() if len(chosen) < getattr(item, name)]
    if short:
        raise DataError(
            f"expected {(item.train + item.validation) * REPEATS:,} training and {item.test * REPEATS:,} test rows of "
            f"{item.source}; found {len(images.y['train']):,} and {len(images.y['test']):,}. Pass the published files."
        )
    return Parts(x, y)


def _order(rows: int, *names: object) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(key("classification", *names)))


def _digits() -> Images:
    need("demo", "sklearn")
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    x = torch.tensor(digits.images * (255 / 16)).round().byte()[:, None]
    y = torch.tensor(digits.target).long()
    return Images({"train": x, "test": x[:0]}, {"train": y, "test": y[:0]})


def _letters() -> Images:
    x = letters()
    none = torch.empty(0, dtype=torch.long)
    return Images({"train": x[:0], "test": x}, {"train": none, "test": none})  # no network learns them


def _idx_pairs(place: Path) -> Images:
    x, y = {}, {}
    for part, name in _IDX.items():
        x[part] = torch.from_numpy(_idx(place, name.format("images", 3), 3))[:, None]
        y[part] = torch.from_numpy(_idx(place, name.format("labels", 1), 1)).long()
        if len(x[part]) != len(y[part]) or int(y[part].max()) > 9:
            raise DataError(
                f"expected a label from 0 to 9 for each of the {len(x[part]):,} images in {place}; found "
                f"{len(y[part]):,} labels up to {int(y[part].max())}. Fetch the files again."
            )
    return Images(x, y)


def _idx(place: Path, name: str, axes: int) -> Bytes:
    """The bytes of an IDX file, plain or in gzip."""
    path = next((array for array in (place / name, place / f"{name}.gz") if array.exists()), None)
    if path is None:
        raise FileError(f"expected {name} or {name}.gz in {place}; found neither. Fetch the four files of the set.")
    with readable(path, "an IDX file"):
        raw = path.read_bytes()
    try:
        content = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError) as error:
        raise DataError(
            f"expected a whole gzip file at {path}; found a damaged one: {error}. Fetch it again."
        ) from None
    start = 4 + 4 * axes
    shape = np.frombuffer(content[4:start], ">u4") if len(content) >= start else ()
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) - start != np.prod(shape, dtype=np.int64):
        raise DataError(f"expected an IDX file of bytes with {axes} axes at {path}; found another, or a part of one.")
    return np.array(np.frombuffer(content, np.uint8, offset=start).reshape(*shape))


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
    empty = [folder.name for folder, paths in zip(folders, files, strict=True) if not paths]
    if empty:
        raise DataError(f"expected JPEG or PNG files in every folder of {place}; found none in {', '.join(empty)}.")
    order = sorted((number, label) for label, paths in enumerate(files) for number in range(len(paths)))
    pixels = np.empty((len(order), side, side, 3), np.uint8)
    for row, (number, label) in enumerate(order):
        pixels[row] = _picture(files[label][number], side)
    labels = torch.tensor([label for _, label in order])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), labels


def _picture(path: Path, side: int) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"expected a picture at {path}; it cannot be read: {error}. Fetch it again.") from error
    if pixels.shape != (side, side, 3):
        raise DataError(f"expected pictures of {side} x {side} pixels; found {pixels.shape[:2]} at {path}.")
    return pixels


def letters() -> Tensor:
    """White letters on black, bytes `(N, 1, 28, 28)`, of all fonts in an order by chance, the same every time."""
    need("plots", "matplotlib")
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = sorted(path for path in folder.glob("*.ttf") if path.name.startswith(_FONTS) and "Display" not in path.name)
    pictures = torch.stack([_letter(path, letter) for path in fonts for letter in _LETTERS])
    return pictures[torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0)), None]


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


STRENGTHS = (1, 2, 3, 4, 5)
_DEGREES, _NOISE, _BLUR = 15.0, 0.1, 0.5


def turned(x: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """By 15 degrees for each strength, to either side by chance; what comes from outside is black."""
    angle = math.radians(_DEGREES * strength)
    side = torch.randint(0, 2, (len(x),), generator=generator) * 2.0 - 1
    c, s, o = torch.full_like(side, math.cos(angle)), side * math.sin(angle), torch.zeros_like(side)
    matrix = torch.stack([torch.stack([c, -s, o], 1), torch.stack([s, c, o], 1)], 1)
    return grid_sample(x, affine_grid(matrix, list(x.shape), align_corners=False), align_corners=False)


def noisy(x: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """Normal noise, 0.1 for each strength, of pixels from 0 to 1."""
    return (x + _NOISE * strength * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def blurred(x: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """By a Gaussian of half a pixel for each strength, in images of 28 pixels."""
    width = _BLUR * strength * x.shape[-1] / _SIDE
    reach = max(1, math.ceil(3 * width))
    line = torch.exp(-torch.arange(-reach, reach + 1).double().square() / (2 * width**2)).to(x)
    line = line / line.sum()
    rows = x.flatten(0, 1)[:, None]
    rows = conv2d(pad(rows, (reach, reach, 0, 0), mode="replicate"), line.reshape(1, 1, 1, -1))
    rows = conv2d(pad(rows, (0, 0, reach, reach), mode="replicate"), line.reshape(1, 1, -1, 1))
    return rows.reshape(x.shape)


SHIFTS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "rotation": turned,
    "noise": noisy,
    "blur": blurred,
}


def shifted(x: Tensor, seed: int) -> dict[str, Tensor]:
    """The images under every shift at every strength, by names such as `rotation-3`."""
    return {
        f"{name}-{strength}": shift(x, strength, torch.Generator().manual_seed(seed + strength))
        for name, shift in SHIFTS.items()
        for strength in STRENGTHS
    }


def as_shape(x: Tensor, shape: torch.Size) -> Tensor:
    """Images `(N, c, h, w)` with the channels, height and width of others: grey where these are, resized smoothly."""
    channels, *size = shape
    if x.shape[1] != channels:
        x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if list(x.shape[2:]) == size:
        return x.contiguous()
    return interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
