"""Mean and variance over draws, streamed.

With `y_t` the output of draw `t`, the mean is `sum_t y_t / T` and the variance `sum_t (y_t - mean)^2 / (T - 1)`, whose
relative standard error is about `sqrt(2 / (T - 1))`. Parts are merged as in Chan, Golub, LeVeque (1983), so that memory
does not grow with the number of draws. `Sampling` says how draws are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.network.network import Readout
from latedrop.options import AtLeast, check_options, shown
from latedrop.torch_private import being_traced

__all__ = [
    *("MOST_DRAWS", "PROGRAMS", "Engine", "Moments", "Sampling", "Stream", "checked_draws", "moments_of"),
    "out_of_memory",
]

Engine: TypeAlias = Literal["auto", "rows", "loop", "compiled", "recorded"]
PROGRAMS = ("compiled", "recorded")
"""The engines that make a program of the network for inputs of one shape."""
MOST_DRAWS = 1_000_000
"""More would take days, and come from a slip of the pen or a file that was tampered with."""

_FEW = 2**12  # outputs for which one operator is quicker than three; it takes longer for each


@dataclass(frozen=True)
class Sampling:
    """How draws are run: the options of `sample`, where they are described."""

    draws: int = 100
    seed: int = 0
    readout: Readout = None
    chunk: Annotated[int, AtLeast(1)] | None = None
    shared: bool = True
    keep: bool = False  # whether every draw is returned too
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", checked_draws(self.draws))
        check_options(self, "latedrop.sample")
        if self.engine in PROGRAMS and self.keep:
            raise ArgumentError(f"expected another engine with keep_draws=True; {self.engine!r} has moments alone.")


def checked_draws(draws: Any) -> int:
    """Return the number of draws as an int, or raise `ArgumentError`."""
    if isinstance(draws, bool) or not hasattr(draws, "__index__") or int(draws) < 2:
        raise ArgumentError(f"expected at least 2 draws, as one has no variance; found {shown(draws)}.")
    if int(draws) > MOST_DRAWS:
        raise ArgumentError(f"expected at most {MOST_DRAWS} draws; found {shown(draws)}. A few hundred are enough.")
    return int(draws)


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

    def __repr__(self) -> str:
        ending = "" if self.outputs is None else ", every draw kept"
        return f"Moments of {self.draws} draws, mean {tuple(self.mean.shape)}{ending}"

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """Return those of one batch after the other as one."""
        if len(parts) == 1:
            return parts[0]
        each = [part.outputs for part in parts if part.outputs is not None]
        outputs = torch.cat(each, 1) if each else None
        mean, variance = torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])
        return cls(mean, variance, parts[0].draws, outputs)

    @classmethod
    def unmoved(cls, mean: Tensor, draws: int, *, keep: bool = False) -> Moments:
        """At rate 0 every draw is the model itself."""
        return cls(mean, torch.zeros_like(mean), draws, mean.expand(draws, *mean.shape).clone() if keep else None)


class Stream:
    """Running mean and sum of squared deviations over chunks of draws; there must be one before they are asked for.

    Means are relative to the first draw: draws that are all equal then have a variance of exactly 0.
    """

    def __init__(self) -> None:
        self._origin = torch.empty(0)
        self._part: tuple[Tensor, Tensor, int] | None = None

    def add(self, outputs: Tensor) -> None:
        """Take a chunk `(t, N, ...)`."""
        origin = outputs[0].clone() if self._part is None else self._origin
        outputs = outputs - origin
        mean = outputs.mean(0)
        self.merge(origin, mean, (outputs - mean).square_().sum(0), len(outputs))

    def merge(self, origin: Tensor, mean: Tensor, squares: Tensor, count: int) -> None:
        """Take the mean of some draws, relative to `origin`, and the sum of their squared deviations from it."""
        if self._part is None:
            self._origin, self._part = origin, (mean, squares, count)
            return
        before, spread, done = self._part  # as in Chan, Golub, LeVeque (1983)
        delta, total = mean + (origin - self._origin) - before, done + count
        spread = spread + squares + delta.square() * (done * count / total)
        self._part = before + delta * (count / total), spread, total

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, `(N, ...)`."""
        assert self._part is not None
        mean, squares, draws = self._part
        return self._origin + mean, squares / (draws - 1)


def moments_of(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same of all draws `(T, N, ...)` at once; of a few numbers in one operator."""
    few = 0 < outputs.numel() <= _FEW and not being_traced()  # a graph does the same for any number of rows
    if few and (outputs.is_cpu or outputs.is_cuda):  # whose operator gives exactly 0 for draws that are all equal
        variance, mean = torch.var_mean(outputs, 0)
        return mean, variance
    stream = Stream()
    stream.add(outputs)
    return stream.moments()


def out_of_memory(error: Exception) -> bool:
    """Return True if an error says that memory ran out, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
