"""Annotated frames of people: Mall, UCSD, PETS2009 and ShanghaiTech as they were released, and their standard splits.

A set is read from its folder: annotations at once, images when they are asked for. What is missing or malformed is
named. Validation frames are the last fifth of each clip of the standard *training* frames, in one run, as neighbouring
frames of a video look alike; test frames are for testing only.

References: Chen, Loy, Gong, Xiang, "Feature Mining for Localised Crowd Counting" (2012), for Mall. Chan, Liang,
Vasconcelos, "Privacy Preserving Crowd Monitoring" (2008), for UCSD. Ferryman, Shahrokni, "PETS2009: Dataset and
Challenge" (2009). Zhang, Zhou, Chen, Gao, Ma, "Single-Image Crowd Counting via Multi-Column Convolutional Neural
Network" (2016), for ShanghaiTech.
"""

from __future__ import annotations

import os
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from latedrop.crowd.density import adaptive_sigma, density_map, heads_inside
from latedrop.crowd.frames import image_shape, read_image, to_tensor
from latedrop.crowd.mcnn import STRIDE
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError, LatedropWarning

__all__ = ["SETS", "CrowdSet", "Frame", "Part", "Sigma", "open_set"]

Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Part: TypeAlias = Literal["all", "train", "test"]
Sigma: TypeAlias = "float | Literal['adaptive']"

SETS = ("mall", "ucsd", "pets", "shanghaitech-a", "shanghaitech-b")
"""The sets that `open_set` knows."""
_AGAIN = "Unpack the release again."
_HEAD = 0.1  # of the height of a person's box, from its top: the middle of the head
_MALL_FRAMES, _MALL_TRAIN = 2000, 800
_UCSD_CLIPS, _UCSD_TRAIN, _UCSD_LENGTH = range(10), range(3, 7), 200
_CLIPS = {"ucsd": len(_UCSD_TRAIN)}  # of the standard training frames; one where it is not said
_PETS_TIMES = {"13-57": 1, "13-59": 2}  # the first is train; the numbers are those of the annotation files
_SHANGHAITECH = {"A": (300, 182), "B": (400, 316)}  # training and test images


