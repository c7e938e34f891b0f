"""Normalised conformal intervals, as MAPIE and crepes make them, written here in a few lines.

Calibration rows have scores `z = error / sigma(x)`. The interval of a new row is `mean ± sigma(x) · q`, with q the
`ceil((n + 1) · level)`-th smallest of n absolute scores, infinite where there are fewer. All signed scores together are
a predictive distribution, which has a CRPS but no density. How difficult a row is, `sigma`, is said by

- nothing: 1 for every row, with all validation rows for calibration;
- a forest, as in MAPIE's residual-normalised score: fitted to the logarithms of absolute errors of half of the
  validation rows; the other half is for calibration;
- neighbours, as in crepes' difficulty estimator: mean absolute error of the 25 nearest validation rows, inputs scaled
  to [0, 1], plus 0.01; the row itself is left out, so that all rows are for calibration.

References: Papadopoulos et al. (2002), Boström (2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Scores", "forest_difficulty", "neighbour_difficulty"]

NEIGHBOURS, LEAST_DIFFICULTY = 25, 0.01
Difficulty = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scores:
    """Scores of calibration rows `(n,)`, in place of a `Tail`."""

    z: Tensor

    def quantile(self, q: float) -> float:
        """Return half the width of the central interval that ends at q, in units of sigma."""
        place = math.ceil((len(self.z) + 1) * (2 * q - 1) - 1e-9)
        return float(self.z.abs().sort().values[place - 1]) if place <= len(self.z) else math.inf

    def nll(self, error: Tensor, variance: Tensor) -> Tensor:
        """Return not-a-numbers: there is no density."""
        return torch.full_like(error, math.nan)

    def crps(self, error: Tensor, variance: Tensor) -> Tensor:
        """Return the continuous ranked probability score of each error, in its unit."""
        z, sigma = self.z.double().sort().values, variance.double().sqrt()
        count = len(z)
        ranks = 2 * torch.arange(1, count + 1, dtype=torch.float64) - count - 1
        apart = float(ranks @ z) / count**2  # half the mean distance of two scores
        return sigma * ((error.double()[:, None] / sigma[:, None] - z).abs().mean(1) - apart)


def forest_difficulty(x: Tensor, error: Tensor, seed: int = 0) -> tuple[Difficulty, Tensor]:
    """Return sigma as a function of rows, and which of the n rows it has not seen, `(n,)`."""
    from sklearn.ensemble import RandomForestRegressor

    seen = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)) % 2 == 0)
    size = error[seen].abs().mean().clamp_min(torch.finfo(torch.float64).tiny)
    logs = (error[seen].abs() / size).clamp_min(1e-6).log()
    forest = RandomForestRegressor(200, min_samples_leaf=5, random_state=seed).fit(x[seen].numpy(), logs.numpy())

    def sigma(rows: Tensor) -> Tensor:
        return size * torch.from_numpy(forest.predict(rows.numpy())).exp()

    return sigma, ~seen


def neighbour_difficulty(x: Tensor, error: Tensor) -> tuple[Difficulty, Tensor]:
    """Return sigma as a function of rows, and sigma of the rows themselves, each left out for itself, `(n,)`."""
    low, high = x.amin(0), x.amax(0)
    span = torch.where(high > low, high - low, 1)
    scaled = ((x - low) / span).double()
    count = min(NEIGHBOURS, len(x) - 1)

    def mean_error(distance: Tensor) -> Tensor:
        return error.abs()[distance.topk(count, largest=False).indices].mean(1) + LEAST_DIFFICULTY

    own = torch.cdist(scaled, scaled).fill_diagonal_(math.inf)
    return lambda rows: mean_error(torch.cdist(((rows - low) / span).double(), scaled)), mean_error(own)
