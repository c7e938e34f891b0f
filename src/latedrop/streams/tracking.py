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

__all__ = ["GAINS", "STEP", "Array", "Tracker", "student"]

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
_Numbers: TypeAlias = tuple[Annotated[float, Limits(-_LARGEST, _LARGEST)], ...]


def student(z: float, freedom: float) -> float:
    """Return Student's quantile where the normal one is `z`, by Fisher's expansion; never below `z > 0`.

    >>> round(student(1.6449, 3), 3), round(student(1.6449, 50), 3)  # exact: 2.353, 1.676
    (2.347, 1.676)
    """
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + max(0.0, first + second + third)


@record
@dataclass
class Tracker:
    """The three numbers for each of K outputs; it is stored as it is.

    Attributes:
        weight: how many labels are remembered.
        theta: `(K,)`.
        squares: sums of squared standardised errors, `(K,)`.
        means: running mean of the errors for each gain, `(len(GAINS), K)`.
        losses: squared errors that each gain has made, `(len(GAINS), K)`.
    """

    weight: Annotated[float, Limits(0, 1 / (1 - KEEP) + 1e-9)]
    theta: tuple[Annotated[float, Limits(_LEAST_THETA - 1e-9, 700)], ...]
    squares: _Amounts
    means: tuple[_Numbers, ...]
    losses: tuple[_Amounts, ...]

    @classmethod
    def of(cls, outputs: int) -> Tracker:
        """Return a tracker of so many outputs that has seen no label."""
        zeros = (0.0,) * outputs
        return cls(0.0, zeros, zeros, (zeros,) * len(GAINS), (zeros,) * len(GAINS))

    def checked(self) -> Tracker:
        """Check lengths against each other after reading."""
        k = len(self.squares)
        match(len(self.theta) == k, "theta", f"{k} numbers, as squares", self.theta)
        for name in ("means", "losses"):
            rows = getattr(self, name)
            match([len(row) for row in rows] == [k] * len(GAINS), name, f"{len(GAINS)} lists of {k} numbers", rows)
        return self

    @property
    def bias(self) -> Array:
        """Return the number added to a prediction, `(K,)`."""
        losses = np.array(self.losses)
        weights = np.exp(losses.min(0) - losses)
        bias: Array = (weights * np.array(self.means)).sum(0) / weights.sum(0)
        return bias

    @property
    def scale(self) -> Array:
        """Return the running scale `c`, `(K,)`."""
        scale: Array = np.sqrt((PRIOR + np.array(self.squares)) / (PRIOR + self.weight))
        return scale

    def factor(self, level: float) -> Array:
        """Return half the interval of a level in standard deviations, `(K,)`."""
        z = normal_quantile((1 + level) / 2)
        factor: Array = (student(z, PRIOR + self.weight) if self.weight else z) * self.scale * np.exp(self.theta)
        return factor

    def learn(self, mean: Array, std: Array, target: Array, level: float, step: float = STEP) -> npt.NDArray[np.bool_]:
        """Learn from the label of one row, `(K,)` each; return whether the interval as it is now would have missed."""
        error, scale, means = target - mean, self.scale, np.array(self.means)
        z = (error - self.bias) / std
        missed: npt.NDArray[np.bool_] = np.abs(z) > self.factor(level)
        theta = np.maximum(np.array(self.theta) + step * (missed - (1 - level)), _LEAST_THETA)
        off = np.clip((error - means) / std / scale, -MOST, MOST)
        losses = KEEP * np.array(self.losses) + off**2 / 2
        means = means + np.array(GAINS)[:, None] * off * scale * std
        squares = KEEP * np.array(self.squares) + np.clip(z / scale, -MOST, MOST) ** 2 * scale**2
        self.weight = KEEP * self.weight + 1
        self.theta, self.squares = tuple(theta.tolist()), tuple(squares.tolist())
        self.means, self.losses = (tuple(map(tuple, part.tolist())) for part in (means, losses - losses.min(0)))
        return missed
