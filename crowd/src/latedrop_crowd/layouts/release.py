"""The files of a release: those that must be there, and what MATLAB wrote; what is missing or malformed is named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latedrop.errors import DataError, FileError
from latedrop_crowd.layouts.crowd_set import Floats

__all__ = ["AGAIN", "check_count", "existing", "field", "inner_folder", "load_mat", "numbered", "points_of", "some"]

AGAIN = "Unpack the release again."


def inner_folder(folder: Path, inner: str, wanted: str) -> Path:
    """The folder, or the one in it that an archive makes, whichever has what is wanted."""
    return folder / inner if not (folder / wanted).exists() and (folder / inner / wanted).exists() else folder


def existing(folder: Path, names: Sequence[str]) -> list[Path]:
    """The paths of files that must all be there."""
    _check_folder(folder)
    there = set(os.listdir(folder))
    missing = [name for name in names if name not in there]
    if missing:
        raise FileError(
            f"expected {len(names)} files in {folder}; {len(missing)} of them missing: {some(missing)}. {AGAIN}"
        )
    return [folder / name for name in names]


def numbered(folder: Path, pattern: str) -> dict[int, str]:
    """Names of files by the number that stands for the pattern's star, in its order."""
    _check_folder(folder)
    before, after = pattern.split("*")
    found = [re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(after)}", name) for name in os.listdir(folder)]
    names = {int(match[1]): match[0] for match in found if match}
    if not names:
        raise FileError(f"expected files named {pattern} in {folder}; found none. {AGAIN}")
    return dict(sorted(names.items()))


def load_mat(file: Path, *fields: str) -> dict[str, Any]:
    """The content of a MATLAB file that has these fields."""
    from scipy.io import loadmat

    if not file.is_file():
        raise FileError(f"expected {file.name} in {file.parent}; there is no such file. {AGAIN}")
    try:
        content: dict[str, Any] = loadmat(file)
    # scipy raises many kinds of errors for a damaged file.
    except Exception as error:
        raise FileError(f"expected a MATLAB file at {file}; {error}. {AGAIN}") from error
    missing = [field for field in fields if field not in content]
    if missing:
        there = ", ".join(key for key in content if not key.startswith("__")) or "nothing"
        raise DataError(f"expected {' and '.join(missing)} in {file}; found {there}. {AGAIN}")
    return content


def field(struct: Any, name: str, where: object) -> Any:
    """A field of a MATLAB struct, also of one inside a cell of one element."""
    while isinstance(struct, np.ndarray) and struct.dtype == object and struct.size == 1:
        struct = struct.item()
    names = getattr(getattr(struct, "dtype", None), "names", None) or ()
    if name not in names or struct.size != 1:
        raise DataError(f"expected a struct with {name} for {where}; found {', '.join(names) or 'no struct'}. {AGAIN}")
    return struct[name].item()


def points_of(struct: Any, name: str, where: str) -> Floats:
    """The points of a frame from 0; MATLAB counts pixels from 1."""
    found = np.asarray(field(struct, name, where))
    if found.size == 0:
        return np.zeros((0, 2))
    if found.ndim != 2 or found.shape[1] < 2 or found.dtype.kind not in "iuf" or not np.isfinite(found[:, :2]).all():
        raise DataError(
            f"expected finite points (P, 2) for {where}; found shape {found.shape} of {found.dtype}. {AGAIN}"
        )
    return found[:, :2].astype(np.float64) - 1


def check_count(points: Floats, count: Any, where: str) -> None:
    """Raise unless there are as many points as a release says."""
    if len(points) != int(count):
        raise DataError(f"expected as many points as the count of {where}, {int(count)}; found {len(points)}. {AGAIN}")


def some(names: Iterable[str]) -> str:
    """The first few names, and how many there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f", ... ({len(listed)} in all)" if len(listed) > 3 else "")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileError(f"expected the folder {folder}; there is none. {AGAIN}")
