"""Read frames from image files, folders of images and videos, one at a time, as tensors in [0, 1].

Grey is the luma `0.299 R + 0.587 G + 0.114 B`. Rotation tags of images and videos are ignored, because annotations
ignore them, too.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from latedrop import LatedropError, LatedropWarning
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.terminal import need

__all__ = [
    "RECEPTIVE_FIELD",
    "check_size",
    "enlarged",
    "image_shape",
    "images_in",
    "is_video",
    "open_frames",
    "read_image",
    "read_pixels",
    "to_tensor",
]

Pixels: TypeAlias = npt.NDArray[Any]

RECEPTIVE_FIELD = 72
"""Side of the receptive field of MCNN in pixels. In its widest column: a kernel of 9, pooling + 1, a kernel of 7
at stride 2 + 12, pooling + 2, and two kernels of 7 at stride 4 + 24 each."""
_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_VIDEOS = (".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv")


def read_image(path: str | os.PathLike[str], channels: int = 1) -> Tensor:
    """Read an image file as a float32 tensor `(channels, H, W)` in [0, 1].

    The image may have 8 or 16 bits, a palette, or floats; transparent pixels are blended with black. One channel is
    grey (luma), three are colour (RGB). Raise `FileError` for a truncated file or one that is not an image.
    """
    _check_channels(channels)
    with _opened(path) as image:
        return to_tensor(_pixels(image), channels)


def read_pixels(path: str | os.PathLike[str]) -> Pixels:
    """Read an image file as 8-bit pixels `(H, W)` or `(H, W, 3)`; see `read_image`."""
    with _opened(path) as image:
        pixels = _pixels(image)
    return pixels if pixels.dtype == np.uint8 else (pixels * 255).round().astype(np.uint8)


def image_shape(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Read the size `(H, W)` of an image file from its header."""
    with _opened(path) as image:
        return image.height, image.width


def to_tensor(pixels: Pixels, channels: int = 1) -> Tensor:
    """Convert pixels `(H, W)` or `(H, W, 3)`, uint8 or float in [0, 1], to float32 `(channels, H, W)` in [0, 1].

    >>> to_tensor(np.full((2, 3), 255, np.uint8), channels=3).shape
    torch.Size([3, 2, 3])
    """
    _check_channels(channels)
    scaled = np.array(pixels, dtype=np.float32)
    if pixels.dtype == np.uint8:
        scaled /= 255
    if scaled.ndim == 3 and channels == 1:
        scaled = scaled @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    planes = torch.from_numpy(np.ascontiguousarray(np.atleast_3d(scaled).transpose(2, 0, 1)))
    return planes.expand(channels, -1, -1).clone() if len(planes) < channels else planes


def enlarged(image: Tensor, times: int) -> Tensor:
    """Enlarge an image `(C, H, W)` by a factor, with bilinear interpolation."""
    if times == 1:
        return image
    return F.interpolate(image[None], scale_factor=times, mode="bilinear", align_corners=False)[0]


def check_size(shape: Sequence[int], name: str = "the frame", least: int = RECEPTIVE_FIELD) -> None:
    """Raise `DataError` if a frame `(..., H, W)` is smaller than the receptive field."""
    height, width = shape[-2:]
    if min(height, width) < least:
        raise DataError(
            f"expected {least} pixels or more on each side, the receptive field of the network; found "
            f"{height} x {width} in {name}. Enlarge the frame, or leave it out."
        )


@dataclass(frozen=True)
class FrameStream:
    """Yield frames in the order of their sources, as pairs of a name and a tensor `(channels, H, W)` in [0, 1]."""

    total: int | None  # number of frames by the headers of videos; None if a header does not have it
    files: tuple[tuple[Path, str], ...]  # path and name of the videos and images
    channels: int  # 1 for grey, 3 for colour
    every: int  # every k-th frame of a source is read
    # Called with the error of a file that cannot be read or ends early; if None, the error is raised.
    on_bad: Callable[[FileError], object] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for path, name in self.files:
            try:
                frames = _video_frames(path, name, self.every) if is_video(path) else _image(path, name)
                for frame_name, pixels in frames:
                    yield frame_name, to_tensor(pixels, self.channels)
            except FileError as error:
                if self.on_bad is None:
                    raise
                self.on_bad(error)


