"""Count live frames, resized to the size of the calibration frames, in one forward pass."""

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

_ALIKE = 0.03  # relative difference of aspect ratios up to which a frame is resized
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_AGAIN, _PART = 10.0, 0.05  # seconds between measurements of the shares; largest fraction of time for them


@dataclass(frozen=True)
class Count:
    """Hold the counts of one frame."""

    amounts: list[Amount]  # one for each requested zone
    image: Tensor = field(repr=False)  # input frame before enlarging, `(C, H, W)`
    reading: Reading = field(repr=False)  # output of the calibrated counter
    ends: float  # half width of the interval in scales


class LiveCounter:
    """Count the frames of one source, with intervals of probability `level`."""

    def __init__(self, trained: Trained, calibration: CrowdCalibration, level: float = 0.9) -> None:
        self.trained, self.level = trained, level
        self._shares: Shares | None = None
        self._measured_for: tuple[CrowdCalibration, tuple[Points, ...]] | None = None
        self._due = 0.0
        self.calibration = calibration

    def image(self, pixels: Pixels) -> Tensor:
        """Convert a picture to an input frame before enlarging: channels of the network, size of the calibration."""
        image = to_tensor(pixels, self.trained.channels)
        usual = self.calibration.usual
        if usual is None or usual.size is None:
            return image
        return fitted(image, tuple(side // self.trained.enlarge for side in usual.size))

    def count(self, name: str, pixels: Pixels, zones: Sequence[Points] = ((),)) -> Count:
        """Count a frame, and each zone of it; the first zone is the whole picture."""
        image, calibration = self.image(pixels), self.calibration  # read once: another thread may set it
        ready = self.trained.prepared(name, image)
        reading = calibration.read(self.trained, ready, deviations=False).check(name)
        whole = Amount(reading.mean, reading.variance, reading.dof)
        shares = self._measured(ready, reading.density, calibration, tuple(zones))
        return Count(shares.amounts(whole, reading.density), image, reading, reading.reach(self.level))

    def deviations(self, count: Count) -> npt.NDArray[np.float64] | None:
        """Return standard deviations of the cells, `(h, w)`; None if cells were not calibrated."""
        if self.calibration.pixels is None:
            return None
        ready = self.trained.prepared("the frame", count.image)
        with _memory_returned():
            return self.calibration.read(self.trained, ready).std

    def faint(self, count: Count) -> npt.NDArray[np.bool_]:
        """Return the mask `(h, w)` of faint regions and of regions that the calibration rejects."""
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
        """Return the shares of the zones; measure again from time to time, and if zones, calibration or size change."""
        begun, shares, measured_for = time.monotonic(), self._shares, self._measured_for
        same = measured_for is not None and measured_for[0] is calibration and measured_for[1] == zones
        if shares is None or not same or begun > self._due or shares.masks.shape[1:] != density.shape:
            with _memory_returned():
                shares = self._shares = Shares.measured(self.trained, calibration, image, density, zones)
            now = time.monotonic()
            self._measured_for, self._due = (calibration, zones), now + max(_AGAIN, (now - begun) / _PART)
        return shares


@contextmanager
def _memory_returned() -> Iterator[None]:
    """Return freed memory to the system at once inside the block, and keep it for the next frame outside (glibc only).

    Shares and uncertainty maps need hundreds of MB, but rarely. A plain pass needs little, and requesting its memory
    from the system for every frame would take more processor time than the pass.
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
    """Resize an image `(C, H, W)` to `size` if the aspect ratios agree; else return it unchanged.

    >>> import torch
    >>> fitted(torch.rand(1, 960, 1280), (480, 640)).shape, fitted(torch.rand(1, 720, 1280), (480, 640)).shape
    (torch.Size([1, 480, 640]), torch.Size([1, 720, 1280]))
    """
    height, width = image.shape[1:]
    if (height, width) == size or abs(height / width * size[1] / size[0] - 1) > _ALIKE:
        return image
    resized: Tensor = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
    return resized.clamp(0, 1)
