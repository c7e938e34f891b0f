"""PETS2009, S1.L1: time 13-57 is train, 13-59 is test; heads come from person boxes.

Reference: Ferryman, Shahrokni, "PETS2009: Dataset and Challenge" (2009).
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

from latedrop.errors import DataError, FileError
from latedrop_crowd.layouts.crowd_set import CrowdSet, Floats, Frame, Part, of_one_size
from latedrop_crowd.layouts.release import AGAIN, inner_folder, numbered, some

__all__ = ["read_pets"]

_HEAD = 0.1  # of the height of a person's box, from its top: the middle of the head
_TIMES = {"13-57": 1, "13-59": 2}  # the first is train; the numbers are those of the annotation files


def read_pets(folder: Path, part: Part, view: int) -> tuple[CrowdSet, int]:
    """The frames, not yet split, and how many of them are the standard training frames; these come first."""
    folder = inner_folder(folder, "Crowd_PETS09", "S1")
    train, test = _TIMES
    of_train = _sequence(folder, train, view) if part != "test" else []
    of_test = _sequence(folder, test, view) if part != "train" else []
    return of_one_size("pets", of_train + of_test, None, None, 8.0, folder), len(of_train)


def _sequence(folder: Path, time: str, view: int) -> list[Frame]:
    images = folder / "S1" / "L1" / f"Time_{time}" / f"View_{view:03d}"
    names = numbered(images, "frame_*.jpg")
    file = _annotations(folder / "annotations", time, view)
    heads = _heads(file)
    bare = [name for number, name in names.items() if number not in heads]
    if bare:
        raise DataError(f"expected boxes for each frame of {images} in {file}; found none for {some(bare)}. {AGAIN}")
    missing = [f"frame_{number:04d}.jpg" for number in heads if number not in names]
    if missing:
        raise FileError(f"expected the {len(heads)} annotated frames in {images}; missing: {some(missing)}. {AGAIN}")
    return [Frame(f"{time}/{Path(name).stem}", images / name, heads[number]) for number, name in names.items()]


def _annotations(folder: Path, time: str, view: int) -> Path:
    name = f"PETS2009-S1L1-{_TIMES[time]}.xml"
    places = [folder / f"View_{view:03d}" / name, *([folder / name] if view == 1 else [])]
    for place in places:
        if place.is_file():
            return place
    raise FileError(
        f"expected person boxes for Time_{time}, view {view}, at {' or '.join(map(str, places))}; the frames are "
        "there, the boxes are not. Use a view that has annotations, or put them there."
    )


def _heads(file: Path) -> dict[int, Floats]:
    """Heads by frame number, from the boxes of an annotation file."""
    try:
        root = ET.parse(file).getroot()
        heads = {
            int(frame.attrib["number"]): np.array([_head(box) for box in frame.iter("box")]).reshape(-1, 2)
            for frame in root.iter("frame")
        }
    except ET.ParseError as error:
        raise FileError(f"expected XML in {file}; {error}. {AGAIN}") from error
    except (KeyError, ValueError) as error:
        raise DataError(f"expected numbered frames, and boxes with xc, yc, h in {file}; {error!r}. {AGAIN}") from error
    if not heads:
        raise DataError(f"expected frames with person boxes in {file}; found none in <{root.tag}>. {AGAIN}")
    return heads


def _head(box: ET.Element) -> tuple[float, float]:
    x, y, height = (float(box.attrib[key]) for key in ("xc", "yc", "h"))
    return x, y - height / 2 + _HEAD * height
