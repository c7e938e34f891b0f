"""Open a set in the layout of its release, with its standard split, or frames of your own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latedrop.errors import ArgumentError, FileError
from latedrop_crowd.layouts.crowd_set import CrowdSet, Part, Sigma
from latedrop_crowd.layouts.mall import read_mall
from latedrop_crowd.layouts.own import read_own
from latedrop_crowd.layouts.pets import read_pets
from latedrop_crowd.layouts.shanghaitech import read_shanghaitech
from latedrop_crowd.layouts.ucsd import read_ucsd
from latedrop_crowd.mcnn import Trained

__all__ = ["SETS", "open_as_trained", "open_set"]

SETS = ("mall", "ucsd", "pets", "shanghaitech-a", "shanghaitech-b", "own")
"""The sets that `open_set` knows."""
_CLIPS = {"ucsd": 4}  # of the standard training frames; one where it is not said
_WITH_REGION = ("mall", "ucsd", "own")


def open_set(
    name: str,
    folder: str | os.PathLike[str],
    *,
    part: Part = "all",
    view: int = 1,
    enlarge: int = 1,
    use_roi: bool | None = None,
    validation_runs: int | None = None,
    sigma: Sigma | None = None,
) -> CrowdSet:
    """Open a set in the layout of its release, or frames of your own.

    Args:
        name: `mall`, `ucsd`, `pets`, `shanghaitech-a`, `shanghaitech-b`, or `own` for the layout of `layouts.own`.
        folder: where it was unpacked.
        part: `"train"` asks only for the standard training frames, which become train and validation; `"test"` only
            for the test frames.
        view: the camera of PETS2009.
        enlarge: make frames this many times larger, and points, region of interest, perspective map and sigma with
            them.
        use_roi: count only inside the region of interest. None: as the set's protocol does (UCSD does; Mall has a
            region, but counts all heads; frames of your own do where there is a roi.png).
        validation_runs: cut the training frames into so many stretches, and take the last fifth of each. None: one
            for each clip, four on UCSD and one elsewhere. Frames of your own have lists for that.
        sigma: of the density kernel in pixels of the files, or `"adaptive"`; None: the set's own, 4 for your frames.

    Raises:
        ArgumentError: no such set, part or option.
        FileError: a folder or a file is missing or cannot be read.
        DataError: the annotations are not what the layout says.
    """
    runs = _CLIPS.get(name, 1) if validation_runs is None else validation_runs
    folder = _check_arguments(name, Path(folder), part, view, enlarge, use_roi, runs)
    if name == "own":
        return _enlarged(read_own(folder, part, use_roi is not False, sigma), int(enlarge))
    if name == "mall":
        opened, standard = read_mall(folder, part, bool(use_roi))
    elif name == "ucsd":
        opened, standard = read_ucsd(folder, part, use_roi is not False)
    elif name == "pets":
        opened, standard = read_pets(folder, part, view)
    else:
        opened, standard = read_shanghaitech(folder, part, name)
    opened = _split(opened if sigma is None else replace(opened, sigma=sigma), standard, runs)
    return _enlarged(opened, int(enlarge))


def open_as_trained(
    name: str, folder: str | os.PathLike[str], trained: Trained, *, part: Part = "all", view: int = 1
) -> CrowdSet:
    """Open a set as a network was trained on it: as much enlarged, and inside its region of interest."""
    use_roi = trained.roi is not None if name in _WITH_REGION else None
    sigma = trained.about.get("sigma") if name == "own" else None
    sigma = sigma / trained.enlarge if isinstance(sigma, float) else sigma
    return open_set(name, folder, part=part, view=view, enlarge=trained.enlarge, use_roi=use_roi, sigma=sigma)


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
    if use_roi and name not in _WITH_REGION:
        raise ArgumentError(f"expected use_roi only for mall, ucsd and own; {name} has no region. Leave it out.")
    if not folder.is_dir():
        raise FileError(f"expected the folder of {name} at {folder}; there is none. Pass where it was unpacked.")
    return folder
