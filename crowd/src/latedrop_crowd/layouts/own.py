"""Frames of your own: a folder of images, or a video, with heads or counts beside them.

    DIR/frames/*.png, or the images in DIR itself, or one video in DIR
    DIR/heads.csv (frame, x, y), DIR/heads.json (points by frame, or COCO keypoints), or DIR/counts.csv (frame, count)
    DIR/train.txt, DIR/validation.txt, DIR/test.txt      names of frames, one a line; optional
    DIR/roi.png                                          pixels that are not black count; optional
    DIR/perspective.npy, .csv or .png                    how large people are; optional

Without the three lists the annotated frames are split in their order: three fifths train, one validation, one test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from latedrop.errors import DataError, FileError
from latedrop.files import read_text
from latedrop_crowd.frames import images_in, is_video, read_image
from latedrop_crowd.layouts.annotations import read_counts, read_heads
from latedrop_crowd.layouts.crowd_set import CrowdSet, Floats, Frame, Mask, Part, Sigma
from latedrop_crowd.layouts.release import some
from latedrop_crowd.layouts.videos import VideoFrames

__all__ = ["SIGMA", "read_own", "read_roi"]

SIGMA = 4.0
"""Of the density kernel where none is given, in pixels."""
_PARTS = ("train", "validation", "test")
_MAPS = ("roi.png", "perspective.png")
_FILES = ("heads.csv", "heads.json", "counts.csv")


def read_own(folder: Path, part: Part = "all", use_roi: bool = True, sigma: Sigma | None = None) -> CrowdSet:
    """The annotated frames of a folder, split."""
    known = _annotations(folder)
    frames = _frames(folder, known)
    split = _split(folder, frames)
    wanted = {"all": _PARTS, "train": ("train", "validation"), "test": ("test",)}[part]
    chosen = [index for name in wanted for index in split[name]]
    places = {index: place for place, index in enumerate(chosen)}
    kept = tuple(frames[index] for index in chosen)
    if not kept:
        raise DataError(f"expected frames of part {part!r} in {folder}; found none. Check train.txt and the others.")
    found = CrowdSet("own", kept, (), (), (), sigma=SIGMA if sigma is None else sigma)
    shapes = {found.shape(index) for index in range(len(kept) if kept[0].source is None else 1)}
    size = next(iter(shapes)) if len(shapes) == 1 else None
    roi, perspective = (_roi(folder, size) if use_roi else None), _perspective(folder, size)
    indices: dict[str, Any] = {name: tuple(places[i] for i in split[name] if i in places) for name in _PARTS}
    return replace(found, roi=roi, perspective=perspective, size=size, **indices)


def read_roi(path: Path, size: tuple[int, int] | None = None) -> Mask:
    """The region of interest in an image: whatever is not black, bool `(H, W)`."""
    mask: Mask = read_image(path)[0].numpy() > 0
    _check_map("region of interest", mask.shape, size, path)
    if not mask.any():
        raise DataError(f"expected pixels that are not black in {path}, which are counted; found none.")
    return mask


def _annotations(folder: Path) -> dict[str, Floats | int]:
    there = [folder / name for name in _FILES if (folder / name).is_file()]
    if len(there) != 1:
        found = ", ".join(path.name for path in there) or "none of them"
        raise FileError(f"expected one of {', '.join(_FILES)} in {folder}; found {found}. Put one there.")
    (path,) = there
    return dict(read_counts(path)) if path.name == "counts.csv" else dict(read_heads(path))


def _frames(folder: Path, known: Mapping[str, Floats | int]) -> list[Frame]:
    """The annotated frames, in the order of the video or in natural order of the images."""
    videos = sorted(path for path in folder.iterdir() if path.is_file() and is_video(path))
    if len(videos) > 1:
        several = some(path.name for path in videos)
        raise FileError(f"expected one video in {folder}; found {several}. Use one folder for each.")
    left = dict(known)
    frames = []
    if videos:
        reader = VideoFrames(videos[0])
        for name in list(left):
            number = _number(name, videos[0])
            frames.append(_frame(f"{videos[0].name}#{number:06d}", None, left.pop(name), partial(reader.read, number)))
        if len({frame.name for frame in frames}) < len(frames):
            raise DataError(f"expected each frame of the video once; found one under two names in {folder}.")
        return sorted(frames, key=lambda frame: frame.name)
    images = folder / "frames" if (folder / "frames").is_dir() else folder
    for path in images_in(images):
        names = [name for name in (path.name, f"frames/{path.name}", path.stem) if name in known]
        if not names or path.name in _MAPS:
            continue
        if len(names) > 1 or names[0] not in left:
            raise DataError(
                f"expected one name for each frame and one frame for each name; found {some(names)} for {path} in the "
                "annotations. Use the names of the files, with their endings."
            )
        frames.append(_frame(path.name, path, left.pop(names[0]), None))
    if left:
        raise FileError(f"expected the annotated frames in {images}; missing: {some(left)}. Put them there.")
    return frames


def _frame(name: str, path: Path | None, known: Any, source: Any) -> Frame:
    if isinstance(known, int):
        return Frame(name, path, np.zeros((0, 2)), people=known, source=source)
    return Frame(name, path, known, source=source)


def _number(name: str, video: Path) -> int:
    number = name.removeprefix(f"{video.name}#")
    if not number.isdecimal():
        raise DataError(
            f"expected frames of {video.name} by their number from 0, as 12 or {video.name}#000012; found {name!r}."
        )
    return int(number)


def _split(folder: Path, frames: Sequence[Frame]) -> dict[str, list[int]]:
    """Indices of the frames by part: as listed, or in their order."""
    lists = {name: folder / f"{name}.txt" for name in _PARTS if (folder / f"{name}.txt").is_file()}
    if not lists:
        ends = [round(len(frames) * share / 5) for share in (0, 3, 4, 5)]
        return {name: list(range(ends[i], ends[i + 1])) for i, name in enumerate(_PARTS)}
    places = {frame.name: index for index, frame in enumerate(frames)}
    places |= {str(int(frame.name.rpartition("#")[2])): i for i, frame in enumerate(frames) if frame.source}
    places |= {Path(frame.name).stem: i for i, frame in enumerate(frames) if not frame.source}
    found: dict[str, list[int]] = {name: [] for name in _PARTS}
    taken: dict[int, str] = {}
    for name, path in lists.items():
        lines = [line.strip() for line in read_text(path, "names of frames").splitlines()]
        for line in (line.removeprefix("frames/") for line in lines if line and not line.startswith("#")):
            if line not in places:
                raise DataError(
                    f"expected names of annotated frames in {path}; found {line!r}, which is not annotated. One "
                    "without people is a row with empty x and y, or []."
                )
            if places[line] in taken:
                raise DataError(f"expected each frame in one list; found {line!r} in {taken[places[line]]} and {name}.")
            taken[places[line]] = name
            found[name].append(places[line])
    return {name: sorted(indices) for name, indices in found.items()}


def _roi(folder: Path, size: tuple[int, int] | None) -> Mask | None:
    path = folder / "roi.png"
    return read_roi(path, size) if path.is_file() else None


def _perspective(folder: Path, size: tuple[int, int] | None) -> Floats | None:
    there = [path for path in (folder / f"perspective.{end}" for end in ("npy", "csv", "png")) if path.is_file()]
    if not there:
        return None
    path = there[0]
    try:
        if path.suffix == ".png":
            found = read_image(path)[0].double().numpy()
        else:
            table = partial(np.loadtxt, delimiter=",", ndmin=2)
            found = np.load(path, "r", allow_pickle=False) if path.suffix == ".npy" else table(path)
        values: Floats = np.asarray(found, dtype=np.float64)
    except (ValueError, OSError, EOFError) as error:
        raise FileError(f"expected a map of numbers in {path}; {error}.") from error
    _check_map("perspective map", values.shape, size, path)
    return values


def _check_map(what: str, shape: Sequence[int], size: tuple[int, int] | None, path: Path) -> None:
    if size is None or tuple(shape) != size:
        by = " and frames of one size" if size is None else f" of {size[0]} x {size[1]} pixels, as its frames are"
        found = "several sizes" if size is None else " x ".join(map(str, shape))
        raise DataError(f"expected a {what}{by}, in {path}; found {found}. Make them fit, or remove it.")
