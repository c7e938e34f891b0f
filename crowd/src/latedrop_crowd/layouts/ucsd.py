"""The UCSD pedestrian set: ten clips of 200 frames, of which clips 3 to 6 are train.

Reference: Chan, Liang, Vasconcelos, "Privacy Preserving Crowd Monitoring" (2008).
"""

from __future__ import annotations

from pathlib import Path

from latedrop.errors import DataError
from latedrop_crowd.layouts.crowd_set import CrowdSet, Frame, Part, of_one_size
from latedrop_crowd.layouts.release import AGAIN, existing, field, inner_folder, load_mat, points_of

__all__ = ["read_ucsd"]

_CLIPS, _TRAIN, _LENGTH = range(10), range(3, 7), 200


def read_ucsd(folder: Path, part: Part, use_roi: bool) -> tuple[CrowdSet, int]:
    """The frames, not yet split, and how many of them are the standard training frames; these come first."""
    folder = inner_folder(folder, "ucsdpeds", "vidf-cvpr")
    tested = [clip for clip in _CLIPS if clip not in _TRAIN]
    clips = {"all": [*_TRAIN, *tested], "train": list(_TRAIN), "test": tested}[part]
    frames = [frame for clip in clips for frame in _clip(folder, clip)]
    maps = (folder / "vidf-cvpr" / "vidf1_33_roi_mainwalkway.mat", folder / "vidf-cvpr" / "vidf1_33_dmap3.mat")
    mask = field(load_mat(maps[0], "roi")["roi"], "mask", maps[0]) if use_roi else None
    perspective = field(load_mat(maps[1], "dmap")["dmap"], "pmapxy", maps[1])
    opened = of_one_size("ucsd", frames, mask, perspective, 3.0, folder / "vidf-cvpr")
    return opened, 0 if part == "test" else _LENGTH * len(_TRAIN)


def _clip(folder: Path, clip: int) -> list[Frame]:
    stem = f"vidf1_33_{clip:03d}"
    file = folder / "vidf-cvpr" / f"{stem}_frame_full.mat"
    cells = load_mat(file, "frame")["frame"].ravel()
    if len(cells) != _LENGTH:
        raise DataError(f"expected points of {_LENGTH} frames in {file}; found {len(cells)}. {AGAIN}")
    paths = existing(folder / "vidf" / f"{stem}.y", [f"{stem}_f{i + 1:03d}.png" for i in range(_LENGTH)])
    return [
        Frame(path.stem, path, points_of(cell, "loc", f"{path.stem} in {file}"))
        for path, cell in zip(paths, cells, strict=True)
    ]
