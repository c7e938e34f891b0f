"""Size of the errors, and proper scores: lowest, on average, for the distribution that the targets come from."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latedrop.errors import DataError, LatedropWarning
from latedrop.metrics.entries import Array, Options, average, columns, scored
from latedrop.metrics.levels import central_quantile, checked_level

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["crps", "ideal_nll", "interval_score", "mae", "nll", "rmse"]

_CONSTANT = math.log(2 * math.pi) / 2


def rmse(mean: Array, variance: Array | None, target: Array, **options: Unpack[Options]) -> Tensor:
    """Root mean squared error, `sqrt(mean(e^2))`, a scalar or `(K,)` in the target's unit.

    The arguments are those of every metric, see `latedrop.metrics`; `variance` is ignored and may be None.

    >>> rmse([0.0, 0.0], None, [3.0, 4.0])
    tensor(3.5355)
    """
    return scored(lambda e, _, w: average(e.square(), w).sqrt(), mean, None, target, **options)


def mae(mean: Array, variance: Array | None, target: Array, **options: Unpack[Options]) -> Tensor:
    """Mean absolute error, `mean(|e|)`, a scalar or `(K,)` in the target's unit.

    The arguments are those of every metric, see `latedrop.metrics`; `variance` is ignored and may be None.

    >>> mae([0.0, 0.0], None, [3.0, -4.0])
    tensor(3.5000)
    """
    return scored(lambda e, _, w: average(e.abs(), w), mean, None, target, **options)


def nll(mean: Array, variance: Array, target: Array, *, constant: bool = True, **options: Unpack[Options]) -> Tensor:
    """Gaussian negative log-likelihood, `mean(e^2 / (2 v) + log(v) / 2) + log(2 pi) / 2`, a scalar or `(K,)` in nats.

    The arguments are those of every metric, see `latedrop.metrics`; the variance has to be above 0. `constant` says
    whether `log(2 pi) / 2` is part of it; the dropout injection paper leaves it out.

    >>> nll([0.0, 0.0], [1.0, 4.0], [1.0, 2.0], constant=False)
    tensor(0.8466)
    """

    def score(error: Tensor, var: Tensor, weights: Tensor | None) -> Tensor:
        return average(error.square() / var + var.log(), weights) / 2

    return scored(score, mean, variance, target, positive=True, **options) + (_CONSTANT if constant else 0.0)


def ideal_nll(
    mean: Array, variance: Array | None, target: Array, *, constant: bool = True, **options: Unpack[Options]
) -> Tensor:
    """The lowest `nll` any variance reaches, that of `v = e^2`: `mean(1 + log(e^2)) / 2 + log(2 pi) / 2`.

    An error of exactly 0 would make it -inf. Such entries count as the smallest error that is not 0, with a
    warning that says how many they are. The arguments are those of `nll`; `variance` is ignored and may be None.

    >>> ideal_nll([0.0, 0.0], None, [1.0, 2.0], constant=False)
    tensor(0.8466)
    """
    sizes = [error.abs() for error, _, _ in columns(mean, None, target, **options)]
    zeros, entries = sum(int((size == 0).sum()) for size in sizes), sum(size.numel() for size in sizes)
    if any(not size.any() for size in sizes):
        raise DataError(
            "expected an error that is not 0, found every error 0: the ideal variance is 0 and its NLL -inf; "
            "check that the target is not the prediction itself"
        )
    if zeros:
        warnings.warn(
            f"{zeros} of {entries} errors are exactly 0; the ideal NLL counts them as the smallest error "
            "that is not 0 (mask them to leave them out)",
            LatedropWarning,
            stacklevel=2,
        )

    def score(error: Tensor, _: Tensor, weights: Tensor | None) -> Tensor:
        size = error.abs()
        return average(torch.where(size > 0, size, size[size > 0].min()).log(), weights) + 0.5

    return scored(score, mean, None, target, **options) + (_CONSTANT if constant else 0.0)


def crps(mean: Array, variance: Array, target: Array, **options: Unpack[Options]) -> Tensor:
    """Continuous ranked probability score: the integral of `(F(t) - [t >= target])^2`, `F` the Gaussian CDF.

    In closed form `mean(std (w (2 Phi(w) - 1) + 2 phi(w) - 1 / sqrt(pi)))`, with `w = e / std`, a scalar or `(K,)` in
    the target's unit. As the variance goes to 0 it becomes `|e|`, and a variance of 0 is scored so. The arguments are
    those of every metric, see `latedrop.metrics`.

    >>> crps([0.0, 0.0], [1.0, 0.0], [0.0, 3.0])
    tensor(1.6168)
    """

    def score(error: Tensor, var: Tensor, weights: Tensor | None) -> Tensor:
        # The inner `where` keeps 0 / 0, and so NaN gradients, out of the branch that is not taken.
        std = torch.where(var > 0, var, 1).sqrt()
        z = error / std
        density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
        gaussian = error * torch.erf(z / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
        return average(torch.where(var > 0, gaussian, error.abs()), weights)

    return scored(score, mean, variance, target, **options)


def interval_score(
    mean: Array, variance: Array, target: Array, *, level: float = 0.9, **options: Unpack[Options]
) -> Tensor:
    """Width of the interval at one level, plus a fine for each target outside it; a scalar or `(K,)`.

    `mean(2 z_a std + 2 / (1 - a) max(0, |e| - z_a std))`, in the target's unit: the fine is the distance to the
    interval, times the factor that makes the true quantiles the best bounds. The arguments are those of every metric,
    see `latedrop.metrics`.

    >>> interval_score([0.0, 0.0], [1.0, 1.0], [0.0, 2.0], level=0.9)
    tensor(6.8412)
    """
    level = checked_level(level)
    z = central_quantile(level)

    def score(error: Tensor, var: Tensor, weights: Tensor | None) -> Tensor:
        half = z * var.sqrt()
        return average(2 * half + 2 / (1 - level) * torch.relu(error.abs() - half), weights)

    return scored(score, mean, variance, target, **options)
