"""Mall, UCSD and PETS2009 as they were released.

- Mall: 2000 frames of one camera, of which the first 800 are train (Chen, Loy, Gong, Xiang, "Feature Mining for
  Localised Crowd Counting", 2012).
- UCSD: ten clips of 200 frames, of which clips 3 to 6 are train (Chan, Liang, Vasconcelos, "Privacy Preserving Crowd
  Monitoring", 2008).
- PETS2009, S1.L1, view 1, the camera that has annotations: time 13-57 is train, 13-59 is test; heads come from person
  boxes (Ferryman, Shahrokni, "PETS2009: Dataset and Challenge", 2009).
"""

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from latedrop.errors import DataError, FileError
from latedrop_crowd.frames import image_shape
from latedrop_crowd.layouts.crowd_set import CrowdSet, Floats, Frame

__all__ = ["RELEASES", "read_release"]

Parts: TypeAlias = tuple[list[Frame], list[Frame]]
_UCSD_TRAIN = range(3, 7)  # of ten clips
_PETS_HEAD = 0.1  # of the height of a person's box, from its top: the middle of the head


class Release(NamedTuple):
    """How a set was released."""

    archive: str  # the folder that its archive makes
    marker: str  # a file or folder in that folder
    frames: Callable[[Path], Parts]  # reads the standard training and test frames from the folder
    sigma: float  # of the density kernel in pixels
    clips: int = 1  # how many clips the training frames are of
    roi: str | None = None  # file of the region of interest; None: the set has none
    inside: bool = False  # whether the protocol counts inside the region only


def read_release(name: str, folder: Path, use_roi: bool | None) -> CrowdSet:
    """Read a set with its standard split; the last fifth of each training clip validates."""
    release = RELEASES[name]
    inner = folder / release.archive
    folder = inner if not (folder / release.marker).exists() and (inner / release.marker).exists() else folder
    train, test = release.frames(folder)
    stretches = np.array_split(np.arange(len(train)), release.clips)
    validation = [int(i) for stretch in stretches for i in stretch[len(stretch) - len(stretch) // 5 :]]
    size, roi = image_shape(train[0].path or folder), None
    if release.roi is not None and (release.inside if use_roi is None else use_roi):
        with _mat(folder / release.roi) as content:
            roi = np.asarray(content["roi"].mask).astype(np.bool_)
        if roi.shape != size:
            raise DataError(
                f"expected a region of interest of the frames' {size[0]} x {size[1]} pixels in {release.roi}; found "
                f"{roi.shape}. Use files of one release."
            )
    return CrowdSet(
        name,
        (*train, *test),
        tuple(sorted(set(range(len(train))) - set(validation))),
        tuple(validation),
        tuple(range(len(train), len(train) + len(test))),
        roi,
        release.sigma,
        size=size,
    )


def _mall(folder: Path) -> Parts:
    frames = _matlab(folder / "mall_gt.mat", folder / "frames", "seq_{:06d}.jpg", 2000)
    return frames[:800], frames[800:]


def _ucsd(folder: Path) -> Parts:
    parts: Parts = ([], [])
    for clip in range(10):
        stem = f"vidf1_33_{clip:03d}"
        truth, images = folder / "vidf-cvpr" / f"{stem}_frame_full.mat", folder / "vidf" / f"{stem}.y"
        parts[clip not in _UCSD_TRAIN].extend(_matlab(truth, images, f"{stem}_f{{:03d}}.png", 200))
    return parts


def _pets(folder: Path) -> Parts:
    train, test = (_pets_clip(folder, time, number) for number, time in enumerate(("13-57", "13-59"), 1))
    return train, test


def _pets_clip(folder: Path, time: str, number: int) -> list[Frame]:
    images = folder / "S1" / "L1" / f"Time_{time}" / "View_001"
    file = folder / "annotations" / f"PETS2009-S1L1-{number}.xml"
    with _understood(file):
        heads = {
            int(frame.attrib["number"]): np.array([_head(box) for box in frame.iter("box")]).reshape(-1, 2)
            for frame in ET.parse(file).getroot().iter("frame")
        }
        names = {frame: f"frame_{frame:04d}" for frame in sorted(heads)}
        _check_number(len(list(images.glob("frame_*.jpg"))), len(heads))
    return [Frame(f"{time}/{name}", images / f"{name}.jpg", heads[frame]) for frame, name in names.items()]


def _head(box: ET.Element) -> tuple[float, float]:
    x, y, height = (float(box.attrib[key]) for key in ("xc", "yc", "h"))
    return x, y - height / 2 + _PETS_HEAD * height


def _matlab(file: Path, images: Path, pattern: str, number: int) -> list[Frame]:
    """Frames of a folder, numbered from 1, with the points that `frame{i}.loc` of a MATLAB file has."""
    with _mat(file) as content:
        points = [_points(frame.loc) for frame in content["frame"]]
        _check_number(len(points), number)
    paths = [images / pattern.format(i + 1) for i in range(number)]
    return [Frame(path.stem, path, heads) for path, heads in zip(paths, points, strict=True)]


def _points(values: Any) -> Floats:
    """The points of a frame from 0; MATLAB counts pixels from 1."""
    points = np.atleast_2d(np.asarray(values, dtype=np.float64)) if np.size(values) else np.zeros((0, 2))
    if points.shape[1] < 2 or not np.isfinite(points[:, :2]).all():
        raise ValueError(f"points of shape {points.shape}, or some that are not finite")
    return points[:, :2] - 1


def _check_number(number: int, expected: int) -> None:
    if number != expected:
        raise ValueError(f"{number} frames instead of {expected}")


@contextmanager
def _mat(file: Path) -> Iterator[dict[str, Any]]:
    """The content of a MATLAB file while it is looked at."""
    from scipy.io import loadmat

    with _understood(file):
        yield loadmat(file, squeeze_me=True, struct_as_record=False)


@contextmanager
def _understood(file: Path) -> Iterator[None]:
    """Raise `FileError` where an annotation file is missing, damaged, or not as it was released."""
    if not file.is_file():
        raise FileError(f"expected annotations at {file}; there is no such file. Unpack the release again.")
    try:
        yield
    except Exception as error:  # scipy and XML raise many kinds of errors for a damaged file
        raise FileError(
            f"expected annotations as released in {file}; {type(error).__name__}: {error}. Unpack the release again."
        ) from error


RELEASES = {
    "mall": Release("mall_dataset", "mall_gt.mat", _mall, 4.0, roi="perspective_roi.mat"),
    "ucsd": Release(
        "ucsdpeds", "vidf-cvpr", _ucsd, 3.0, clips=4, roi="vidf-cvpr/vidf1_33_roi_mainwalkway.mat", inside=True
    ),
    "pets": Release("Crowd_PETS09", "S1", _pets, 8.0),
}
