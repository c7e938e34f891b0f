"""ShanghaiTech, parts A and B: single images of several sizes, with folders for train and test.

Reference: Zhang, Zhou, Chen, Gao, Ma, "Single-Image Crowd Counting via Multi-Column Convolutional Neural Network"
(2016).
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from latedrop import LatedropWarning
from latedrop_crowd.layouts.crowd_set import CrowdSet, Floats, Frame, Part, Sigma
from latedrop_crowd.layouts.release import check_count, existing, field, inner_folder, load_mat, numbered, points_of

__all__ = ["read_shanghaitech"]

_IMAGES = {"A": (300, 182), "B": (400, 316)}  # training and test images


def read_shanghaitech(folder: Path, part: Part, name: str) -> tuple[CrowdSet, int]:
    """The frames, not yet split, and how many of them are the standard training frames; these come first."""
    letter = name[-1].upper()
    first = "test_data" if part == "test" else "train_data"
    for inner in (f"part_{letter}", f"part_{letter}_final"):
        folder = inner_folder(folder, inner, first)
    train, test = _IMAGES[letter]
    of_train = _half(folder / "train_data", train) if part != "test" else []
    of_test = _half(folder / "test_data", test) if part != "train" else []
    sigma: Sigma = "adaptive" if letter == "A" else 15.0
    return CrowdSet(name, (*of_train, *of_test), (), (), (), sigma=sigma), len(of_train)


def _half(folder: Path, count: int) -> list[Frame]:
    names = numbered(folder / "images", "IMG_*.jpg")
    if len(names) != count:
        warnings.warn(
            f"expected {count} images in {folder / 'images'}; found {len(names)}. Results are not comparable with "
            "published ones.",
            LatedropWarning,
            stacklevel=4,
        )
    spelt = [folder / "ground-truth", folder / "ground_truth"]
    truth = next((place for place in spelt if place.is_dir()), spelt[0])
    files = existing(truth, [f"GT_IMG_{number}.mat" for number in names])
    return [
        Frame(f"{folder.name}/{Path(name).stem}", folder / "images" / name, _points(file))
        for name, file in zip(names.values(), files, strict=True)
    ]


def _points(file: Path) -> Floats:
    info = load_mat(file, "image_info")["image_info"]
    points = points_of(info, "location", str(file))
    check_count(points, np.asarray(field(info, "number", file)).item(), str(file))
    return points
