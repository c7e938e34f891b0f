"""Annotated frames and how they are split: what every layout is read into.

The density map of a frame sums to its count, the number of heads inside the frame and the region of interest.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop_crowd.density import density_map, heads_inside, roi_cells
from latedrop_crowd.frames import enlarged, image_shape, read_image, to_tensor
from latedrop_crowd.mcnn import STRIDE

__all__ = ["CrowdSet", "Floats", "Frame", "Mask", "in_order"]

Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Frame:
    """One annotated frame.

    Attributes:
        name: of the frame in its set, such as `seq_000001`.
        path: the image file; None: made in memory.
        points: heads `(P, 2)` as x, y in pixels, all that are annotated, also those outside the region of interest.
        pixels: the image where it was made in memory, uint8 `(H, W)` or `(H, W, 3)`.
        people: how many there are, where that is all that is known; `points` is then empty.
    """

    name: str
    path: Path | None
    points: Floats
    pixels: npt.NDArray[np.uint8] | None = None
    people: int | None = None


@dataclass(frozen=True)
class CrowdSet:
    """Annotated frames and how they are split; everything is in pixels of the frames that `image` gives.

    Attributes:
        name: one of `SETS`, or `scenes`.
        frames: all frames, the standard training frames first.
        train: indices of `frames` to train on.
        validation: indices to choose with, from the standard training frames.
        test: indices of the standard test frames.
        roi: pixels that count, bool `(H, W)`; None: all.
        sigma: of the density kernel in pixels.
        enlarge: how many times larger than their files the frames are.
        size: `(H, W)` of all frames; None where they differ.
    """

    name: str
    frames: tuple[Frame, ...]
    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]
    roi: Mask | None = None
    sigma: float = 4.0
    enlarge: int = 1
    size: tuple[int, int] | None = None

    def image(self, index: int, channels: int = 1) -> Tensor:
        """The frame, `(channels, H, W)` float32 in [0, 1]; luma for one channel, RGB for three."""
        frame = self.frames[index]
        image = read_image(frame.path, channels) if frame.path else to_tensor(_made(frame), channels)
        image = enlarged(image, self.enlarge)
        shape = tuple(image.shape[1:])
        if self.size is not None and shape != self.size:
            wanted, there = (" x ".join(str(side // self.enlarge) for side in sides) for sides in (self.size, shape))
            raise DataError(
                f"expected frames of {wanted} pixels in {self.name}; found {there} in {frame.path or frame.name}. "
                "Restore the file: points would be off."
            )
        return image

    def pixels(self, index: int, channels: int = 1) -> Tensor:
        """The frame as bytes, `(channels, H, W)` uint8: a quarter of the memory."""
        return (self.image(index, channels) * 255).round().to(torch.uint8)

    def shape(self, index: int) -> tuple[int, int]:
        """`(H, W)` of a frame in pixels."""
        if self.size is not None:
            return self.size
        frame = self.frames[index]
        height, width = image_shape(frame.path) if frame.path else _made(frame).shape[:2]
        return height * self.enlarge, width * self.enlarge

    @property
    def has_points(self) -> bool:
        """Return True if heads are known, not only how many there are."""
        return all(frame.people is None for frame in self.frames)

    def density(self, index: int, stride: int = STRIDE) -> Tensor:
        """The map to learn, `(1, H // 4, W // 4)` float32: people per cell, inside frame and region of interest."""
        density = density_map(self.heads(index), self.shape(index), self.sigma, self.roi, stride=stride)
        return torch.from_numpy(density)[None]

    def heads(self, index: int) -> Floats:
        """The heads inside frame and region of interest, `(P, 2)` as x, y in pixels."""
        frame = self.frames[index]
        if frame.people is not None:
            raise DataError(
                f"expected head points of {frame.name}; {self.name} has counts alone. Maps, training and the rejection "
                "of regions need points: write heads.csv."
            )
        points = frame.points
        return points[heads_inside(points, self.shape(index), self.roi)]

    def count(self, index: int) -> int:
        """The number of heads inside frame and region of interest, which `density` sums to."""
        people = self.frames[index].people
        return len(self.heads(index)) if people is None else people

    def counts(self, indices: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The counts of some frames, `(N,)`."""
        return torch.tensor([self.count(index) for index in indices], dtype=dtype)

    def cells(self, stride: int = STRIDE) -> Tensor | None:
        """Cells of the density map that count, bool `(H // 4, W // 4)`; None: all."""
        return None if self.roi is None else torch.from_numpy(roi_cells(self.roi, stride))


def _made(frame: Frame) -> npt.NDArray[Any]:
    if frame.pixels is None:
        raise DataError(f"expected a path or pixels in frame {frame.name}; found neither. Make it with one of them.")
    return frame.pixels


_Item = TypeVar("_Item")


def in_order(read: Callable[[int], _Item], indices: Sequence[int], *, ahead: int = 32) -> Iterator[_Item]:
    """Results in the order of the indices, read by a few threads, as decoding leaves the interpreter alone.

    Only so many are read ahead: a set of frames may be larger than the memory.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        waiting = deque(pool.submit(read, index) for index in indices[:ahead])
        for index in indices[ahead:]:
            first = waiting.popleft()
            yield first.result()
            waiting.append(pool.submit(read, index))
        while waiting:
            yield waiting.popleft().result()
