"""The networks that one depth of the study needs, trained at once for all splits: plain, embedded, concrete, Gaussian.

`MEMBERS` plain networks of a split, from other initial weights and in another order of the rows, are its ensemble; the
first is the network that injection, Laplace and the rest are measured on. The Gaussian heads have as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from studies.uci.concrete import Concrete, train_concrete
from studies.uci.gaussian import train_gaussian
from studies.uci.measures import Member
from studies.uci.stacked import Plan, Stack, key, train
from studies.uci.swag import SNAPSHOTS

__all__ = ["MEMBERS", "Networks", "cost", "train_all"]

MEMBERS = 5
# Of one row in one epoch, relative to a plain network of one hidden layer: for the time left.
_CONCRETE, _GAUSSIAN, _DEEPER = 3.0, 1.5, 1.5


@dataclass(frozen=True)
class Networks:
    """Trained networks of all splits.

    Attributes:
        plain: without dropout, `MEMBERS` for each split; their `splits` are split times member.
        embedded: with dropout in training, at the stack's rates.
        concrete: with a learned rate for each site.
        gaussian: with a Gaussian head, as many as plain ones.
        seeds: of the splits.
    """

    plain: Stack
    embedded: Stack
    concrete: Concrete
    gaussian: Stack
    seeds: tuple[int, ...]

    @property
    def deep(self) -> bool:
        """More than one hidden layer."""
        return len(self.plain.layers) > 2

    def ensemble(self, split: int) -> list[Member]:
        """The plain networks of a split, in float64."""
        return [_double(self.plain.member(split * MEMBERS + index, 0)) for index in range(MEMBERS)]

    def history(self, split: int) -> list[Member]:
        """The first plain network at its snapshots, in float64."""
        return [_double(member) for member in self.plain.history(split * MEMBERS, 0)]

    def thinned(self, split: int) -> list[Member]:
        """The embedded networks of a split, rate by rate, in float64."""
        return [_double(self.embedded.member(split, index)) for index in range(len(self.embedded.rates))]

    def gaussians(self, split: int) -> list[Member]:
        """The Gaussian heads of a split, in float64."""
        return [_double(self.gaussian.member(split * MEMBERS + index, 0)) for index in range(MEMBERS)]

    def learned(self, split: int) -> tuple[Member, list[float], float]:
        """The concrete network of a split in float64, its rates, and its noise."""
        member = _double(self.concrete.stack.member(split, 0))
        return member, self.concrete.rate[split].tolist(), float(self.concrete.noise[split])


def cost(hidden: Sequence[int], rates: Sequence[float]) -> float:
    """What `train_all` reports to its `tick` for one row of one split in one epoch."""
    return (MEMBERS + len(rates) + _CONCRETE + _GAUSSIAN * MEMBERS) * _DEEPER ** (len(hidden) - 1)


def train_all(
    x: Tensor,
    y: Tensor,
    plan: Plan,
    seeds: Sequence[int],
    rates: Sequence[float],
    *,
    tick: Callable[[float], None] = lambda done: None,
    timed: Callable[[str, Callable[[], Any]], Any] = lambda name, run: run(),
) -> Networks:
    """Train every network of one depth.

    Args:
        x: `(splits, n, inputs)`, float32, standardised.
        y: `(splits, n)`.
        plan: sizes and hyper-parameters; its rates are not looked at.
        seeds: one for each split.
        rates: of the embedded networks.
        tick: told what is done, in units of `cost`.
        timed: runs a training that has a name.

    Raises:
        OutputError: a network diverged.
    """
    deeper = _DEEPER ** (len(plan.hidden) - 1)

    def counting(each: float) -> Callable[[int], None]:
        return lambda rows: tick(rows * each * deeper)

    many = x.repeat_interleave(MEMBERS, 0), y.repeat_interleave(MEMBERS, 0)
    own = [seed if index == 0 else key(seed, "member", index) for seed in seeds for index in range(MEMBERS)]
    alone = replace(plan, rates=(0.0,))
    remembering, thinned = replace(alone, snapshots=SNAPSHOTS), replace(plan, rates=tuple(rates))
    plain = timed("plain", lambda: train(*many, remembering, own, tick=counting(1)))
    embedded = timed("embedded", lambda: train(x, y, thinned, seeds, tick=counting(len(rates))))
    concrete = timed("concrete", lambda: train_concrete(x, y, alone, seeds, tick=counting(_CONCRETE)))
    gaussian = timed("gaussian", lambda: train_gaussian(*many, alone, own, tick=counting(_GAUSSIAN)))
    return Networks(plain, embedded, concrete, gaussian, tuple(seeds))


def _double(member: Member) -> Member:
    return [(weight.double(), bias.double()) for weight, bias in member]
