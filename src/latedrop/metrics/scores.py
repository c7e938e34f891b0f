"""Score predictions and their variances: errors, proper scores, intervals against their levels, and ranks of errors.

A proper score is lowest, on average, for the distribution that the targets come from. The arguments that all metrics
share are those of `latedrop.metrics`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop.metrics.entries import Array, Options, average, scored
from latedrop.metrics.levels import Levels, central_quantile, checked_level, checked_levels, fraction_inside

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    *("auroc", "calibration_curve", "coverage", "crps", "ideal_nll", "interval_width", "mae", "miscalibration_area"),
    *("nll", "rank_correlation", "rmse"),
]

_CONSTANT = math.log(2 * math.pi) / 2


def rmse(mean: Array, variance: Array | None, target: Array, **options: Unpack[Options]) -> Tensor:
    """Return the root mean squared error, `sqrt(mean(e^2))`, a scalar or `(K,)` in the target's unit.

    `variance` is ignored and may be None.

    >>> rmse([0.0, 0.0], None, [3.0, 4.0])
    tensor(3.5355)
    """
    return scored(lambda e, _, w: average(e.square(), w).sqrt(), mean, None, target, **options)


def mae(mean: Array, variance: Array | None, target: Array, **options: Unpack[Options]) -> Tensor:
    """Return the mean absolute error, `mean(|e|)`, a scalar or `(K,)` in the target's unit.

    `variance` is ignored and may be None.

    >>> mae([0.0, 0.0], None, [3.0, -4.0])
    tensor(3.5000)
    """
    return scored(lambda e, _, w: average(e.abs(), w), mean, None, target, **options)


def nll(mean: Array, variance: Array, target: Array, *, constant: bool = True, **options: Unpack[Options]) -> Tensor:
    """Return the Gaussian NLL, `mean(e^2 / (2 v) + log(v) / 2) + log(2 pi) / 2`, a scalar or `(K,)` in nats.

    The variance has to be above 0. `constant` says whether `log(2 pi) / 2` is part of it; the dropout injection paper
    leaves it out.

    >>> nll([0.0, 0.0], [1.0, 4.0], [1.0, 2.0], constant=False)
    tensor(0.8466)
    """

    def score(error: Tensor, var: Tensor, weights: Tensor | None) -> Tensor:
        return average(error.square() / var + var.log(), weights) / 2

    return scored(score, mean, variance, target, positive=True, **options) + (_CONSTANT if constant else 0.0)


def ideal_nll(
    mean: Array, variance: Array | None, target: Array, *, constant: bool = True, **options: Unpack[Options]
) -> Tensor:
    """Return the lowest `nll` any variance reaches, that of `v = e^2`: `mean(1 + log(e^2)) / 2 + log(2 pi) / 2`.

    An error of exactly 0 would make it -inf: such entries are left out. `variance` is ignored and may be None.

    >>> ideal_nll([0.0, 0.0, 5.0], None, [1.0, 2.0, 5.0], constant=False)
    tensor(0.8466)
    """

    def score(error: Tensor, _: Tensor, weights: Tensor | None) -> Tensor:
        used = error != 0
        if not bool(used.any()):
            raise DataError(
                "expected an error that is not 0, found every error 0: the ideal variance is 0 and its NLL -inf; "
                "check that the target is not the prediction itself"
            )
        return average(error[used].abs().log(), None if weights is None else weights[used]) + 0.5

    return scored(score, mean, None, target, **options) + (_CONSTANT if constant else 0.0)


def crps(mean: Array, variance: Array, target: Array, **options: Unpack[Options]) -> Tensor:
    """Return the continuous ranked probability score: the integral of `(F(t) - [t >= target])^2`, `F` Gaussian.

    In closed form `mean(std (w (2 Phi(w) - 1) + 2 phi(w) - 1 / sqrt(pi)))`, with `w = e / std`, a scalar or `(K,)` in
    the target's unit. As the variance goes to 0 it becomes `|e|`, and a variance of 0 is scored so.

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


