"""A count with its variance and its map from a single pass over a frame, for counting live."""

from __future__ import annotations

from torch import Tensor

from latedrop import Calibration, Prediction
from latedrop.crowd.mcnn import Trained
from latedrop.data.arrays import place
from latedrop.errors import DataError
from latedrop.terms import BatchContext

__all__ = ["count_in_one_pass"]


def count_in_one_pass(trained: Trained, calibration: Calibration, x: Tensor) -> tuple[Prediction, Tensor]:
    """The count of one frame `(1, C, H, W)`, calibrated by terms, and its map `(1, 1, h, w)`."""
    maps: list[Tensor] = []

    def count_of(density: Tensor) -> Tensor:
        maps.append(trained.masked(density).detach())
        return trained.count_of(density)

    terms = calibration.terms
    if terms is None:
        raise DataError("expected a calibration by terms; found one by draws. Ask for deviations, too.")
    rows = BatchContext(trained.model, place(x, trained.model), calibration.sites, count_of, terms.features)
    variance, strangeness, shares = terms.variance(rows)
    return Prediction(rows.mean, variance, calibration, strangeness, shares=shares), maps[-1]
