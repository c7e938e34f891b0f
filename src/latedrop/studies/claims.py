"""A claim, and how it is decided from the numbers.

A claim has an effect and a threshold. It holds where the whole interval of the effect is beyond the threshold, fails
where the whole interval is on the other side, and is otherwise not decided. The interval of a mean is two standard
errors to either side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.crowd.blocks import standard_error

__all__ = ["Claim", "Effect", "Record", "Values", "Verdict", "decide"]

Record: TypeAlias = Mapping[str, Any]
Values: TypeAlias = npt.NDArray[np.float64]
Verdict: TypeAlias = Literal["holds", "fails", "not decided"]


@dataclass(frozen=True)
class Effect:
    """A number and its interval; the interval is the number itself where there is none."""

    value: float
    low: float
    high: float

    @classmethod
    def plain(cls, value: float) -> Effect:
        """Without an interval."""
        return cls(value, value, value)

    @classmethod
    def mean(cls, values: Values) -> Effect:
        """The mean of splits or blocks `(B,)`, two standard errors to either side."""
        mean, error = float(values.mean()), standard_error(values)
        return cls(mean, mean - 2 * error, mean + 2 * error)


@dataclass(frozen=True)
class Claim:
    """One statement.

    Attributes:
        text: what is claimed.
        effect: what is measured, in words.
        measure: the effect on a set; None where the set does not say.
        above: it holds where the effect is above this; None: where it is below `below`.
        below: the other threshold.
        source: whose claim it is.
    """

    text: str
    effect: str
    measure: Callable[[Record], Effect | None]
    above: float | None = None
    below: float | None = None
    source: str = "paper"

    @property
    def threshold(self) -> str:
        """Effect and threshold as a sentence."""
        side = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        return f"Effect: {self.effect}; the claim is that it is {side}."


def decide(claim: Claim, record: Record) -> tuple[Verdict | None, Effect | None]:
    """The verdict on a set, and the effect; None where the set does not say."""
    effect = claim.measure(record)
    if effect is None:
        return None, None
    if claim.above is not None:
        holds, fails = effect.low > claim.above, effect.high <= claim.above
    else:
        limit = claim.below or 0.0
        holds, fails = effect.high < limit, effect.low >= limit
    return "holds" if holds else "fails" if fails else "not decided", effect
