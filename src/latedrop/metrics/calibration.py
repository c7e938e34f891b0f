"""Whether intervals hold as many targets as they promise: the calibration curve and what is read off it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.metrics.entries import Array, average, columns, joined
from latedrop.metrics.levels import Levels, central_quantile, checked_level, checked_levels, fraction_inside

__all__ = ["balance", "calibration_curve", "coverage", "ence", "interval_width", "miscalibration_area"]


def calibration_curve(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    levels: Levels = 99,
    weights: Array | None = None,
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
    observed = []
    for error, var, w in columns(mean, variance, target, mask, per_output, weights):
        size, var = error.detach().abs(), var.detach()
        # An interval of no width holds only error 0.
        ratio, order = torch.where(size == 0, 0, size / var.sqrt()).sort()
        observed.append(fraction_inside(ratio, central_quantile(grid).to(ratio), None if w is None else w[order]))
    return grid.to(observed[0]), joined(observed, per_output)


def miscalibration_area(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    levels: Levels = 99,
    weights: Array | None = None,
) -> Tensor:
    """Area between the calibration curve and the bisector, `mean(|pi(a) - a|)` over the levels.

    A scalar or `(K,)`, between 0 (calibrated) and about 0.5. The arguments are those of `calibration_curve`.

    >>> miscalibration_area([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
    tensor(0.0750)
    """
    grid, pi = calibration_curve(
        mean, variance, target, mask=mask, per_output=per_output, levels=levels, weights=weights
    )
    return (pi - grid).abs().mean(-1)


def balance(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    levels: Levels = 99,
    weights: Array | None = None,
) -> Tensor:
    """Signed area between the calibration curve and the bisector, `mean(pi(a) - a)` over the levels.

    A scalar or `(K,)`, between about -0.5 and 0.5. Negative is overconfident on the whole, positive underconfident.
    It never falls as one factor on every variance grows: bisection over that factor finds the relaxed scale. The
    arguments are those of `calibration_curve`.

    >>> balance([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
    tensor(-0.0750)
    """
    grid, pi = calibration_curve(
        mean, variance, target, mask=mask, per_output=per_output, levels=levels, weights=weights
    )
    return (pi - grid).mean(-1)


def coverage(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    level: float = 0.9,
    weights: Array | None = None,
) -> Tensor:
    """Fraction of targets inside the central interval at one level, `pi(a)`, a scalar or `(K,)`; `level` is calibrated.

    The arguments are those of every metric, see `latedrop.metrics`.

    >>> coverage([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0])
    tensor(0.7500)
    """
    levels = [checked_level(level)]
    options: dict[str, Any] = {"mask": mask, "per_output": per_output, "weights": weights}
    _, observed = calibration_curve(mean, variance, target, levels=levels, **options)
    return observed.squeeze(-1)


def interval_width(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    level: float = 0.9,
    weights: Array | None = None,
) -> Tensor:
    """Mean width of the central interval at one level, `2 z_a mean(std)`; the sharpness.

    A scalar or `(K,)`, in the target's unit; it does not depend on the targets. The arguments are those of every
    metric, see `latedrop.metrics`.

    >>> interval_width([0.0, 0.0], [1.0, 4.0], [1.0, 2.0], level=0.9)
    tensor(4.9346)
    """
    z = central_quantile(checked_level(level))
    used = columns(mean, variance, target, mask, per_output, weights)
    return joined([2 * z * average(var.sqrt(), w) for _, var, w in used], per_output)


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
    used = columns(mean, variance, target, mask, per_output, positive=True)
    fewest = min(error.numel() for error, _, _ in used)
    if not 1 <= bins <= fewest:
        raise ArgumentError(
            f"expected bins between 1 and the number of entries, {fewest}, found {bins}; "
            "take fewer bins or more validation rows"
        )
    scores = []
    for error, var, _ in used:
        order = var.argsort(stable=True)
        rmv = torch.stack([part.mean().sqrt() for part in var[order].tensor_split(bins)])
        root = torch.stack([part.square().mean().sqrt() for part in error[order].tensor_split(bins)])
        scores.append(((rmv - root).abs() / rmv).mean())
    return joined(scores, per_output)
