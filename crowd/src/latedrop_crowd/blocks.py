"""Cut the frames of a video into blocks, to estimate standard errors.

Neighbouring frames are correlated, so the standard error of a mean over frames is estimated from the means of blocks.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["block_means", "block_size", "blocks_of", "standard_error", "time_blocks"]

Floats: TypeAlias = npt.NDArray[np.float64]

_FRAMES = 25


def block_size(frames: int) -> int:
    """Return the number of frames in a block: 25, or fewer to have at least ten blocks.

    >>> block_size(2000), block_size(120), block_size(3)
    (25, 12, 1)
    """
    return max(1, min(_FRAMES, frames // 10))


def blocks_of(values: npt.NDArray[Any]) -> list[Floats]:
    """Split the values of consecutive frames `(N,)` into blocks."""
    values = np.asarray(values, dtype=np.float64)
    return np.array_split(values, max(1, round(len(values) / block_size(len(values)))))


def block_means(values: npt.NDArray[Any]) -> Floats:
    """Return the mean of each block, `(B,)`."""
    return np.array([block.mean() for block in blocks_of(values)])


def time_blocks(indices: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Sort indices, and split them into `count` runs of about the same length.

    >>> time_blocks([4, 0, 1, 2, 3], 2)
    [(0, 1, 2), (3, 4)]
    """
    return [tuple(int(i) for i in part) for part in np.array_split(np.sort(np.asarray(indices, dtype=np.int64)), count)]


def standard_error(values: npt.NDArray[Any]) -> float:
    """Return the standard error of the mean of independent values `(B,)`; infinite for one value.

    >>> standard_error(np.array([1.0, 3.0]))
    1.0
    """
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
