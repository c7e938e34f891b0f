"""The NLL over rate and scale: a valley, known in closed form.

At one rate, with the variances of n rows and their errors, `S = mean(e^2 / variance)` is the best scale, and

    NLL(s) = NLL(S) + (q - 1 - log q) / 2,     q = S / s,

so that the whole surface follows from the best scale and its NLL, rate by rate. Between the rates that were measured,
the logarithm of `S` and `NLL(S)` are interpolated over the logarithm of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies.claims import Values
from studies.uci.effects import curves

__all__ = ["Valley", "reach", "rise", "valley"]


@dataclass(frozen=True)
class Valley:
    """The best scale and its NLL on the validation rows of one split, `(R,)`, at rates of even logarithms."""

    rates: Values
    scales: Values
    nll: Values

    def surface(self, scales: Values) -> Values:
        """The NLL at every rate and scale, `(R, C)`."""
        return self.nll[:, None] + rise(self.scales[:, None] / scales)


def valley(record: Mapping[str, Any], kind: str, *, points: int, split: int = 0) -> Valley:
    """The valley of injected or embedded dropout at so many rates."""
    measured = np.log(record["rates"])
    at = np.linspace(measured[0], measured[-1], points)
    scale, nll = (curves(record, kind, name, "validation")[:, split] for name in ("scale", "nll_scaled"))
    return Valley(np.exp(at), np.exp(np.interp(at, measured, np.log(scale))), np.interp(at, measured, nll))


def rise(ratio: Values) -> Values:
    """How far the NLL is above the valley at a scale that is the best one over `ratio`.

    >>> rise(np.array([1.0])).item()
    0.0
    """
    found: Values = (ratio - 1 - np.log(ratio)) / 2
    return found


def reach(height: float) -> tuple[float, float]:
    """The two scales, as multiples of the best one, at which the NLL is so far above the valley.

    >>> low, high = reach(0.5)
    >>> [round(rise(np.array(1 / side)).item(), 6) for side in (low, high)]
    [0.5, 0.5]
    """
    if height <= 0:
        return 1.0, 1.0

    def root(inside: float, outside: float) -> float:
        """Of the rise as a function of log q, between the valley and a place above that height."""
        for _ in range(60):
            middle = (inside + outside) / 2
            above = (math.exp(middle) - 1 - middle) / 2 >= height
            inside, outside = (inside, middle) if above else (middle, outside)
        return outside

    far = 2 * height + 2
    return math.exp(-root(0.0, math.log(2 * far))), math.exp(-root(0.0, -far))
