"""Heads, or counts alone, by frame, from CSV.

Every frame that is used must be in the file. One without people is a row with empty x and y: a frame that is merely
missing is an error, not an empty one.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import numpy as np

from latedrop.errors import DataError
from latedrop.files import read_text
from latedrop_crowd.frames import is_video
from latedrop_crowd.layouts.crowd_set import Floats

__all__ = ["Heads", "names_of", "read_counts", "read_heads"]

Heads: TypeAlias = dict[str, Floats]
"""By the name of their frame, `(P, 2)` as x, y in pixels from 0."""


def read_heads(path: Path) -> Heads:
    """The heads of each frame, from columns frame, x and y."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line, row in _rows(path, "frame", "x", "y"):
        of_frame = points.setdefault(row["frame"], [])
        if row["x"] or row["y"]:
            of_frame.append((_number(row["x"], path, line), _number(row["y"], path, line)))
    if not points:
        raise DataError(f"expected the heads of at least one frame in {path}; found none.")
    return {name: np.array(values, dtype=np.float64).reshape(-1, 2) for name, values in points.items()}


def read_counts(path: Path) -> dict[str, int]:
    """How many people each frame has, from columns frame and count."""
    counts: dict[str, int] = {}
    for line, row in _rows(path, "frame", "count"):
        value = _number(row["count"], path, line)
        if value < 0 or value != int(value):
            raise DataError(f"expected whole numbers of people in {path}; found {row['count']!r} on line {line}.")
        if counts.setdefault(row["frame"], int(value)) != int(value):
            raise DataError(f"expected one count for each frame in {path}; found two for {row['frame']!r}.")
    if not counts:
        raise DataError(f"expected the count of at least one frame in {path}; found none.")
    return counts


def names_of(frame: str) -> tuple[str, str, str]:
    """What a file may call a frame: its name; its path without the ending; the name without either.

    A frame of a video is called `clip.mp4#000012`, `clip.mp4#12`, or `12` where only one video is meant.

    >>> names_of("lobby/f01.png"), names_of("clip.mp4#000000")
    (('lobby/f01.png', 'lobby/f01', 'f01'), ('clip.mp4#000000', 'clip.mp4#0', '0'))
    """
    video, _, number = frame.rpartition("#")
    if number.isdecimal() and is_video(Path(video)):
        return frame, f"{video}#{int(number)}", str(int(number))
    path = PurePosixPath(frame)
    return frame, frame.removesuffix(path.suffix), path.stem


def _rows(path: str | os.PathLike[str], *columns: str) -> Iterable[tuple[int, dict[str, str]]]:
    """Lines of a CSV file as far as some columns go, with their numbers."""
    reader = csv.DictReader(read_text(path, "annotations").splitlines())
    names = [(name or "").strip().lower() for name in reader.fieldnames or ()]
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(
            f"expected the columns {', '.join(columns)} in {path}; missing: {', '.join(missing)}, found "
            f"{', '.join(names) or 'nothing'}. Write them in its first line."
        )
    reader.fieldnames = names
    for row in reader:
        values = {name: (row[name] or "").strip() for name in columns}
        if not values["frame"]:
            raise DataError(f"expected the name of a frame on line {reader.line_num} of {path}; found none.")
        yield reader.line_num, values


def _number(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise DataError(f"expected a number on line {line} of {path}; found {text!r}.")
    return value
