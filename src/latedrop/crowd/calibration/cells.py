"""What a calibration reads off a counter: the cells of its map, and the frames of a set in batches of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop import Prediction
from latedrop.crowd.layouts import CrowdSet
from latedrop.crowd.mcnn import STRIDE, Trained

__all__ = ["READOUTS", "Cells", "FrameBatches"]

READOUTS = {"count": "Trained.count_of", "pixels": "_Cells"}
"""What the readouts are called in files."""


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

    def with_count(self, density: Tensor) -> Tensor:
        """The cells, and the count last."""
        cells = self(density)
        return torch.cat([cells, cells.sum(1, keepdim=True)], 1)

    def maps(self, pixels: Prediction, image: Tensor) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Density and deviations `(h, w)` of a frame `(..., H, W)` whose cells were predicted as one row."""
        h, w = (side // STRIDE for side in image.shape[-2:])
        return self._spread(pixels.mean[0], h, w), self._spread(pixels.std[0], h, w)

    def _spread(self, values: Tensor, h: int, w: int) -> npt.NDArray[np.float64]:
        """The map `(h, w)` with these values in the cells that count, and zeros elsewhere."""
        flat = values.detach().cpu().double()
        if self.index is not None:
            flat = torch.zeros(h * w, dtype=torch.float64).index_copy(0, self.index.cpu(), flat)
        found: npt.NDArray[np.float64] = flat.reshape(h, w).numpy()
        return found


class FrameBatches:
    """Frames of a set as batches of one: with their counts, or with the cells of their maps."""

    def __init__(self, trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], cells: Cells | None) -> None:
        self.crowd_set, self.indices, self.cells = crowd_set, indices, cells
        self.channels = trained.model.channels
        self.device = next(trained.model.parameters()).device

    def image(self, index: int) -> Tensor:
        """One frame, `(1, C, H, W)`."""
        return self.crowd_set.image(index, self.channels)[None].to(self.device)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def row_total(self) -> int:
        """How many frames there are."""
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.indices:
            if self.cells is None:
                target = torch.tensor([float(self.crowd_set.count(index))])
            else:
                target = self.cells(self.crowd_set.density(index)[None].to(self.device)).cpu()
            yield self.image(index), target