def calibration_curve(
    mean: Array, variance: Array, target: Array, *, levels: Levels = 99, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Return how often the target lies in the central interval `mean ± z_a std`, against the interval's level `a`.

    Below the bisector the uncertainty is too small (overconfident), above it too large (underconfident). A variance
    of 0 is an interval of no width.

    Returns:
        The levels `(L,)` and the observed frequencies `(L,)`, or `(K, L)` with `per_output`.

    Example:
        >>> calibration_curve([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
        (tensor([0.5000, 0.9000]), tensor([0.5000, 0.7500]))
    """
    grid = checked_levels(levels)

    def observed(error: Tensor, var: Tensor, weights: Tensor | None) -> Tensor:
        size, var = error.detach().abs(), var.detach()
        # An interval of no width holds only error 0.
        ratio, order = torch.where(size == 0, 0, size / var.sqrt()).sort()
        return fraction_inside(ratio, central_quantile(grid).to(ratio), None if weights is None else weights[order])

    curve = scored(observed, mean, variance, target, **options)
    return grid.to(curve), curve


def miscalibration_area(
    mean: Array, variance: Array, target: Array, *, levels: Levels = 99, **options: Unpack[Options]
) -> Tensor:
    """Return the area between the calibration curve and the bisector, `mean(|pi(a) - a|)` over the levels.

    A scalar or `(K,)`, between 0 (calibrated) and about 0.5.

    >>> miscalibration_area([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
    tensor(0.0750)
    """
    grid, pi = calibration_curve(mean, variance, target, levels=levels, **options)
    return (pi - grid).abs().mean(-1)


def coverage(mean: Array, variance: Array, target: Array, *, level: float = 0.9, **options: Unpack[Options]) -> Tensor:
    """Return the fraction of targets inside the central interval, `pi(a)`, a scalar or `(K,)`; `level` is calibrated.

    >>> coverage([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0])
    tensor(0.7500)
    """
    return calibration_curve(mean, variance, target, levels=[checked_level(level)], **options)[1].squeeze(-1)


def interval_width(
    mean: Array, variance: Array, target: Array, *, level: float = 0.9, **options: Unpack[Options]
) -> Tensor:
    """Return the mean width of the central interval, `2 z_a mean(std)`, a scalar or `(K,)` in the target's unit.

    It does not depend on the targets.

    >>> interval_width([0.0, 0.0], [1.0, 4.0], [1.0, 2.0], level=0.9)
    tensor(4.9346)
    """
    z = central_quantile(checked_level(level))
    return scored(lambda _, var, w: 2 * z * average(var.sqrt(), w), mean, variance, target, **options)


def rank_correlation(mean: Array, variance: Array, target: Array, *, per_output: bool = False) -> Tensor:
    """Return Spearman's correlation of standard deviation and size of the error, a scalar or `(K,)`; ties share ranks.

    0 where all variances or all errors are equal: a constant ranks nothing.

    >>> rank_correlation([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, -3.0])
    tensor(1.)
    """

    def score(error: Tensor, var: Tensor, _: Tensor | None) -> Tensor:
        a, b = (ranks - ranks.mean() for ranks in (_ranks(error.abs()), _ranks(var)))
        size = a.norm() * b.norm()
        return (a @ b / size if float(size) > 0 else torch.zeros_like(size)).to(var.dtype)

    return scored(score, mean, variance, target, per_output=per_output)


def auroc(score: Array, positive: Array) -> Tensor:
    """Return the probability that one of `positive` has a larger score than another entry, a scalar.

    `score` `(N,)` are numbers, such as the standard deviations of usual and of strange rows; `positive` `(N,)` is bool.
    Equal scores count half.

    >>> auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
    tensor(0.7500)
    """
    values, chosen = torch.as_tensor(score).double().flatten(), torch.as_tensor(positive).flatten()
    if chosen.dtype != torch.bool or len(chosen) != len(values):
        raise DataError(
            f"expected one bool for each of {len(values)} scores; found {len(chosen)} of {chosen.dtype}. "
            "Compare them, as in labels == 1."
        )
    if not bool(values.isfinite().all()):
        raise DataError("expected finite scores; found NaN or inf. Remove these entries.")
    many, rest = int(chosen.sum()), int((~chosen).sum())
    if not many or not rest:
        raise DataError(f"expected entries of both kinds; found {many} positive and {rest} others.")
    above = float(_ranks(values)[chosen.to(values.device)].sum()) - many * (many + 1) / 2
    return torch.tensor(above / (many * rest))


def _ranks(values: Tensor) -> Tensor:
    """Return ranks from 1, in float64; equal values share the mean of their ranks."""
    _, group, sizes = torch.unique(values, return_inverse=True, return_counts=True)
    shared: Tensor = sizes.cumsum(0).double() - (sizes.double() - 1) / 2
    return shared[group]
