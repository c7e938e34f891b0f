"""A count with its variance, its map and its features from a single pass over a frame, for counting live.

`Predictor.predict` runs the network once for the output and once for the features that say how strange a frame is. Here
both come from the same pass; only where dropout has a share in the variance, one with a backward pass is added.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from latedrop import Calibration, Prediction
from latedrop.crowd.mcnn import Trained
from latedrop.errors import DataError
from latedrop.model.arrays import place, widened
from latedrop.model.calling import check_finite, read
from latedrop.terms import Rows

__all__ = ["count_in_one_pass"]


class _FrameRows(Rows):
    """One frame, whose output and features come from the same pass."""

    @cached_property
    def features(self) -> Tensor:
        if self._features is None:
            raise DataError("expected features that tell what frames are usual; the calibration has none.")
        outputs: list[Tensor] = []
        found = self._features.of(self.model, self.x, self.sites, outputs.append)
        mean = widened(read(outputs[-1], self.readout, 1).detach())
        check_finite(mean, "without dropout")
        self.__dict__.setdefault("mean", mean)
        return found

    @cached_property
    def mean(self) -> Tensor:
        if self._features is None or "linear" in self.__dict__:
            return super().mean
        _ = self.features  # whose pass has the output too
        found: Tensor = self.__dict__["mean"]
        return found


def count_in_one_pass(trained: Trained, calibration: Calibration, x: Tensor) -> tuple[Prediction, Tensor]:
    """The count of one frame `(1, C, H, W)`, calibrated by terms, and its map `(1, 1, h, w)`."""
    maps: list[Tensor] = []

    def count_of(density: Tensor) -> Tensor:
        maps.append(trained.masked(density).detach())
        return trained.count_of(density)

    terms = calibration.terms
    if terms is None:
        raise DataError("expected a calibration by terms; found one by draws. Ask for deviations, too.")
    rows = _FrameRows(trained.model, place(x, trained.model), calibration.sites, count_of, terms.features)
    variance, strangeness, shares = terms.variance(rows)
    return Prediction(rows.mean, variance, calibration, strangeness, shares=shares), maps[-1]