@dataclass(frozen=True)
class Frame:
    """One annotated frame.

    Attributes:
        name: of the frame in its set, such as `seq_000001`.
        path: the image file; None: made in memory.
        points: heads `(P, 2)` as x, y in pixels, all that are annotated, also those outside the region of interest.
        pixels: the image where it was made in memory, uint8 `(H, W)` or `(H, W, 3)`.
    """

    name: str
    path: Path | None
    points: Floats
    pixels: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class CrowdSet:
    """Annotated frames and how they are split; everything is in pixels of the frames that `image` gives.

    Attributes:
        name: one of `SETS`, or `scenes`.
        frames: those of the parts that were opened, the standard training frames first.
        train: indices of `frames` to train on.
        validation: indices to choose with, from the standard training frames.
        test: indices of the standard test frames.
        roi: pixels that count, bool `(H, W)`; None: all.
        perspective: the set's own map of how large people are, `(H, W)`; None: it has none.
        sigma: of the density kernel in pixels, or `"adaptive"`.
        enlarge: how many times larger than their files the frames are.
        size: `(H, W)` of all frames; None where they differ.
    """

    name: str
    frames: tuple[Frame, ...]
    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]
    roi: Mask | None = None
    perspective: Floats | None = None
    sigma: Sigma = 4.0
    enlarge: int = 1
    size: tuple[int, int] | None = None

    def image(self, index: int, channels: int = 1) -> Tensor:
        """The frame, `(channels, H, W)` float32 in [0, 1]; luma for one channel, RGB for three."""
        frame = self.frames[index]
        image = read_image(frame.path, channels) if frame.path else to_tensor(_made(frame), channels)
        if self.enlarge > 1:
            image = F.interpolate(image[None], scale_factor=self.enlarge, mode="bilinear", align_corners=False)[0]
        found = tuple(image.shape[1:])
        if self.size is not None and found != self.size:
            raise DataError(
                f"expected frames of {_by(self.size, self.enlarge)} pixels in {self.name}; found "
                f"{_by(found, self.enlarge)} in {frame.path or frame.name}. Points would be off: restore the file."
            )
        return image

    def shape(self, index: int) -> tuple[int, int]:
        """`(H, W)` of a frame in pixels."""
        if self.size is not None:
            return self.size
        frame = self.frames[index]
        height, width = image_shape(frame.path) if frame.path else _made(frame).shape[:2]
        return height * self.enlarge, width * self.enlarge

    def density(self, index: int) -> Tensor:
        """The map to learn, `(1, H // 4, W // 4)` float32: people per cell, inside frame and region of interest."""
        points, shape = self.frames[index].points, self.shape(index)
        points = points[heads_inside(points, shape, self.roi)]
        # The bounds of adaptive widths are in pixels of the file.
        sigma = adaptive_sigma(points / self.enlarge) * self.enlarge if self.sigma == "adaptive" else self.sigma
        return torch.from_numpy(density_map(points, shape, sigma, self.roi, stride=STRIDE))[None]

    def count(self, index: int) -> int:
        """Heads inside frame and region of interest: what `density` sums to."""
        return int(heads_inside(self.frames[index].points, self.shape(index), self.roi).sum())

    def summary(self) -> dict[str, Any]:
        """What is in the set, as plain JSON: points in all and left out, and frames and counts of each part."""
        shapes = [self.shape(index) for index in range(len(self.frames))]
        total = sum(len(frame.points) for frame in self.frames)
        inside = sum(int(heads_inside(f.points, shape).sum()) for f, shape in zip(self.frames, shapes, strict=True))
        counts = np.array([self.count(index) for index in range(len(self.frames))])
        found: dict[str, Any] = {
            "points": total,
            "outside the frame": total - inside,
            "outside the region of interest": inside - int(counts.sum()),
            "counted": int(counts.sum()),
        }
        for part in ("train", "validation", "test"):
            chosen = counts[list(getattr(self, part))]
            found[part] = {"frames": len(chosen)} | (
                {"people": int(chosen.sum()), "mean": float(chosen.mean()), "std": float(chosen.std()),
                 "least": int(chosen.min()), "most": int(chosen.max())} if len(chosen) else {}
            )  # fmt: skip
        return found


def open_set(
    name: str,
    folder: str | os.PathLike[str],
    *,
    part: Part = "all",
    view: int = 1,
    enlarge: int = 1,
    use_roi: bool | None = None,
    validation_runs: int | None = None,
) -> CrowdSet:
    """Open a set in the layout of its release.

    Args:
        name: `mall`, `ucsd`, `pets`, `shanghaitech-a` or `shanghaitech-b`.
        folder: where it was unpacked.
        part: `"train"` asks only for the standard training frames, which become train and validation; `"test"` only
            for the test frames.
        view: the camera of PETS2009.
        enlarge: make frames this many times larger, and points, region of interest, perspective map and sigma with
            them.
        use_roi: count only inside the region of interest. None: as the set's protocol does (UCSD does; Mall has a
            region, but counts all heads).
        validation_runs: cut the training frames into so many stretches, and take the last fifth of each. None: one
            for each clip, four on UCSD and one elsewhere.

    Raises:
        ArgumentError: no such set, part or option.
        FileError: a folder or a file is missing or cannot be read.
        DataError: the annotations are not what the layout says.
    """
    runs = _CLIPS.get(name, 1) if validation_runs is None else validation_runs
    folder = _check_arguments(name, Path(folder), part, view, enlarge, use_roi, runs)
    if name == "mall":
        opened, standard = _mall(folder, part, bool(use_roi))
    elif name == "ucsd":
        opened, standard = _ucsd(folder, part, use_roi is not False)
    elif name == "pets":
        opened, standard = _pets(folder, part, view)
    else:
        opened, standard = _shanghaitech(folder, part, name)
    return _enlarged(_split(opened, standard, runs), int(enlarge))


