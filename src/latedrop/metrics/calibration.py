"""Whether intervals hold as many targets as they promise: the calibration curve and what is read off it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.metrics.entries import Array, Options, average, scored
from latedrop.metrics.levels import Levels, central_quantile, checked_level, checked_levels, fraction_inside

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["balance", "calibration_curve", "coverage", "ence", "interval_width", "miscalibration_area"]


def calibration_curve(
    mean: Array, variance: Array, target: Array, *, levels: Levels = 99, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """How often the target lies in the central interval `mean ± z_a std`, against the interval's level `a`.

    Below the bisector the uncertainty is too small (overconfident), above it too large (underconfident). A variance
    of 0 is an interval of no width. The arguments are those of every metric, see `latedrop.metrics`.

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
    """Area between the calibration curve and the bisector, `mean(|pi(a) - a|)` over the levels.

    A scalar or `(K,)`, between 0 (calibrated) and about 0.5. The arguments are those of `calibration_curve`.

    >>> miscalibration_area([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
    tensor(0.0750)
    """
    grid, pi = calibration_curve(mean, variance, target, levels=levels, **options)
    return (pi - grid).abs().mean(-1)


def balance(mean: Array, variance: Array, target: Array, *, levels: Levels = 99, **options: Unpack[Options]) -> Tensor:
    """Signed area between the calibration curve and the bisector, `mean(pi(a) - a)` over the levels.

    A scalar or `(K,)`, between about -0.5 and 0.5. Negative is overconfident on the whole, positive underconfident.
    It never falls as one factor on every variance grows: bisection over that factor finds the relaxed scale. The
    arguments are those of `calibration_curve`.

    >>> balance([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
    tensor(-0.0750)
    """
    grid, pi = calibration_curve(mean, variance, target, levels=levels, **options)
    return (pi - grid).mean(-1)


def coverage(mean: Array, variance: Array, target: Array, *, level: float = 0.9, **options: Unpack[Options]) -> Tensor:
    """Fraction of targets inside the central interval at one level, `pi(a)`, a scalar or `(K,)`; `level` is calibrated.

    The arguments are those of every metric, see `latedrop.metrics`.

    >>> coverage([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0])
    tensor(0.7500)
    """
    return calibration_curve(mean, variance, target, levels=[checked_level(level)], **options)[1].squeeze(-1)


def interval_width(
    mean: Array, variance: Array, target: Array, *, level: float = 0.9, **options: Unpack[Options]
) -> Tensor:
    """Mean width of the central interval at one level, `2 z_a mean(std)`; the sharpness.

    A scalar or `(K,)`, in the target's unit; it does not depend on the targets. The arguments are those of every
    metric, see `latedrop.metrics`.

    >>> interval_width([0.0, 0.0], [1.0, 4.0], [1.0, 2.0], level=0.9)
    tensor(4.9346)
    """
    z = central_quantile(checked_level(level))
    return scored(lambda _, var, w: 2 * z * average(var.sqrt(), w), mean, variance, target, **options)


def ence(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    bins: int = 10,
) -> Tensor:
    """Expected normalised calibration error, `mean(|RMV - RMSE| / RMV)` over bins of like variance.

    Entries are put in order of predicted variance and cut into `bins` of equal size, give or take one. RMV is the root
    of a bin's mean variance, RMSE the root of its mean squared error. A scalar or `(K,)`; 0 is calibrated, and there is
    no upper bound. The arguments are those of every metric, see `latedrop.metrics`; the variance has to be above 0.

    >>> ence([0.0] * 4, [1.0, 1.0, 4.0, 4.0], [1.0, -1.0, 4.0, 4.0], bins=2)
    tensor(0.5000)
    """

    def score(error: Tensor, var: Tensor, _: Tensor | None) -> Tensor:
        if not 1 <= bins <= error.numel():
            raise ArgumentError(
                f"expected bins between 1 and the number of entries, {error.numel()}, found {bins}; "
                "take fewer bins or more validation rows"
            )
        order = var.argsort(stable=True)
        rmv = torch.stack([part.mean().sqrt() for part in var[order].tensor_split(bins)])
        root = torch.stack([part.square().mean().sqrt() for part in error[order].tensor_split(bins)])
        return ((rmv - root).abs() / rmv).mean()

    return scored(score, mean, variance, target, mask=mask, per_output=per_output, positive=True)