def open_frames(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    channels: int = 1,
    *,
    every: int = 1,
    on_bad: Callable[[FileError], object] | None = None,
) -> FrameStream:
    """Open image files, folders of images and videos, and read their frames one at a time.

    All sources are checked before the first frame is read. Of a folder only the images are read, in natural order (`f2`
    before `f10`). Frames of a video are named `clip.mp4#000012`, counted from 0. Images are named by their file name,
    or by their path if two files have the same name.

    Args:
        sources: one path or several.
        channels: 1 for grey (luma), 3 for colour (RGB).
        every: read every k-th frame of each video, folder and run of image files, from the first on.
        on_bad: called with the error of a file that cannot be read or ends early; reading then continues with the next
            file. If None, the error is raised.

    A video that is shorter than its header says raises `FileError` after its last good frame.
    """
    _check_channels(channels)
    if int(every) != every or every < 1:
        raise ArgumentError(f"expected to take every 1st, 2nd, ... frame; found every={every}. Pass 1 for all.")
    paths = [Path(source) for source in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)]
    if not paths:
        raise ArgumentError("expected images, folders or videos; found no source. Pass at least one path.")
    for path in paths:
        if not path.exists():
            raise FileError(f"expected an image, a folder or a video at {path}; there is no such file. Check the path.")
    lengths: list[int | None] = []
    files: list[Path] = []
    for alone, run in groupby(paths, lambda path: path.is_dir() or is_video(path)):
        for group in [[path] for path in run] if alone else [list(run)]:
            images = images_in(group[0]) if group[0].is_dir() else group
            lengths.append(_video_length(group[0]) if is_video(group[0]) else len(images))
            files += images[::every]
    often = Counter(path.name for path in {*files})
    names = [path.name if often[path.name] == 1 else path.as_posix() for path in files]
    total = None if None in lengths else sum(-(-length // every) for length in lengths if length is not None)
    return FrameStream(total, tuple(zip(files, names, strict=True)), channels, int(every), on_bad)


def images_in(folder: Path) -> list[Path]:
    """List the images in a folder, in natural order."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    images = [path for path in files if path.suffix.lower() in _IMAGES]
    if not images:
        raise FileError(
            f"expected images in the folder {folder}; found {len(files)} files, none of them an image. Pass a folder "
            "with images, or the path of each video."
        )
    return sorted(images, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key for natural order: digits by value, the rest as text."""
    parts = re.split(r"(\d+)", path.name.casefold())
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]


def _image(path: Path, name: str) -> Iterator[tuple[str, Pixels]]:
    """Yield name and pixels of one image file."""
    with _opened(path) as image:
        pixels = _pixels(image)
    yield name, pixels


def is_video(path: Path) -> bool:
    """Return True if the name of a file ends like that of a video."""
    return path.suffix.lower() in _VIDEOS


def _video_length(path: Path) -> int | None:
    """Return the number of frames in the header of a video; None if it has none."""
    with _opened_video(path) as (_, stream, seconds):
        if stream.frames:
            return int(stream.frames)
        return round(seconds * float(stream.average_rate)) if seconds and stream.average_rate else None


def _video_frames(path: Path, name: str, every: int) -> Iterator[tuple[str, Pixels]]:
    """Yield every k-th frame of a video; raise `FileError` after the last good one if the file ends early."""
    import av

    count, ended = 0, None
    with _opened_video(path) as (container, stream, seconds):
        rate = float(stream.average_rate or 1)
        start = float((stream.start_time or 0) * stream.time_base)
        try:
            for frame in container.decode(stream):
                if count % every == 0:
                    yield f"{name}#{count:06d}", frame.to_ndarray(format="rgb24")
                count += 1
                ended = None if frame.time is None else frame.time - start + 1 / rate
        except av.FFmpegError as error:
            raise FileError(_stopped(path, count, error.strerror or str(error))) from error
        # The length in a header may be that of the sound, which may be longer than the video.
        early = seconds is not None and ended is not None and ended < seconds - max(0.5, 3 / rate)
        if count == 0 or early or (container.format.name == "avi" and count < stream.frames):
            raise FileError(_stopped(path, count, "the file ends early"))
        if seconds and count < 0.9 * seconds * rate:
            warnings.warn(
                f"expected about {seconds * rate:.0f} frames in {path}; decoded {count}. Part of it is damaged, or its "
                "frame rate varies: the numbers in the frames' names are of those decoded.",
                LatedropWarning,
                stacklevel=3,
            )


def _stopped(path: Path, count: int, why: str) -> str:
    return f"expected more frames in {path}; it stopped after {count}: {why}. Fetch or record the file again."


@contextmanager
def _opened_video(path: Path) -> Iterator[tuple[Any, Any, float | None]]:
    """Open a video; give container, first video track, and the length in seconds or None."""
    need("video", "av", of="latedrop-crowd")
    import av

    try:
        container = av.open(os.fspath(path))
    except (av.FFmpegError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise FileError(f"expected a video at {path}; {why}. Pass a file that plays to its end.") from error
    with container:
        if not container.streams.video:
            raise FileError(f"expected a video track in {path}; found none. Pass a video, or images.")
        stream = container.streams.video[0]
        seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else None
        if seconds is None and container.duration:
            seconds = container.duration / av.time_base
        yield container, stream, seconds


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open an image without reading its pixels; raise any error inside the block as `FileError`."""
    from PIL import Image, UnidentifiedImageError

    if not os.path.isfile(path):
        raise FileError(f"expected an image at {path}; there is no such file. Check the path.")
    try:
        with Image.open(path) as image:
            yield image
    except LatedropError:
        raise
    except UnidentifiedImageError as error:
        raise FileError(f"expected an image at {path}; found another kind of file. Pass a PNG, JPEG, ....") from error
    # Pillow's decoders raise many kinds of errors for a damaged file.
    except Exception as error:
        raise FileError(f"expected a whole image at {path}; {error}. Fetch or record the file again.") from error


def _pixels(image: Any) -> Pixels:
    """Return pixels `(H, W)` or `(H, W, 3)`: uint8, or float in [0, 1] for files with more than 8 bits."""
    if image.mode.startswith("I") or image.mode == "F":
        return _deep(np.asarray(image, dtype=np.float32), image.mode)
    if image.has_transparency_data:
        from PIL import Image

        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))


def _deep(values: Pixels, mode: str) -> Pixels:
    """Scale 16-bit or float values to [0, 1]."""
    most = 1.0 if mode == "F" else 65535.0
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > most:
        raise FileError(
            f"expected values between 0 and {most:g} in an image of mode {mode}; found {values.min():g} to "
            f"{values.max():g}. Save it with eight or sixteen bits."
        )
    return np.asarray(values / np.float32(most))


def _check_channels(channels: int) -> None:
    if channels not in (1, 3):
        raise ArgumentError(f"expected 1 channel for grey or 3 for colour; found {channels}. Pass one of these.")
