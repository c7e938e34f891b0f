"""Heads, or counts alone, by frame: from CSV, JSON points, or COCO keypoints.

Every frame that is used must be in the file. One without people is a row with empty x and y, `"f3.png": []`, or, in
COCO, an image without annotations: a frame that is merely missing is an error, not an empty one.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np

from latedrop.errors import DataError
from latedrop.files import parsed, read_text
from latedrop_crowd.frames import is_video
from latedrop_crowd.layouts.crowd_set import Floats

__all__ = ["Heads", "csv_rows", "names_of", "read_counts", "read_heads"]

Heads: TypeAlias = dict[str, Floats]
"""By the name of their frame, `(P, 2)` as x, y in pixels from 0."""
_HEADS = ("head", "head_top", "nose", "left_eye", "right_eye", "left_ear", "right_ear")
_PEOPLE = ("person", "people", "pedestrian", "head")
_BOX = 0.1  # of a box's height below its top: the middle of the head


def read_heads(path: Path) -> Heads:
    """The heads of each frame in `heads.csv` (frame, x, y) or `heads.json` (points by frame, or COCO keypoints)."""
    if path.suffix.lower() == ".csv":
        points: dict[str, list[tuple[float, float]]] = {}
        for line, row in csv_rows(path, "frame", "x", "y"):
            of_frame = points.setdefault(row["frame"], [])
            if row["x"] or row["y"]:
                of_frame.append((_number(row["x"], path, line), _number(row["y"], path, line)))
        found: Heads = {name: np.array(values, dtype=np.float64).reshape(-1, 2) for name, values in points.items()}
    else:
        content = parsed(read_text(path, "heads of people"), f"heads of people in {path}", "Write it again.")
        coco = isinstance(content, dict) and {"images", "annotations"} <= set(content)
        found = _coco(content, path) if coco else _points(content, path)
    if not found:
        raise DataError(f"expected the heads of at least one frame in {path}; found none.")
    return found


def read_counts(path: Path) -> dict[str, int]:
    """How many people each frame has, from a CSV of frame and count."""
    found: dict[str, int] = {}
    for line, row in csv_rows(path, "frame", "count"):
        value = _number(row["count"], path, line)
        if value < 0 or value != int(value):
            raise DataError(f"expected whole numbers of people in {path}; found {row['count']!r} on line {line}.")
        if found.setdefault(row["frame"], int(value)) != int(value):
            raise DataError(f"expected one count for each frame in {path}; found two for {row['frame']!r}.")
    if not found:
        raise DataError(f"expected the count of at least one frame in {path}; found none.")
    return found


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


def csv_rows(path: str | os.PathLike[str], *columns: str) -> Iterable[tuple[int, dict[str, str]]]:
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


def _points(content: Any, path: Path) -> Heads:
    """Points by frame: `{"f1.png": [[x, y], ...], ...}`."""
    if not isinstance(content, Mapping):
        raise DataError(
            f'expected points by frame, {{"f1.png": [[x, y], ...]}}, or COCO in {path}; found a '
            f"{type(content).__name__}."
        )
    return {str(name): _array(values, name, path) for name, values in content.items()}


def _array(values: Any, name: object, path: Path) -> Floats:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.full(1, np.nan)
    found = found.reshape(0, 2) if found.size == 0 else found
    if found.ndim != 2 or found.shape[1] != 2 or not np.isfinite(found).all():
        raise DataError(f"expected finite points [[x, y], ...] for {name!r} in {path}; found something else.")
    return found


def _coco(content: Mapping[str, Any], path: Path) -> Heads:
    try:
        names = {image["id"]: str(image["file_name"]) for image in content["images"]}
        people = _people(content.get("categories", ()), path)
        skeletons = {kind["id"]: list(kind.get("keypoints", ())) for kind in people}
        heads: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
        for person in content["annotations"]:
            name = names[person["image_id"]]
            if people and person.get("category_id") not in skeletons:
                continue
            if person.get("iscrowd"):
                raise DataError(
                    f"expected one annotation for each person in {path}; found a crowd as one in {name!r}. Annotate "
                    "its people, or leave the image out."
                )
            heads[name].append(_head(person, skeletons.get(person.get("category_id"), [])))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"expected COCO in {path}: images with id and file_name, annotations with image_id, keypoints or bbox; "
            f"{type(error).__name__}: {error}."
        ) from error
    return {name: _array(values, name, path) for name, values in heads.items()}


def _people(kinds: Sequence[Mapping[str, Any]], path: Path) -> list[Mapping[str, Any]]:
    """The categories that are people: the only one, or those with keypoints or such a name."""
    named = [kind for kind in kinds if kind.get("keypoints") or str(kind.get("name", "")).strip().lower() in _PEOPLE]
    if len(kinds) > 1 and not named:
        found = ", ".join(repr(kind.get("name")) for kind in kinds)
        raise DataError(
            f"expected a category of people in {path}, with keypoints or called {' or '.join(_PEOPLE)}; found {found}. "
            "Rename it."
        )
    return named if len(kinds) > 1 else list(kinds)


def _head(person: Mapping[str, Any], skeleton: list[str]) -> tuple[float, float]:
    """The head where it is visible, else what else of the face is, else below the top of the box."""
    flat = person.get("keypoints") or []
    visible = {
        (skeleton[i] if i < len(skeleton) else str(i)): (float(flat[3 * i]), float(flat[3 * i + 1]))
        for i in range(len(flat) // 3)
        if flat[3 * i + 2] > 0
    }
    for name in _HEADS if skeleton else visible:
        if name in visible:
            return visible[name]
    x, y, width, height = (float(value) for value in person["bbox"])
    return x + width / 2, y + _BOX * height
