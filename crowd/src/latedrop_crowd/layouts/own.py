"""Frames of your own: a folder of images, with heads or counts beside them.

    DIR/frames/*.png, or the images in DIR itself
    DIR/heads.csv (frame, x, y), or DIR/counts.csv (frame, count)
    DIR/train.txt, DIR/validation.txt, DIR/test.txt      names of frames, one a line; optional
    DIR/roi.png                                          pixels that are not black count; optional

Without the three lists the annotated frames are split in their order: three fifths train, one validation, one test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latedrop.errors import DataError, FileError
from latedrop.files import read_text
from latedrop_crowd.frames import images_in, read_image
from latedrop_crowd.layouts.annotations import read_counts, read_heads
from latedrop_crowd.layouts.crowd_set import CrowdSet, Floats, Frame, Mask
from latedrop_crowd.layouts.releases import some

__all__ = ["SIGMA", "read_own", "read_roi"]

SIGMA = 4.0
"""Of the density kernel where none is given, in pixels."""
_PARTS = ("train", "validation", "test")
_ROI = "roi.png"
_FILES = ("heads.csv", "counts.csv")


def read_own(folder: Path, use_roi: bool = True, sigma: float | None = None) -> CrowdSet:
    """The annotated frames of a folder, split."""
    frames = _frames(folder, _annotations(folder))
    opened = CrowdSet("own", tuple(frames), (), (), (), sigma=SIGMA if sigma is None else sigma)
    shapes = {opened.shape(index) for index in range(len(frames))}
    size = next(iter(shapes)) if len(shapes) == 1 else None
    has_roi = use_roi and (folder / _ROI).is_file()
    if has_roi and size is None:
        raise DataError(
            f"expected frames of one size beside {folder / _ROI}; found several. Make them fit, or remove it."
        )
    return replace(opened, roi=read_roi(folder / _ROI, size) if has_roi else None, size=size, **_split(folder, frames))


def read_roi(path: Path, size: tuple[int, int] | None = None) -> Mask:
    """The region of interest in an image, bool `(H, W)`: whatever is not black; `size` is that of the frames."""
    mask: Mask = read_image(path)[0].numpy() > 0
    if size is not None and mask.shape != size:
        raise DataError(
            f"expected a region of interest of {size[0]} x {size[1]} pixels, as its frames are, in {path}; found "
            f"{mask.shape[0]} x {mask.shape[1]}. Make them fit, or remove it."
        )
    if not mask.any():
        raise DataError(f"expected pixels that are not black in {path}, which are counted; found none.")
    return mask


def _annotations(folder: Path) -> dict[str, Floats | int]:
    there = [folder / name for name in _FILES if (folder / name).is_file()]
    if len(there) != 1:
        names = ", ".join(path.name for path in there) or "none of them"
        raise FileError(f"expected one of {', '.join(_FILES)} in {folder}; found {names}. Put one there.")
    (path,) = there
    return dict(read_counts(path)) if path.name == "counts.csv" else dict(read_heads(path))


def _frames(folder: Path, known: Mapping[str, Floats | int]) -> list[Frame]:
    """The annotated frames, in natural order."""
    left = dict(known)
    frames = []
    images = folder / "frames" if (folder / "frames").is_dir() else folder
    for path in images_in(images):
        names = [name for name in (path.name, f"frames/{path.name}", path.stem) if name in known]
        if not names or path.name == _ROI:
            continue
        if len(names) > 1 or names[0] not in left:
            raise DataError(
                f"expected one name for each frame and one frame for each name; found {some(names)} for {path} in the "
                "annotations. Use the names of the files, with their endings."
            )
        value = left.pop(names[0])
        points, people = (np.zeros((0, 2)), value) if isinstance(value, int) else (value, None)
        frames.append(Frame(path.name, path, points, people=people))
    if left:
        raise FileError(f"expected the annotated frames in {images}; missing: {some(left)}. Put them there.")
    return frames


def _split(folder: Path, frames: Sequence[Frame]) -> dict[str, Any]:
    """Indices of the frames by part: as listed, or in their order."""
    lists = {name: folder / f"{name}.txt" for name in _PARTS if (folder / f"{name}.txt").is_file()}
    if not lists:
        ends = [round(len(frames) * share / 5) for share in (0, 3, 4, 5)]
        return {name: tuple(range(ends[i], ends[i + 1])) for i, name in enumerate(_PARTS)}
    places = {name: index for index, frame in enumerate(frames) for name in (Path(frame.name).stem, frame.name)}
    indices: dict[str, list[int]] = {name: [] for name in _PARTS}
    taken: dict[int, str] = {}
    for name, path in lists.items():
        lines = [line.strip() for line in read_text(path, "names of frames").splitlines()]
        for line in (line.removeprefix("frames/") for line in lines if line and not line.startswith("#")):
            if line not in places:
                raise DataError(
                    f"expected names of annotated frames in {path}; found {line!r}, which is not annotated. One "
                    "without people is a row with empty x and y."
                )
            if places[line] in taken:
                raise DataError(f"expected each frame in one list; found {line!r} in {taken[places[line]]} and {name}.")
            taken[places[line]] = name
            indices[name].append(places[line])
    if not taken:
        raise DataError(f"expected frames in {folder}; the lists name none. Check train.txt and the others.")
    return {name: tuple(sorted(part)) for name, part in indices.items()}
