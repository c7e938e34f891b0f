"""Levels of central intervals, and the normal quantiles that belong to them.

The central interval at level `a` reaches from the quantile `(1 - a) / 2` to `(1 + a) / 2`; of a Gaussian these lie
`z_a = Phi^{-1}((1 + a) / 2)` standard deviations to either side of the mean.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.quantiles import checked_level, normal_quantile

__all__ = [
    "Levels",
    "central_quantile",
    "checked_level",
    "checked_levels",
    "even_levels",
    "fraction_inside",
    "normal_quantile",
]

_Level = TypeVar("_Level", float, Tensor)
Levels = int | Sequence[float] | Tensor | npt.NDArray[np.floating]
"""So many levels, evenly spaced, or the levels themselves."""


def checked_levels(levels: Levels) -> Tensor:
    """The levels, or so many evenly spaced, as a float64 CPU tensor `(L,)`."""
    if isinstance(levels, int | np.integer) and levels >= 1:
        return even_levels(int(levels))
    try:
        grid = torch.tensor([float(level) for level in levels], dtype=torch.float64)  # type: ignore[union-attr]
    except (TypeError, ValueError, OverflowError):
        grid = torch.empty(0)
    if not len(grid) or not ((grid > 0) & (grid < 1)).all():
        raise ArgumentError(
            f"expected levels as a positive int, or as numbers inside (0, 1), found {levels}; "
            "a 90 % interval is level 0.9"
        )
    return grid


def even_levels(count: int) -> Tensor:
    """`k / (count + 1)` for k from 1 to `count`, in float64."""
    return torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)


def central_quantile(level: _Level) -> _Level:
    """Return `z_a`, half the width of the central interval at level `a`, in standard deviations."""
    if isinstance(level, Tensor):
        return torch.special.ndtri((1 + level) / 2)  # type: ignore[no-any-return]
    return normal_quantile((1 + level) / 2)


def fraction_inside(ordered: Tensor, bounds: Tensor, weights: Tensor | None = None) -> Tensor:
    """Fraction of the sorted ratios `(n,)` of error to deviation that are at most each of the bounds.

    Sorted once, each bound is a look-up: memory is linear in n. `weights` `(n,)` go with the sorted ratios.
    """
    below = torch.searchsorted(ordered, bounds, right=True)
    if weights is None:
        return below.to(ordered) / ordered.shape[-1]
    sums = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    return (sums[below] / sums[-1]).to(ordered)
