"""Intervals that follow the errors: a running bias, a running scale, and quantile tracking.

For a row with prediction `m` and standard deviation `s`, the interval is

    m + b ± t · c · exp(theta) · s,

where `t` is the quantile of Student's distribution with `n + PRIOR` degrees of freedom, n being the labels remembered,
and before the first label that of the normal one, `z`. Each output has three numbers, which change with every label,
after its own interval was judged:

- `b`, the bias: running means of the errors with several gains, averaged with weights that fall with the squared errors
  that each has made (Vovk 1990, aggregation of experts; one of them never moves from 0);
- `c`, the scale: the root of the running mean of squared standardised errors, after `PRIOR` labels of 1;
- `theta += step · (missed - (1 - level))`: quantile tracking, the P of conformal PID control (Angelopoulos, Candes,
  Tibshirani 2023), of the logarithm of the score. A miss widens all later intervals by a factor, a hit narrows them.

Errors beyond `MOST` running standard deviations move bias and scale no further than that.

Whatever the data do, `theta` cannot rise once intervals hold the largest error; so the share of misses is bounded, as
docs/stream.md says. Nothing is assumed about the data, and nothing is needed of `b` and `c` but that `c` stays above 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.metrics.levels import normal_quantile
from latedrop.records import Limits, match, record

__all__ = ["GAINS", "STEP", "Tracker", "TrackerState", "student"]

STEP = 0.15
GAINS = (0.0, 0.05, 0.2, 0.5, 0.8)
PRIOR = 2.0
KEEP = 0.98
"""Of what was learned, at every label."""
MOST = 5.0
"""Errors beyond so many of the running scale count as if they were there: a label may be a slip of the pen."""
LEAST_SCALE = sqrt(PRIOR * (1 - KEEP) / (1 + PRIOR * (1 - KEEP)))
_LEAST_THETA = log(0.01)
_LARGEST = 1e300

Array = npt.NDArray[np.float64]
_Amounts: TypeAlias = tuple[Annotated[float, Limits(0, _LARGEST)], ...]


@record
@dataclass(frozen=True)
class TrackerState:
    """The memory of a tracker, in a file; see `Tracker`."""

    weight: Annotated[float, Limits(0, 1 / (1 - KEEP) + 1e-9)]
    theta: tuple[Annotated[float, Limits(_LEAST_THETA - 1e-9, 700)], ...]
    squares: _Amounts
    means: tuple[tuple[Annotated[float, Limits(-_LARGEST, _LARGEST)], ...], ...]
    losses: tuple[_Amounts, ...]


def student(z: float, freedom: float) -> float:
    """The quantile of Student's distribution where the normal one has `z`, by Fisher's expansion; never below `z > 0`.

    >>> round(student(1.6449, 3), 3), round(student(1.6449, 50), 3)  # exact: 2.353, 1.676
    (2.347, 1.676)
    """
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + max(0.0, first + second + third)


class Tracker:
    """The three numbers for each of K outputs."""

    def __init__(self, level: float, outputs: int, step: float = STEP) -> None:
        self.level, self.step = level, step
        self.z = normal_quantile((1 + level) / 2)
        self.theta = np.zeros(outputs)
        self.squares = np.zeros(outputs)
        self.weight = 0.0
        self.means = np.zeros((len(GAINS), outputs))
        self.losses = np.zeros((len(GAINS), outputs))

    @property
    def bias(self) -> Array:
        """The number added to a prediction, `(K,)`."""
        weights = np.exp(self.losses.min(0) - self.losses)
        bias: Array = (weights * self.means).sum(0) / weights.sum(0)
        return bias

    @property
    def scale(self) -> Array:
        """The running scale `c`, `(K,)`."""
        scale: Array = np.sqrt((PRIOR + self.squares) / (PRIOR + self.weight))
        return scale

    @property
    def factor(self) -> Array:
        """Half the interval in standard deviations, `(K,)`."""
        t = student(self.z, PRIOR + self.weight) if self.weight else self.z
        factor: Array = t * self.scale * np.exp(self.theta)
        return factor

    def learn(self, mean: Array, std: Array, target: Array) -> npt.NDArray[np.bool_]:
        """Learn from the label of one row, `(K,)` each; whether the interval as it is now would have missed it."""
        error, scale = target - mean, self.scale
        z = (error - self.bias) / std
        missed: npt.NDArray[np.bool_] = np.abs(z) > self.factor
        self.theta = np.maximum(self.theta + self.step * (missed - (1 - self.level)), _LEAST_THETA)
        off = np.clip((error - self.means) / std / scale, -MOST, MOST)
        self.losses = KEEP * self.losses + off**2 / 2
        self.losses = self.losses - self.losses.min(0)
        self.means = self.means + np.array(GAINS)[:, None] * off * scale * std
        squared = np.clip(z / scale, -MOST, MOST) ** 2 * scale**2
        self.squares, self.weight = KEEP * self.squares + squared, KEEP * self.weight + 1
        return missed

    def state(self) -> TrackerState:
        """Return what it remembers."""
        by_gain = (tuple(map(tuple, part.tolist())) for part in (self.means, self.losses))
        return TrackerState(self.weight, tuple(self.theta.tolist()), tuple(self.squares.tolist()), *by_gain)

    def resume(self, state: TrackerState, name: str) -> None:
        """Go on from what another one remembered; `FieldError` where that had other outputs."""
        self.weight = state.weight
        for part in ("theta", "squares", "means", "losses"):
            there, here = getattr(state, part), getattr(self, part)
            rows = [len(row) for row in there] if here.ndim == 2 else [len(there)]
            fits = rows == ([here.shape[1]] * len(here) if here.ndim == 2 else [len(here)])
            match(fits, f"{name}.{part}", f"numbers of shape {here.shape}", there)
            setattr(self, part, np.array(there))
