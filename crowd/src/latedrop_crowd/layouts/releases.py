"""Mall, UCSD and PETS2009 as they were released; what is missing or malformed is named.

- Mall: 2000 frames of one camera, of which the first 800 are train (Chen, Loy, Gong, Xiang, "Feature Mining for
  Localised Crowd Counting", 2012).
- UCSD: ten clips of 200 frames, of which clips 3 to 6 are train (Chan, Liang, Vasconcelos, "Privacy Preserving Crowd
  Monitoring", 2008).
- PETS2009, S1.L1, view 1, the camera that has annotations: time 13-57 is train, 13-59 is test; heads come from person
  boxes (Ferryman, Shahrokni, "PETS2009: Dataset and Challenge", 2009).
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latedrop.errors import DataError, FileError
from latedrop_crowd.layouts.crowd_set import CrowdSet, Floats, Frame, of_one_size

__all__ = ["read_mall", "read_pets", "read_ucsd", "some"]

_AGAIN = "Unpack the release again."
_MALL_FRAMES, _MALL_TRAIN = 2000, 800
_UCSD_CLIPS, _UCSD_TRAIN, _UCSD_LENGTH = range(10), range(3, 7), 200
_PETS_TIMES = {"13-57": 1, "13-59": 2}  # the first is train; the numbers are those of the annotation files
_PETS_HEAD = 0.1  # of the height of a person's box, from its top: the middle of the head


def read_mall(folder: Path, use_roi: bool) -> tuple[CrowdSet, int]:
    """The frames, not yet split, and how many of them are the standard training frames; these come first."""
    folder = _inner(folder, "mall_dataset", "mall_gt.mat")
    file = folder / "mall_gt.mat"
    truth = _load_mat(file, "frame", "count")
    cells, counts = truth["frame"].ravel(), truth["count"].ravel()
    if not len(cells) == len(counts) == _MALL_FRAMES:
        raise DataError(
            f"expected points and counts of {_MALL_FRAMES} frames in {file}; found {len(cells)} and {len(counts)}. "
            f"{_AGAIN}"
        )
    paths = _existing(folder / "frames", [f"seq_{number + 1:06d}.jpg" for number in range(_MALL_FRAMES)])
    frames = []
    for path, cell, count in zip(paths, cells, counts, strict=True):
        points = _points(cell, "loc", f"{path.stem} in {file}")
        if len(points) != int(count):
            raise DataError(
                f"expected as many points as the count of {path.stem} in {file}, {int(count)}; found {len(points)}. "
                f"{_AGAIN}"
            )
        frames.append(Frame(path.stem, path, points))
    maps = folder / "perspective_roi.mat"
    mask = _field(_load_mat(maps, "roi")["roi"], "mask", maps) if use_roi else None
    return of_one_size("mall", frames, mask, 4.0, maps), _MALL_TRAIN


def read_ucsd(folder: Path, use_roi: bool) -> tuple[CrowdSet, int]:
    """The same; clips 3 to 6 come first."""
    folder = _inner(folder, "ucsdpeds", "vidf-cvpr")
    clips = [*_UCSD_TRAIN, *(clip for clip in _UCSD_CLIPS if clip not in _UCSD_TRAIN)]
    frames = [frame for clip in clips for frame in _clip(folder, clip)]
    region = folder / "vidf-cvpr" / "vidf1_33_roi_mainwalkway.mat"
    mask = _field(_load_mat(region, "roi")["roi"], "mask", region) if use_roi else None
    return of_one_size("ucsd", frames, mask, 3.0, region), _UCSD_LENGTH * len(_UCSD_TRAIN)


def _clip(folder: Path, clip: int) -> list[Frame]:
    stem = f"vidf1_33_{clip:03d}"
    file = folder / "vidf-cvpr" / f"{stem}_frame_full.mat"
    cells = _load_mat(file, "frame")["frame"].ravel()
    if len(cells) != _UCSD_LENGTH:
        raise DataError(f"expected points of {_UCSD_LENGTH} frames in {file}; found {len(cells)}. {_AGAIN}")
    paths = _existing(folder / "vidf" / f"{stem}.y", [f"{stem}_f{i + 1:03d}.png" for i in range(_UCSD_LENGTH)])
    return [
        Frame(path.stem, path, _points(cell, "loc", f"{path.stem} in {file}"))
        for path, cell in zip(paths, cells, strict=True)
    ]


def read_pets(folder: Path) -> tuple[CrowdSet, int]:
    """The same."""
    folder = _inner(folder, "Crowd_PETS09", "S1")
    train, test = (_sequence(folder, time) for time in _PETS_TIMES)
    return of_one_size("pets", train + test, None, 8.0, folder), len(train)


def _sequence(folder: Path, time: str) -> list[Frame]:
    images = folder / "S1" / "L1" / f"Time_{time}" / "View_001"
    names = _numbered(images)
    file = folder / "annotations" / f"PETS2009-S1L1-{_PETS_TIMES[time]}.xml"
    if not file.is_file():
        raise FileError(f"expected person boxes for Time_{time} at {file}; there is no such file. Put it there.")
    heads = _heads(file)
    bare = [name for number, name in names.items() if number not in heads]
    if bare:
        raise DataError(f"expected boxes for each frame of {images} in {file}; found none for {some(bare)}. {_AGAIN}")
    missing = [f"frame_{number:04d}.jpg" for number in heads if number not in names]
    if missing:
        raise FileError(f"expected the {len(heads)} annotated frames in {images}; missing: {some(missing)}. {_AGAIN}")
    return [Frame(f"{time}/{Path(name).stem}", images / name, heads[number]) for number, name in names.items()]


def _numbered(folder: Path) -> dict[int, str]:
    """Names of frames by their numbers, in this order."""
    matches = [re.fullmatch(r"frame_(\d+)\.jpg", name) for name in _listed(folder)]
    names = {int(match[1]): match[0] for match in matches if match}
    if not names:
        raise FileError(f"expected files named frame_*.jpg in {folder}; found none. {_AGAIN}")
    return dict(sorted(names.items()))


def _heads(file: Path) -> dict[int, Floats]:
    """Heads by frame number, from the boxes of an annotation file."""
    try:
        root = ET.parse(file).getroot()
        heads = {
            int(frame.attrib["number"]): np.array([_head(box) for box in frame.iter("box")]).reshape(-1, 2)
            for frame in root.iter("frame")
        }
    except ET.ParseError as error:
        raise FileError(f"expected XML in {file}; {error}. {_AGAIN}") from error
    except (KeyError, ValueError) as error:
        raise DataError(f"expected numbered frames, and boxes with xc, yc, h in {file}; {error!r}. {_AGAIN}") from error
    if not heads:
        raise DataError(f"expected frames with person boxes in {file}; found none in <{root.tag}>. {_AGAIN}")
    return heads


def _head(box: ET.Element) -> tuple[float, float]:
    x, y, height = (float(box.attrib[key]) for key in ("xc", "yc", "h"))
    return x, y - height / 2 + _PETS_HEAD * height


def _inner(folder: Path, inner: str, wanted: str) -> Path:
    """The folder, or the one in it that an archive makes, whichever has what is wanted."""
    return folder / inner if not (folder / wanted).exists() and (folder / inner / wanted).exists() else folder


def _existing(folder: Path, names: Sequence[str]) -> list[Path]:
    """The paths of files that must all be there."""
    there = set(_listed(folder))
    missing = [name for name in names if name not in there]
    if missing:
        raise FileError(
            f"expected {len(names)} files in {folder}; {len(missing)} of them missing: {some(missing)}. {_AGAIN}"
        )
    return [folder / name for name in names]


def _listed(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FileError(f"expected the folder {folder}; there is none. {_AGAIN}")
    return os.listdir(folder)


def _load_mat(file: Path, *fields: str) -> dict[str, Any]:
    """The content of a MATLAB file that has these fields."""
    from scipy.io import loadmat

    if not file.is_file():
        raise FileError(f"expected {file.name} in {file.parent}; there is no such file. {_AGAIN}")
    try:
        content: dict[str, Any] = loadmat(file)
    # scipy raises many kinds of errors for a damaged file.
    except Exception as error:
        raise FileError(f"expected a MATLAB file at {file}; {error}. {_AGAIN}") from error
    missing = [field for field in fields if field not in content]
    if missing:
        there = ", ".join(key for key in content if not key.startswith("__")) or "nothing"
        raise DataError(f"expected {' and '.join(missing)} in {file}; found {there}. {_AGAIN}")
    return content


def _field(struct: Any, name: str, where: object) -> Any:
    """A field of a MATLAB struct, also of one inside a cell of one element."""
    while isinstance(struct, np.ndarray) and struct.dtype == object and struct.size == 1:
        struct = struct.item()
    names = getattr(getattr(struct, "dtype", None), "names", None) or ()
    if name not in names or struct.size != 1:
        there = ", ".join(names) or "no struct"
        raise DataError(f"expected a struct with {name} for {where}; found {there}. {_AGAIN}")
    return struct[name].item()


def _points(struct: Any, name: str, where: str) -> Floats:
    """The points of a frame from 0; MATLAB counts pixels from 1."""
    values = np.asarray(_field(struct, name, where))
    if values.size == 0:
        return np.zeros((0, 2))
    shape, kind = values.shape, values.dtype
    if values.ndim != 2 or shape[1] < 2 or kind.kind not in "iuf" or not np.isfinite(values[:, :2]).all():
        raise DataError(f"expected finite points (P, 2) for {where}; found shape {shape} of {kind}. {_AGAIN}")
    return values[:, :2].astype(np.float64) - 1


def some(names: Iterable[str]) -> str:
    """The first few names, and how many there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f", ... ({len(listed)} in all)" if len(listed) > 3 else "")
