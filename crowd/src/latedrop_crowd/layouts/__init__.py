"""Annotated frames of people: Mall, UCSD and PETS2009 as they were released, and frames of your own.

A set is read from its folder: annotations at once, images when they are asked for. What is missing or malformed is
named. Validation frames are the last fifth of each clip of the standard *training* frames, in one run, as neighbouring
frames of a video look alike; test frames are for testing only.
"""

import os
from dataclasses import replace
from pathlib import Path

from latedrop.errors import ArgumentError, FileError
from latedrop_crowd.layouts.crowd_set import CrowdSet, Frame, in_order
from latedrop_crowd.layouts.own import read_counts, read_own, read_roi
from latedrop_crowd.layouts.releases import RELEASES, read_release
from latedrop_crowd.mcnn import Trained

__all__ = ["SETS", "CrowdSet", "Frame", "in_order", "open_as_trained", "open_set", "read_counts", "read_roi"]

SETS = (*RELEASES, "own")
"""The sets that `open_set` knows."""


def open_set(
    name: str,
    folder: str | os.PathLike[str],
    *,
    enlarge: int = 1,
    use_roi: bool | None = None,
    sigma: float | None = None,
) -> CrowdSet:
    """Open a set in the layout of its release, or frames of your own.

    Args:
        name: `mall`, `ucsd`, `pets`, or `own` for the layout of `layouts.own`.
        folder: where it was unpacked.
        enlarge: make frames this many times larger, and points, region of interest and sigma with them.
        use_roi: count only inside the region of interest. None: as the set's protocol does (UCSD does; Mall has a
            region, but counts all heads; frames of your own do where there is a roi.png).
        sigma: of the density kernel in pixels of the files; None: the set's own, 4 for your frames.
    """
    if name not in SETS:
        raise ArgumentError(f"expected a set among {', '.join(SETS)}; found {name!r}. Pass one of these.")
    if int(enlarge) != enlarge or enlarge < 1:
        raise ArgumentError(f"expected enlarge to be 1, 2, ...; found {enlarge}. Pass a whole number.")
    if use_roi and not _has_region(name):
        raise ArgumentError(f"expected a set with a region of interest; {name} has none. Leave use_roi out.")
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"expected the folder of {name} at {folder}; there is none. Pass where it was unpacked.")
    opened = read_own(folder, use_roi is not False) if name == "own" else read_release(name, folder, use_roi)
    return _enlarged(opened if sigma is None else replace(opened, sigma=sigma), int(enlarge))


def open_as_trained(name: str, folder: str | os.PathLike[str], trained: Trained) -> CrowdSet:
    """Open a set as a network was trained on it: as much enlarged, and inside its region of interest."""
    use_roi = trained.roi is not None if _has_region(name) else None
    sigma = trained.about.get("sigma") if name == "own" else None
    sigma = None if sigma is None else sigma / trained.enlarge
    return open_set(name, folder, enlarge=trained.enlarge, use_roi=use_roi, sigma=sigma)


def _has_region(name: str) -> bool:
    return name == "own" or (name in RELEASES and RELEASES[name].roi is not None)


def _enlarged(opened: CrowdSet, times: int) -> CrowdSet:
    """The set in pixels of frames that are `times` larger."""
    if times == 1:
        return opened
    # The middle of the first pixel is at 0, so its corner is at -0.5 whatever its size.
    frames = tuple(replace(frame, points=(frame.points + 0.5) * times - 0.5) for frame in opened.frames)
    size = None if opened.size is None else (opened.size[0] * times, opened.size[1] * times)
    roi = None if opened.roi is None else opened.roi.repeat(times, 0).repeat(times, 1)
    return replace(opened, frames=frames, roi=roi, sigma=opened.sigma * times, enlarge=times, size=size)
