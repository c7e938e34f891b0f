"""A count with its variance and its map from a single pass over a frame."""

from __future__ import annotations

import torch
from torch import Tensor

from latedrop import Calibration, Prediction
from latedrop.errors import DataError
from latedrop.terms import BatchContext
from latedrop_crowd.mcnn import Trained

__all__ = ["count_in_one_pass"]


def count_in_one_pass(trained: Trained, calibration: Calibration, x: Tensor) -> tuple[Prediction, float, Tensor]:
    """The count of one frame `(1, C, H, W)`, its variance before the guard, and its map `(1, 1, h, w)`."""
    maps: list[Tensor] = []

    def count_of(density: Tensor) -> Tensor:
        maps.append(trained.masked(density).detach())
        return trained.count_of(density)

    terms = calibration.terms
    if terms is None:
        raise DataError("expected a calibration by terms; found one by draws. Run `crowd calibrate` again.")
    rows = BatchContext(trained.network, x.to(trained.device), calibration.sites, count_of, terms.features)
    _, variance, strangeness, shares = terms.predicted(rows)
    fitted = Prediction(rows.mean, sum(terms.parts(rows).values(), torch.zeros_like(rows.mean)), calibration)
    count = Prediction(rows.mean, variance, calibration, strangeness, shares=shares)
    return count, float(fitted.variance), maps[-1]
