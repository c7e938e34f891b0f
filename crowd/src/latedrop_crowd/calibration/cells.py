"""The readout for cells of the map, and the frames of a set in batches of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained

__all__ = ["READOUTS", "Cells", "FrameBatches"]

READOUTS = {"count": "Trained.count_of", "pixels": "_Cells"}
"""Names of the readouts in files."""


class Cells:
    """The readout for cells: those inside the region of interest, flat, `(N, M)`; others have no variance to fit."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.__qualname__ = READOUTS["pixels"]
        self.index = None if trained.roi is None else trained.roi.flatten().nonzero().flatten()

    def __call__(self, density: Tensor) -> Tensor:
        """The cells of maps `(N, 1, h, w)`."""
        flat = self.trained.masked(density).flatten(1)
        return flat if self.index is None else flat[:, self.index.to(flat.device)]

    def spread(self, values: Tensor, image: Tensor) -> npt.NDArray[np.float64]:
        """The map `(h, w)` of a frame `(..., H, W)` with these values in the cells that count, and zeros elsewhere."""
        h, w = (side // self.trained.stride for side in image.shape[-2:])
        flat = values.detach().cpu().double()
        if self.index is not None:
            flat = torch.zeros(h * w, dtype=torch.float64).index_copy(0, self.index.cpu(), flat)
        grid: npt.NDArray[np.float64] = flat.reshape(h, w).numpy()
        return grid


class FrameBatches:
    """Frames of a set as batches of one, with their targets `(1, ...)` where there is a function of a frame's index."""

    def __init__(
        self,
        trained: Trained,
        crowd_set: CrowdSet,
        indices: Sequence[int],
        target: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.crowd_set, self.indices, self.target = crowd_set, indices, target
        self.channels, self.device = trained.channels, trained.device

    def image(self, index: int) -> Tensor:
        """One frame, `(1, C, H, W)`."""
        return self.crowd_set.image(index, self.channels)[None].to(self.device)

    def images(self) -> Iterator[Tensor]:
        """The frames without their targets."""
        return (self.image(index) for index in self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def row_total(self) -> int:
        """Number of frames."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        if self.target is None:
            return self.images()
        target = self.target
        return ((self.image(index), target(index)) for index in self.indices)
