"""The Mall set: 2000 frames of one camera, of which the first 800 are train.

Reference: Chen, Loy, Gong, Xiang, "Feature Mining for Localised Crowd Counting" (2012).
"""

from __future__ import annotations

from pathlib import Path

from latedrop.errors import DataError
from latedrop_crowd.layouts.crowd_set import CrowdSet, Frame, Part, of_one_size
from latedrop_crowd.layouts.release import AGAIN, check_count, existing, field, inner_folder, load_mat, points_of

__all__ = ["read_mall"]

_FRAMES, _TRAIN = 2000, 800


def read_mall(folder: Path, part: Part, use_roi: bool) -> tuple[CrowdSet, int]:
    """The frames, not yet split, and how many of them are the standard training frames; these come first."""
    folder = inner_folder(folder, "mall_dataset", "mall_gt.mat")
    file = folder / "mall_gt.mat"
    truth = load_mat(file, "frame", "count")
    cells, counts = truth["frame"].ravel(), truth["count"].ravel()
    if not len(cells) == len(counts) == _FRAMES:
        raise DataError(
            f"expected points and counts of {_FRAMES} frames in {file}; found {len(cells)} and {len(counts)}. {AGAIN}"
        )
    numbers = range(_FRAMES)
    numbers = {"all": numbers, "train": numbers[:_TRAIN], "test": numbers[_TRAIN:]}[part]
    paths = existing(folder / "frames", [f"seq_{number + 1:06d}.jpg" for number in numbers])
    frames = []
    for number, path in zip(numbers, paths, strict=True):
        points = points_of(cells[number], "loc", f"{path.stem} in {file}")
        check_count(points, counts[number], f"{path.stem} in {file}")
        frames.append(Frame(path.stem, path, points))
    maps = folder / "perspective_roi.mat"
    loaded = load_mat(maps, "pMapN", "roi")
    mask = field(loaded["roi"], "mask", maps) if use_roi else None
    return of_one_size("mall", frames, mask, loaded["pMapN"], 4.0, maps), 0 if part == "test" else _TRAIN
