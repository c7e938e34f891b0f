"""Counts live frames: as large as the counter was calibrated on, in one pass."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.calibration.record import Reading
from latedrop_crowd.console.sources import Pixels
from latedrop_crowd.console.zones import Amount, Points, Shares
from latedrop_crowd.frames import to_tensor
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.regions import Policy, find_regions, usual_threshold

__all__ = ["Count", "LiveCounter", "fitted"]

_ALIKE = 0.03  # of the ratio of sides: frames that differ by less are the same, larger or smaller
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_AGAIN, _PART = 10.0, 0.05  # seconds between two measurements of the zones' shares; of all time that these may take


@dataclass(frozen=True)
class Count:
    """One frame, counted."""

    amounts: list[Amount]  # of each zone that was asked for
    image: Tensor = field(repr=False)  # the frame as the network takes it, before it is enlarged, `(C, H, W)`
    reading: Reading = field(repr=False)  # what the calibrated counter said
    ends: float  # reach of the interval in scales


class LiveCounter:
    """A counter for one source, with intervals of a `level`."""

    def __init__(self, trained: Trained, calibration: CrowdCalibration, level: float = 0.9) -> None:
        self.trained, self.level = trained, level
        self._shares: Shares | None = None
        self._measured_for: tuple[CrowdCalibration, tuple[Points, ...]] | None = None
        self._due = 0.0
        self.calibration = calibration

    def image(self, pixels: Pixels) -> Tensor:
        """A picture as the network takes it, before it is enlarged: its channels, and the size that is usual."""
        image = to_tensor(pixels, self.trained.channels)
        usual = self.calibration.usual
        if usual is None or usual.size is None:
            return image
        return fitted(image, tuple(side // self.trained.enlarge for side in usual.size))

    def count(self, name: str, pixels: Pixels, zones: Sequence[Points] = ((),)) -> Count:
        """Count a frame, and each zone of it; the first zone is the whole picture."""
        image, calibration = self.image(pixels), self.calibration  # others may set it meanwhile
        ready = self.trained.prepared(name, image)
        reading = calibration.read(self.trained, ready, deviations=False).check(name)
        whole = Amount(reading.mean, reading.variance, reading.dof)
        shares = self._measured(ready, reading.density, calibration, tuple(zones))
        return Count(shares.amounts(whole, reading.density), image, reading, reading.reach(self.level))

    def deviations(self, count: Count) -> npt.NDArray[np.float64] | None:
        """Standard deviations of the map's cells `(h, w)`; None where cells were not calibrated."""
        if self.calibration.pixels is None:
            return None
        ready = self.trained.prepared("the frame", count.image)
        with _memory_returned():
            return self.calibration.read(self.trained, ready).std

    def faint(self, count: Count) -> npt.NDArray[np.bool_]:
        """Cells `(h, w)` of faint regions, and of those that the calibration rejects."""
        policy = self.calibration.policy or Policy(usual_threshold(count.reading.density[None]))
        regions = find_regions(count.reading.density, threshold=policy.threshold)
        return regions.mask(policy.faint(regions) | policy.rejects(regions))

    def _measured(
        self,
        image: Tensor,
        density: npt.NDArray[np.float64],
        calibration: CrowdCalibration,
        zones: tuple[Points, ...],
    ) -> Shares:
        """The zones' shares, measured again now and then, and for other zones, calibrations or sizes of frames."""
        begun, shares, known = time.monotonic(), self._shares, self._measured_for
        same = known is not None and known[0] is calibration and known[1] == zones
        if shares is None or not same or begun > self._due or shares.masks.shape[1:] != density.shape:
            with _memory_returned():
                shares = self._shares = Shares.measured(self.trained, calibration, image, density, zones)
            now = time.monotonic()
            self._measured_for, self._due = (calibration, zones), now + max(_AGAIN, (now - begun) / _PART)
        return shares


@contextmanager
def _memory_returned() -> Iterator[None]:
    """Give freed memory back to the system at once, inside; outside, keep it for the next frame. For glibc alone.

    What is measured now and then needs hundreds of megabytes. A plain pass does not, and to ask the system for its
    memory anew, frame by frame, costs more processor time than the pass.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.malloc_trim(0)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 512 << 20)


def fitted(image: Tensor, size: tuple[int, ...]) -> Tensor:
    """The image `(C, H, W)` in this size, where its sides have the same ratio; else as it is.

    >>> import torch
    >>> fitted(torch.rand(1, 960, 1280), (480, 640)).shape, fitted(torch.rand(1, 720, 1280), (480, 640)).shape
    (torch.Size([1, 480, 640]), torch.Size([1, 720, 1280]))
    """
    height, width = image.shape[1:]
    if (height, width) == size or abs(height / width * size[1] / size[0] - 1) > _ALIKE:
        return image
    resized: Tensor = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
    return resized.clamp(0, 1)
