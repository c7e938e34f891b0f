"""An alarm with a bounded chance to be false: a test martingale on conformal p-values.

While rows are exchangeable a p-value is uniform whatever came before, so a bet `f(p)` with mean 1 does not win on
average. The capital starts at 1; of it, `1 / (n (n + 1))` is put in at row n, and from then on bets at every row:

    active = (active + 1 / (n (n + 1))) · f(p),      capital = mean(active) + 1 / (n + 1).

The second part is what is not yet in play, so that a change is found however late it comes. The mean is over the bets
`f(p) = e · p^(e - 1)`, which win where scores are larger than usual, and over outputs or terms. By Ville's inequality
(1939) the capital ever reaches `1 / alarm` with probability at most `alarm`, over the whole stream; see Vovk 2021,
"Testing randomness online".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Annotated, TypeAlias

from latedrop.records import Limits, match, record
from latedrop.streams.bag import Bag, uniform

__all__ = ["Alarm", "Monitor", "MonitorState", "Row"]

Row = int | str
"""The name of a row: the number that `predict` gave it, or your own."""

POWERS = (0.2, 0.4, 0.6, 0.8)
_LOWEST = 1e-12  # of a p-value: what u = 0 would give
_LARGEST = 1e290


@record
@dataclass(frozen=True)
class Alarm:
    """That a stream is no longer as it was.

    Attributes:
        kind: what changed: `"errors"`, `"strangeness"` or `"shares"`.
        row: the row at which it was noticed, as `predict` numbered it or you named it.
        number: how many rows of this kind had been seen, that one included.
    """

    kind: str
    row: Row
    number: Annotated[int, Limits(1)]


_Amounts: TypeAlias = tuple[tuple[Annotated[float, Limits(0, _LARGEST)], ...], ...]


@record
@dataclass(frozen=True)
class MonitorState:
    """The memory of a monitor, in a file; see `Monitor`."""

    counts: _Amounts
    active: _Amounts
    number: Annotated[int, Limits(0)]
    capital: Annotated[float, Limits(0)]
    alarm: Alarm | None


class Monitor:
    """The capital of one kind of alarm.

    Args:
        kind: its name.
        edges: ends of the bins of its scores.
        counts: what was usual before the stream began, in bins, for each of the scores of a row; all empty where
            nothing is known.
        alarm: the probability of a false alarm.
        seed: of the numbers that break ties.
        both: bet on scores that are smaller than usual, too.
    """

    def __init__(
        self,
        kind: str,
        edges: Sequence[float],
        counts: Sequence[Sequence[float] | None],
        alarm: float,
        *,
        seed: int = 0,
        both: bool = False,
    ) -> None:
        self.kind, self.limit, self.both, self.seed = kind, 1 / alarm, both, seed
        self.bags = [Bag(edges, known) for known in counts]
        self.active = [[0.0] * (len(POWERS) * (2 if both else 1)) for _ in counts]
        self.number = 0
        self.capital = 1.0
        self.alarm: Alarm | None = None

    def add(self, scores: Sequence[float], row: Row) -> None:
        """Watch one row."""
        self.number += 1
        fresh, u = 1 / (self.number * (self.number + 1)), uniform(f"{self.kind} {self.seed}", self.number)
        total = 0.0
        for bag, active, score in zip(self.bags, self.active, scores, strict=True):
            p = bag.add(score, u)
            bets = _bets(p) + (_bets(1 - p) if self.both else [])
            for i, bet in enumerate(bets):
                active[i] = min((active[i] + fresh) * bet, _LARGEST)
            total += sum(active) / len(active)
        self.capital = total / len(self.bags) + 1 / (self.number + 1)
        if self.alarm is None and self.capital >= self.limit:
            self.alarm = Alarm(self.kind, row, self.number)

    def restart(self) -> None:
        """Forget the past: what comes now is usual."""
        self.bags = [Bag(bag.edges) for bag in self.bags]
        self.active = [[0.0] * len(row) for row in self.active]
        self.number, self.capital, self.alarm = 0, 1.0, None

    def state(self) -> MonitorState:
        """Return what it remembers."""
        counts = tuple(tuple(bag.counts) for bag in self.bags)
        return MonitorState(counts, tuple(map(tuple, self.active)), self.number, self.capital, self.alarm)

    def resume(self, state: MonitorState, name: str) -> None:
        """Go on from what another one of its kind remembered; `FieldError` where that watched other scores."""
        own = self.state()
        for part in ("counts", "active"):
            there, here = ([len(row) for row in getattr(one, part)] for one in (state, own))
            match(there == here, f"{name}.{part}", f"rows of {here} numbers", there)
        self.bags = [Bag(bag.edges, known) for bag, known in zip(self.bags, state.counts, strict=True)]
        self.active = [list(row) for row in state.active]
        self.number, self.capital, self.alarm = state.number, state.capital, state.alarm


def _bets(p: float) -> list[float]:
    at = log(max(p, _LOWEST))
    return [power * exp((power - 1) * at) for power in POWERS]
