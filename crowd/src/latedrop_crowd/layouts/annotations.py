"""Heads, or counts alone, by frame, from CSV.

Every frame that is used must be in the file. One without people is a row with empty x and y: a frame that is merely
missing is an error, not an empty one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
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
