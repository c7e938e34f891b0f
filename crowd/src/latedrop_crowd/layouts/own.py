"""Frames of your own: a folder of images, with heads or counts beside them.

    DIR/frames/*.png, or the images in DIR itself
    DIR/heads.csv (frame, x, y), or DIR/counts.csv (frame, count)
    DIR/train.txt, DIR/validation.txt, DIR/test.txt      names of frames, one a line; optional
    DIR/roi.png                                          pixels that are not black count; optional

Frames are named by their file, with or without its ending. Without the three lists the annotated frames are split in
their order: three fifths train, one validation, one test.

Every frame that is used must be in the CSV file. One without people is a row with empty x and y: a frame that is merely
missing is an error, not an empty one.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from latedrop.errors import DataError, FileError
from latedrop.files import read_text
from latedrop_crowd.frames import images_in, is_video, read_image
from latedrop_crowd.layouts.crowd_set import CrowdSet, Floats, Frame, Mask

__all__ = ["names_of", "read_counts", "read_own", "read_roi"]

_PARTS = ("train", "validation", "test")
_ROI = "roi.png"


def read_own(folder: Path, use_roi: bool = True) -> CrowdSet:
    """The annotated frames of a folder, split."""
    frames = _frames(folder, _annotations(folder))
    opened = CrowdSet("own", tuple(frames), (), (), ())
    shapes = {opened.shape(index) for index in range(len(frames))}
    size, roi = shapes.pop() if len(shapes) == 1 else None, None
    if use_roi and (folder / _ROI).is_file():
        roi = read_roi(folder / _ROI)
        if roi.shape != size:
            raise DataError(
                f"expected frames of one size beside {folder / _ROI}, {roi.shape[0]} x {roi.shape[1]} pixels as it is; "
                f"found {size or 'several'}. Make them fit, or remove it."
            )
    return replace(opened, roi=roi, size=size, **_split(folder, frames))


def read_roi(path: Path) -> Mask:
    """The region of interest in an image, bool `(H, W)`: whatever is not black."""
    mask: Mask = read_image(path)[0].numpy() > 0
    if not mask.any():
        raise DataError(f"expected pixels that are not black in {path}, which are counted; found none.")
    return mask


def _annotations(folder: Path) -> Mapping[str, Floats | int]:
    paths = [path for path in (folder / "heads.csv", folder / "counts.csv") if path.is_file()]
    if len(paths) != 1:
        names = " and ".join(path.name for path in paths) or "none of them"
        raise FileError(f"expected heads.csv or counts.csv in {folder}; found {names}. Put one there.")
    return read_counts(paths[0]) if paths[0].name == "counts.csv" else read_heads(paths[0])


def _frames(folder: Path, annotations: Mapping[str, Floats | int]) -> list[Frame]:
    left, frames = dict(annotations), []
    images = folder / "frames" if (folder / "frames").is_dir() else folder
    for path in images_in(images):
        name = path.name if path.name in annotations else path.stem
        if name not in annotations or path.name == _ROI:
            continue
        if name not in left:
            raise DataError(f"expected one frame named {name}; found {path} and another. Annotate them by full names.")
        value = left.pop(name)
        points, people = (np.zeros((0, 2)), value) if isinstance(value, int) else (value, None)
        frames.append(Frame(path.name, path, points, people=people))
    if left:
        raise FileError(f"expected the annotated frames in {images}; missing: {_some(left)}. Put them there.")
    return frames


def _split(folder: Path, frames: Sequence[Frame]) -> dict[str, Any]:
    """Indices of the frames by part: as listed, or in their order."""
    lists = {name: folder / f"{name}.txt" for name in _PARTS if (folder / f"{name}.txt").is_file()}
    if not lists:
        ends = [round(len(frames) * share / 5) for share in (0, 3, 4, 5)]
        return {name: tuple(range(ends[i], ends[i + 1])) for i, name in enumerate(_PARTS)}
    places = {name: index for index, frame in enumerate(frames) for name in (Path(frame.name).stem, frame.name)}
    indices: dict[str, list[int]] = {name: [] for name in _PARTS}
    for name, path in lists.items():
        lines = [line.strip() for line in read_text(path, "names of frames").splitlines()]
        for line in (line for line in lines if line and not line.startswith("#")):
            if line not in places:
                raise DataError(
                    f"expected names of annotated frames in {path}; found {line!r}, which is not annotated. One "
                    "without people is a row with empty x and y."
                )
            indices[name].append(places[line])
    listed = [index for part in indices.values() for index in part]
    if not listed or len(set(listed)) < len(listed):
        twice = [frames[index].name for index in set(listed) if listed.count(index) > 1]
        raise DataError(f"expected each frame in one of the lists in {folder}; found {_some(twice) or 'none'}.")
    return {name: tuple(sorted(part)) for name, part in indices.items()}


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f", ... ({len(listed)} in all)" if len(listed) > 3 else "")


def read_heads(path: Path) -> dict[str, Floats]:
    """The heads `(P, 2)` of each frame, x and y in pixels from 0, from columns frame, x and y."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line, row in _rows(path, "frame", "x", "y"):
        heads = points.setdefault(row["frame"], [])
        if row["x"] or row["y"]:
            heads.append((_number(row["x"], path, line), _number(row["y"], path, line)))
    return {name: np.array(values, dtype=np.float64).reshape(-1, 2) for name, values in points.items()}


def read_counts(path: Path) -> dict[str, int]:
    """The number of people in each frame, from columns frame and count."""
    counts: dict[str, int] = {}
    for line, row in _rows(path, "frame", "count"):
        value = _number(row["count"], path, line)
        if value < 0 or value != int(value) or counts.setdefault(row["frame"], int(value)) != value:
            raise DataError(
                f"expected one whole number of people for each frame in {path}; found {row['count']!r} for "
                f"{row['frame']!r} on line {line}."
            )
    return counts


def names_of(frame: str) -> tuple[str, str, str]:
    """Names that a file may call a frame by: its own, that without the ending, and that without folders either.

    A frame of a video is called `clip.mp4#000012`, `clip.mp4#12`, or `12` where only one video is meant.

    >>> names_of("lobby/f01.png"), names_of("clip.mp4#000000")
    (('lobby/f01.png', 'lobby/f01', 'f01'), ('clip.mp4#000000', 'clip.mp4#0', '0'))
    """
    video, _, number = frame.rpartition("#")
    if number.isdecimal() and is_video(Path(video)):
        return frame, f"{video}#{int(number)}", str(int(number))
    path = PurePosixPath(frame)
    return frame, frame.removesuffix(path.suffix), path.stem


def _rows(path: Path, *columns: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Some columns of a CSV file, line by line, with the number of the line; at least one."""
    reader = csv.DictReader(read_text(path, "annotations").splitlines())
    reader.fieldnames = names = [(name or "").strip().lower() for name in reader.fieldnames or ()]
    if not set(columns) <= set(names):
        raise DataError(
            f"expected the columns {', '.join(columns)} in the first line of {path}; found "
            f"{', '.join(names) or 'nothing'}. Name them."
        )
    for row in reader:
        values = {name: (row[name] or "").strip() for name in columns}
        if not values["frame"]:
            raise DataError(f"expected the name of a frame on line {reader.line_num} of {path}; found none.")
        yield reader.line_num, values
    if reader.line_num < 2:
        raise DataError(f"expected annotations of at least one frame in {path}; found none.")


def _number(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise DataError(f"expected a number on line {line} of {path}; found {text!r}.")
    return value
