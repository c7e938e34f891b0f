"""Coefficients of the variance, shrunk to a typical shape: `v = floor + sum_j theta_j t_j`, all above 0.

With `u_j = t_j / size_j`, columns brought to a mean of about 1, and typical shares `w`, write

    v = s · (w_0 exp(d_0) + sum_j w_j exp(d_j) u_j).

The scale s is free. The departures d cost `weight / 4 · sum_j w_j (d_j - d)^2` with `d` their mean weighted by w, as if
`weight` rows more had the typical shape: few rows change little but the scale, many rows have their way. Fisher scoring
in the logarithms of the coefficients minimises the negative log-likelihood of the errors plus that cost.

A guard makes the variance grow where no validation row is like a new one, up to what is said by the targets alone:
`spread + (mean - centre)^2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["TYPICAL", "WEIGHT", "Guard", "Shape", "crossed_shape", "fit_shape", "typical_shares"]

TYPICAL = {"floor": 0.5, "leverage": 0.2, "features": 0.2, "dropout": 0.1, "forest": 1.0}
"""Shares of the variance of usual rows; they are divided by the sum of those in use. Other columns have `OTHER`."""
OTHER = 0.2
WEIGHT = 60.0
QUANTILE = 0.95
"""Share of the usual rows within the limits of the guard."""
_STEPS = 100
_FARTHEST = 12.0  # departure in logarithms
_LEAST = 1e-4  # of the mean squared error


def typical_shares(columns: Sequence[str]) -> Tensor:
    """Return the typical shares of the floor and of some columns, `(1 + J,)`; they add up to 1."""
    shares = torch.tensor([TYPICAL["floor"], *(TYPICAL.get(name, OTHER) for name in columns)], dtype=torch.float64)
    return shares / shares.sum()


@dataclass(frozen=True)
class Shape:
    """`variance = floors + columns @ coefficients`.

    Attributes:
        coefficients: `(K, J)`.
        floors: `(K,)`.
    """

    coefficients: Tensor
    floors: Tensor

    def variance(self, columns: Tensor) -> Tensor:
        """Return `(n, K)` from `(n, K, J)`."""
        return torch.einsum("nkj,kj->nk", columns.double(), self.coefficients) + self.floors


def fit_shape(
    error: Tensor,
    columns: Tensor,
    sizes: Tensor,
    shares: Tensor,
    weights: Tensor | None = None,
    *,
    weight: float | None = None,
    nu: float = math.inf,
    rows: float | None = None,
) -> Shape:
    """Fit errors `(n, K)` with columns `(n, K, J)`; each output has coefficients of its own.

    Args:
        error: target minus prediction.
        columns: not negative.
        sizes: `(K, J)`, what a column is on usual rows, as its mean over reference rows.
        shares: `(1 + J,)`, of the floor and the columns, from `typical_shares`.
        weights: `(n,)`, what each row counts.
        weight: how many rows the typical shape counts; `WEIGHT` where None.
        nu: degrees of freedom of the likelihood; a small number lets single large errors count less.
        rows: how many independent rows these are, where that is not n.
    """
    counts = torch.ones(len(error), dtype=torch.float64) if weights is None else weights.double()
    counts = counts / counts.sum() * (len(error) if rows is None else rows)
    price = WEIGHT if weight is None else weight
    fits = [
        _fit_one(error[:, k].double(), columns[:, k].double(), sizes[k].double(), shares, counts, price, nu)
        for k in range(error.shape[1])
    ]
    return Shape(*(torch.stack(part) for part in zip(*fits, strict=True)))


def _fit_one(
    error: Tensor, columns: Tensor, sizes: Tensor, shares: Tensor, counts: Tensor, weight: float, nu: float
) -> tuple[Tensor, Tensor]:
    live = sizes > 0
    size = (counts @ error.square() / counts.sum()).clamp_min(torch.finfo(torch.float64).tiny)
    units = torch.cat([torch.ones_like(error)[:, None], columns[:, live] / sizes[live]], 1)
    typical = torch.cat([shares[:1], shares[1:][live]])
    typical = typical / typical.sum()
    e2 = error.square() / size
    shape = units @ typical
    start = typical.log() + (counts @ (e2 / shape) / counts.sum()).clamp_min(1e-9).log()
    centred = torch.eye(len(typical), dtype=torch.float64) - typical
    cost = weight / 2 * centred.T @ torch.diag(typical) @ centred  # curvature of the price

    def objective(logs: Tensor) -> float:
        v = units @ logs.exp()
        off = logs - start
        ratio = e2 / v
        loss = ratio if math.isinf(nu) else (nu + 1) * torch.log1p(ratio / nu)
        return float(counts @ (loss + v.log())) / 2 + float(off @ cost @ off) / 2

    logs, value = start, objective(start)
    damping = 1.0 if math.isinf(nu) else nu / (nu + 3)
    for _ in range(_STEPS):
        theta = logs.exp()
        v = units @ theta
        ratio = e2 / v
        part = units * theta / v[:, None]
        pull = 1 - (ratio if math.isinf(nu) else (nu + 1) * ratio / (nu + ratio))
        gradient = part.T @ (counts * pull) / 2 + cost @ (logs - start)
        curvature = damping * part.T @ (counts[:, None] * part) / 2 + cost
        curvature = curvature + 1e-9 * curvature.diagonal().mean() * torch.eye(len(theta), dtype=torch.float64)
        move = -torch.linalg.solve(curvature, gradient)
        step = min(1.0, 3.0 / float(move.abs().max().clamp_min(1e-300)))
        while step > 1e-6:
            moved = (logs + step * move).clamp(start - _FARTHEST, start + _FARTHEST)
            new = objective(moved)
            if new < value:
                break
            step /= 2
        else:
            break
        done = value - new < 1e-9 * max(1.0, float(counts.sum()))
        logs, value = moved, new
        if done:
            break
    theta = logs.exp() * size
    coefficients = torch.zeros_like(sizes)
    coefficients[live] = theta[1:] / sizes[live]
    return coefficients, theta[0].clamp_min(_LEAST * size)


def crossed_shape(
    error: Tensor,
    columns: Tensor,
    sizes: Tensor,
    shares: Tensor,
    weights: Tensor | None = None,
    *,
    folds: int = 10,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """Return variances `(n, K)` of validation rows from fits to rows of other folds."""
    fold = torch.from_numpy(np.random.default_rng(seed).permutation(len(error)) % min(folds, len(error)))
    variance = torch.empty_like(error, dtype=torch.float64)
    for number in fold.unique():
        out = fold == number
        fit = fit_shape(
            error[~out], columns[~out], sizes, shares, None if weights is None else weights[~out], **options
        )
        variance[out] = fit.variance(columns[out])
    return variance


@dataclass(frozen=True)
class Guard:
    """Growth of the variance for rows that are unlike all validation rows.

    Attributes:
        limits: `(K, M)`, a quantile of each of M kinds of leverage of usual rows.
        constants: `(K,)`, mean squared errors of the validation rows.
        centres: `(K,)`, means of their targets.
        spreads: `(K,)`, variances of their targets.
    """

    limits: Tensor
    constants: Tensor
    centres: Tensor
    spreads: Tensor

    @classmethod
    def fit(cls, leverage: Tensor, error: Tensor, target: Tensor, weights: Tensor | None = None) -> Guard:
        """Set limits at a quantile of the leverage `(m, K, M)` of usual rows; error and target are `(n, K)`."""
        counts = torch.ones(len(error), dtype=torch.float64) if weights is None else weights.double()
        counts = counts / counts.sum()
        centres = counts @ target.double()
        limits = leverage.double().quantile(QUANTILE, 0)
        return cls(
            limits.clamp_min(torch.finfo(torch.float64).tiny),
            counts @ error.double().square(),
            centres,
            counts @ (target.double() - centres).square(),
        )

    def novelty(self, leverage: Tensor) -> Tensor:
        """Return `(n,)`: the leverage `(n, K, M)` in units of the limits, the largest of all outputs and kinds."""
        return (leverage.double() / self.limits).amax((1, 2))

    def grown(self, variance: Tensor, novelty: Tensor, mean: Tensor, without: Tensor | None = None) -> Tensor:
        """Return the variance `(n, K)` of rows of some novelty.

        Beyond the limit trees know nothing, so that the larger of the variance and of `without`, the one of a fit
        without them, grows in proportion to the novelty, though not beyond what the targets alone say. Divided by the
        novelty, the variance is about what it was at the limit, so that it does not jump there.
        """
        strange = novelty[:, None] > 1
        base = variance if without is None else torch.where(strange, torch.maximum(variance, without), variance)
        factor = novelty[:, None].clamp_min(1)
        ceiling = self.spreads + (mean.double() - self.centres).square()
        grown = factor * base + (factor - 1) * self.constants
        return torch.minimum(grown, torch.maximum(base / factor, ceiling))
