"""Measures that both studies take of many rows at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from latedrop.calibration.intervals import Conformal
from latedrop.errors import ArgumentError

__all__ = ["conformal_reach", "ideal_nll"]


def ideal_nll(error: Tensor) -> Tensor:
    """`mean(1 + log(e^2)) / 2` over the last axis; an error of exactly 0 counts as the smallest that is not."""
    size = error.abs()
    least = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
    return torch.maximum(size, least).log().mean(-1) + 0.5


def conformal_reach(scores: Tensor, levels: list[float]) -> list[float]:
    """Half widths of split conformal intervals from the scores `|e| / std` of held-out rows `(n,)`, level by level.

    A level above `n / (n + 1)` has an unbounded interval.

    >>> conformal_reach(torch.tensor([3.0, 1.0, 2.0]), [0.5, 0.9])
    [2.0, inf]
    """
    # Not by `Conformal.fit`, which refuses infinite scores: a row without variance is one that no interval holds.
    fitted = Conformal((tuple(scores.double().abs().sort().values.tolist()),), (1.0,), (0.0,))

    def reach(level: float) -> float:
        try:
            return float(fitted.z((1 + level) / 2))
        except ArgumentError:
            return math.inf

    return [reach(level) for level in levels]
