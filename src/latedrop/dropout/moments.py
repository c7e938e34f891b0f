"""Mean and variance over draws, streamed.

With `y_t` the output of draw `t`, the mean is `sum_t y_t / T` and the variance `sum_t (y_t - mean)^2 / (T - 1)`, whose
relative standard error is about `sqrt(2 / (T - 1))`. Parts are merged as in Chan, Golub, LeVeque (1983), so that memory
does not grow with the number of draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from latedrop.torch_private import being_traced

__all__ = ["Moments", "Part", "Stream", "merged", "moments_of", "out_of_memory"]

_NOTHING = torch.empty(0)
_FEW = 2**12  # outputs for which one operator is quicker than three; it takes longer for each


@dataclass(frozen=True)
class Moments:
    """Mean and variance over draws.

    Attributes:
        mean: `(N, ...)`, float32 or float64.
        variance: `(N, ...)`, the unbiased variance over draws.
        draws: how many thinned networks were run.
        outputs: `(draws, N, ...)`, every draw, where they were kept.
    """

    mean: Tensor
    variance: Tensor
    draws: int
    outputs: Tensor | None = None

    def first(self, rows: int) -> Moments:
        """Those of the first rows."""
        outputs = self.outputs[:, :rows] if self.outputs is not None else None
        return Moments(self.mean[:rows], self.variance[:rows], self.draws, outputs)

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """One batch after the other."""
        kept = [part.outputs for part in parts if part.outputs is not None]
        outputs = torch.cat(kept, 1) if kept else None
        mean, variance = torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])
        return cls(mean, variance, parts[0].draws, outputs)

    @classmethod
    def unmoved(cls, mean: Tensor, draws: int, *, keep: bool = False) -> Moments:
        """At rate 0 every draw is the model itself."""
        return cls(mean, torch.zeros_like(mean), draws, mean.expand(draws, *mean.shape).clone() if keep else None)


Part: TypeAlias = "tuple[Tensor, Tensor, int]"
"""Mean, sum of squared deviations from it, and number of some draws."""


def merged(a: Part, b: Part) -> Part:
    """Of two sets of draws together (Chan, Golub, LeVeque 1983)."""
    (mean, squares, done), (part, spread, count) = a, b
    delta, total = part - mean, done + count
    return mean + delta * (count / total), squares + spread + delta.square() * (done * count / total), total


class Stream:
    """Running mean and sum of squared deviations over chunks of draws; there must be one before either is asked for."""

    def __init__(self) -> None:
        self._origin = _NOTHING
        self._part: Part = (self._origin, self._origin, 0)

    def add(self, outputs: Tensor) -> None:
        """Take a chunk `(t, N, ...)`."""
        if self._part[2] == 0:
            self._origin = outputs[0].clone()
        # Relative to the first draw: draws that are all equal then have a variance of exactly 0.
        outputs = outputs - self._origin
        if _are_few(outputs):
            spread, mean = torch.var_mean(outputs, 0, correction=0)
            part = mean, spread * len(outputs), len(outputs)
        else:
            mean = outputs.mean(0)
            part = mean, (outputs - mean).square_().sum(0), len(outputs)
        self._part = part if self._part[2] == 0 else merged(self._part, part)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, `(N, ...)`."""
        mean, squares, draws = self._part
        return self._origin + mean, squares / (draws - 1)


def moments_of(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The same of all draws `(T, N, ...)` at once, in fewer operators."""
    if not _are_few(outputs):
        stream = Stream()
        stream.add(outputs)
        return stream.moments()
    if outputs.is_cpu or outputs.is_cuda:  # whose operators give exactly 0 for draws that are all equal
        variance, mean = torch.var_mean(outputs, 0)
        return mean, variance
    origin = outputs[0]
    variance, mean = torch.var_mean(outputs - origin, 0)
    return origin + mean, variance


def _are_few(outputs: Tensor) -> bool:
    """Not in a graph, which does the same for any number of rows."""
    return 0 < outputs.numel() <= _FEW and not being_traced()


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