def _mall(folder: Path, part: Part, use_roi: bool) -> tuple[CrowdSet, int]:
    folder = _descend(folder, "mall_dataset", "mall_gt.mat")
    file = folder / "mall_gt.mat"
    truth = _load_mat(file, "frame", "count")
    cells, counts = truth["frame"].ravel(), truth["count"].ravel()
    if not len(cells) == len(counts) == _MALL_FRAMES:
        raise DataError(
            f"expected points and counts of {_MALL_FRAMES} frames in {file}; found {len(cells)} and {len(counts)}. "
            f"{_AGAIN}"
        )
    numbers = range(_MALL_FRAMES)
    numbers = {"all": numbers, "train": numbers[:_MALL_TRAIN], "test": numbers[_MALL_TRAIN:]}[part]
    paths = _existing(folder / "frames", [f"seq_{number + 1:06d}.jpg" for number in numbers])
    frames = []
    for number, path in zip(numbers, paths, strict=True):
        points = _points(cells[number], "loc", f"{path.stem} in {file}")
        _check_count(points, counts[number], f"{path.stem} in {file}")
        frames.append(Frame(path.stem, path, points))
    maps = folder / "perspective_roi.mat"
    loaded = _load_mat(maps, "pMapN", "roi")
    mask = _field(loaded["roi"], "mask", maps) if use_roi else None
    return _of_one_size("mall", frames, mask, loaded["pMapN"], 4.0, maps), 0 if part == "test" else _MALL_TRAIN


def _ucsd(folder: Path, part: Part, use_roi: bool) -> tuple[CrowdSet, int]:
    folder = _descend(folder, "ucsdpeds", "vidf-cvpr")
    tested = [clip for clip in _UCSD_CLIPS if clip not in _UCSD_TRAIN]
    clips = {"all": [*_UCSD_TRAIN, *tested], "train": list(_UCSD_TRAIN), "test": tested}[part]
    frames = [frame for clip in clips for frame in _ucsd_clip(folder, clip)]
    maps = (folder / "vidf-cvpr" / "vidf1_33_roi_mainwalkway.mat", folder / "vidf-cvpr" / "vidf1_33_dmap3.mat")
    mask = _field(_load_mat(maps[0], "roi")["roi"], "mask", maps[0]) if use_roi else None
    perspective = _field(_load_mat(maps[1], "dmap")["dmap"], "pmapxy", maps[1])
    opened = _of_one_size("ucsd", frames, mask, perspective, 3.0, folder / "vidf-cvpr")
    return opened, 0 if part == "test" else _UCSD_LENGTH * len(_UCSD_TRAIN)


def _ucsd_clip(folder: Path, clip: int) -> list[Frame]:
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


def _pets(folder: Path, part: Part, view: int) -> tuple[CrowdSet, int]:
    folder = _descend(folder, "Crowd_PETS09", "S1")
    train, test = _PETS_TIMES
    of_train = _pets_sequence(folder, train, view) if part != "test" else []
    of_test = _pets_sequence(folder, test, view) if part != "train" else []
    return _of_one_size("pets", of_train + of_test, None, None, 8.0, folder), len(of_train)


def _pets_sequence(folder: Path, time: str, view: int) -> list[Frame]:
    images = folder / "S1" / "L1" / f"Time_{time}" / f"View_{view:03d}"
    names = _numbered(images, "frame_*.jpg")
    file = _pets_annotations(folder / "annotations", time, view)
    heads = _pets_heads(file)
    bare = [name for number, name in names.items() if number not in heads]
    if bare:
        raise DataError(f"expected boxes for each frame of {images} in {file}; found none for {_some(bare)}. {_AGAIN}")
    missing = [f"frame_{number:04d}.jpg" for number in heads if number not in names]
    if missing:
        raise FileError(f"expected the {len(heads)} annotated frames in {images}; missing: {_some(missing)}. {_AGAIN}")
    return [Frame(f"{time}/{Path(name).stem}", images / name, heads[number]) for number, name in names.items()]


def _pets_annotations(folder: Path, time: str, view: int) -> Path:
    name = f"PETS2009-S1L1-{_PETS_TIMES[time]}.xml"
    places = [folder / f"View_{view:03d}" / name, *([folder / name] if view == 1 else [])]
    for place in places:
        if place.is_file():
            return place
    raise FileError(
        f"expected person boxes for Time_{time}, view {view}, at {' or '.join(map(str, places))}; the frames are "
        "there, the boxes are not. Use a view that has annotations, or put them there."
    )


def _pets_heads(file: Path) -> dict[int, Floats]:
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
    return x, y - height / 2 + _HEAD * height


def _shanghaitech(folder: Path, part: Part, name: str) -> tuple[CrowdSet, int]:
    letter = name[-1].upper()
    first = "test_data" if part == "test" else "train_data"
    for inner in (f"part_{letter}", f"part_{letter}_final"):
        folder = _descend(folder, inner, first)
    train, test = _SHANGHAITECH[letter]
    of_train = _shanghaitech_half(folder / "train_data", train) if part != "test" else []
    of_test = _shanghaitech_half(folder / "test_data", test) if part != "train" else []
    sigma: Sigma = "adaptive" if letter == "A" else 15.0
    return CrowdSet(name, (*of_train, *of_test), (), (), (), sigma=sigma), len(of_train)


def _shanghaitech_half(folder: Path, count: int) -> list[Frame]:
    names = _numbered(folder / "images", "IMG_*.jpg")
    if len(names) != count:
        warnings.warn(
            f"expected {count} images in {folder / 'images'}; found {len(names)}. Results are not comparable with "
            "published ones.",
            LatedropWarning,
            stacklevel=4,
        )
    spelt = [folder / "ground-truth", folder / "ground_truth"]
    truth = next((place for place in spelt if place.is_dir()), spelt[0])
    files = _existing(truth, [f"GT_IMG_{number}.mat" for number in names])
    return [
        Frame(f"{folder.name}/{Path(name).stem}", folder / "images" / name, _shanghaitech_points(file))
        for name, file in zip(names.values(), files, strict=True)
    ]


def _shanghaitech_points(file: Path) -> Floats:
    info = _load_mat(file, "image_info")["image_info"]
    points = _points(info, "location", str(file))
    _check_count(points, np.asarray(_field(info, "number", file)).item(), str(file))
    return points


def _of_one_size(
    name: str, frames: Sequence[Frame], roi: Any, perspective: Any, sigma: Sigma, origin: Path
) -> CrowdSet:
    """A set whose frames all have the size of the first, and whose maps must have it too."""
    size = image_shape(frames[0].path or origin)
    maps: list[npt.NDArray[Any] | None] = []
    for what, found, kind in (("region of interest", roi, np.bool_), ("perspective map", perspective, np.float64)):
        pixels = None if found is None else np.asarray(found).astype(kind)
        if pixels is not None and pixels.shape != size:
            raise DataError(
                f"expected a {what} of the frames' {_by(size)} pixels in {origin}; found {_by(pixels.shape)}, with "
                f"{frames[0].path} as the first frame. Use frames and maps of one release."
            )
        maps.append(pixels)
    return CrowdSet(name, tuple(frames), (), (), (), maps[0], maps[1], sigma, size=size)


def _split(opened: CrowdSet, standard: int, runs: int) -> CrowdSet:
    """The first `standard` frames as train and validation, the others as test."""
    stretches = np.array_split(np.arange(standard), runs)
    validation = [int(i) for stretch in stretches for i in stretch[len(stretch) - len(stretch) // 5 :]]
    train = sorted(set(range(standard)) - set(validation))
    test = range(standard, len(opened.frames))
    return replace(opened, train=tuple(train), validation=tuple(validation), test=tuple(test))


def _enlarged(opened: CrowdSet, times: int) -> CrowdSet:
    """The set in pixels of frames that are `times` larger."""
    if times == 1:
        return opened
    # The middle of the first pixel is at 0, so its corner is at -0.5 whatever its size.
    frames = tuple(replace(frame, points=(frame.points + 0.5) * times - 0.5) for frame in opened.frames)
    size = opened.size and (opened.size[0] * times, opened.size[1] * times)
    sigma: Sigma = "adaptive" if isinstance(opened.sigma, str) else opened.sigma * times
    maps = {"roi": opened.roi, "perspective": opened.perspective}
    grown: Any = {k: None if v is None else v.repeat(times, 0).repeat(times, 1) for k, v in maps.items()}
    return replace(opened, frames=frames, sigma=sigma, enlarge=times, size=size, **grown)


def _made(frame: Frame) -> npt.NDArray[np.uint8]:
    if frame.pixels is None:
        raise DataError(f"expected a path or pixels in frame {frame.name}; found neither. Make it with one of them.")
    return frame.pixels


def _check_arguments(
    name: str, folder: Path, part: str, view: int, enlarge: int, use_roi: bool | None, runs: int
) -> Path:
    if name not in SETS:
        raise ArgumentError(f"expected a set among {', '.join(SETS)}; found {name!r}. Pass one of these.")
    if part not in ("all", "train", "test"):
        raise ArgumentError(f"expected part to be all, train or test; found {part!r}. Pass one of these.")
    for what, number in (("view", view), ("enlarge", enlarge), ("validation_runs", runs)):
        if int(number) != number or number < 1:
            raise ArgumentError(f"expected {what} to be 1, 2, ...; found {number}. Pass a whole number.")
    if view != 1 and name != "pets":
        raise ArgumentError(f"expected a view only for pets; found view {view} for {name}. Leave it out.")
    if use_roi and name not in ("mall", "ucsd"):
        raise ArgumentError(f"expected use_roi only for mall and ucsd; {name} has no region. Leave it out.")
    if not folder.is_dir():
        raise FileError(f"expected the folder of {name} at {folder}; there is none. Pass where it was unpacked.")
    return folder


def _descend(folder: Path, inner: str, wanted: str) -> Path:
    """The folder, or the one in it that an archive makes, whichever has what is wanted."""
    return folder / inner if not (folder / wanted).exists() and (folder / inner / wanted).exists() else folder


def _existing(folder: Path, names: Sequence[str]) -> list[Path]:
    """The paths of files that must all be there."""
    _check_folder(folder)
    there = set(os.listdir(folder))
    missing = [name for name in names if name not in there]
    if missing:
        raise FileError(
            f"expected {len(names)} files in {folder}; {len(missing)} of them missing: {_some(missing)}. {_AGAIN}"
        )
    return [folder / name for name in names]


def _numbered(folder: Path, pattern: str) -> dict[int, str]:
    """Names of files by the number that stands for the pattern's star, in its order."""
    _check_folder(folder)
    before, after = pattern.split("*")
    found = [re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(after)}", name) for name in os.listdir(folder)]
    names = {int(match[1]): match[0] for match in found if match}
    if not names:
        raise FileError(f"expected files named {pattern} in {folder}; found none. {_AGAIN}")
    return dict(sorted(names.items()))


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileError(f"expected the folder {folder}; there is none. {_AGAIN}")


def _load_mat(file: Path, *fields: str) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise LatedropError('expected scipy; not installed. Run: pip install "latedrop[crowd]"') from error
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
        raise DataError(f"expected a struct with {name} for {where}; found {', '.join(names) or 'no struct'}. {_AGAIN}")
    return struct[name].item()


def _points(struct: Any, name: str, where: str) -> Floats:
    """The points of a frame from 0; MATLAB counts pixels from 1."""
    found = np.asarray(_field(struct, name, where))
    if found.size == 0:
        return np.zeros((0, 2))
    if found.ndim != 2 or found.shape[1] < 2 or found.dtype.kind not in "iuf" or not np.isfinite(found[:, :2]).all():
        raise DataError(
            f"expected finite points (P, 2) for {where}; found shape {found.shape} of {found.dtype}. {_AGAIN}"
        )
    return found[:, :2].astype(np.float64) - 1


def _check_count(points: Floats, count: Any, where: str) -> None:
    if len(points) != int(count):
        raise DataError(f"expected as many points as the count of {where}, {int(count)}; found {len(points)}. {_AGAIN}")


def _by(shape: Sequence[int], times: int = 1) -> str:
    return " x ".join(str(side // times) for side in shape)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f", ... ({len(listed)} in all)" if len(listed) > 3 else "")
