"""How sure a mean over splits is, and what many tests at once may say: one place for all studies and benchmarks.

Splits of one set share rows, so the plain standard error of their mean is too small. With J splits of `n_train` and
`n_test` rows, Nadeau and Bengio (2003, "Inference for the generalization error") take

    error^2 = var · (1 / J + n_test / n_train),

and Student's t with J - 1 degrees of freedom. Holm (1979, "A simple sequentially rejective multiple test procedure")
keeps the chance of any wrong rejection among m tests at the level of one: the k-th smallest p counts `m - k + 1` times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LEVEL", "holm", "split_error", "student_inside", "student_p", "student_quantile"]

LEVEL = 0.05
"""Chance of any wrong verdict among the sets of a claim."""


def split_error(values: npt.ArrayLike, overlap: float = 0.0) -> float:
    """Standard error of the mean of splits or blocks `(J,)`; infinite where there is only one.

    Args:
        values: one for each.
        overlap: `n_test / n_train` of splits that share rows; 0 for blocks that share none.

    >>> split_error([1.0, 3.0]), split_error([1.0, 3.0], overlap=1.5)
    (1.0, 2.0)
    """
    found: npt.NDArray[Any] = np.asarray(values, dtype=np.float64)
    return math.sqrt(float(found.var(ddof=1)) * (1 / len(found) + overlap)) if len(found) > 1 else math.inf


def student_inside(t: float, freedom: int | None) -> float:
    """`P(|T| <= |t|)` of Student's t with a whole number of degrees of freedom; of a normal where None.

    A finite sum of powers of `cos(atan(t / sqrt(freedom)))` (Abramowitz and Stegun, 26.7.3 and 26.7.4): no
    approximation.

    >>> round(student_inside(1.0, 1), 6), round(student_inside(1.959964, None), 6)
    (0.5, 0.95)
    """
    if freedom is None:
        return math.erf(abs(t) / math.sqrt(2))
    if math.isinf(t):
        return 1.0
    angle = math.atan(abs(t) / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2 == 1
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= square * (power - 1) / power
    inside = math.sin(angle) * total
    return min(1.0, 2 / math.pi * (angle + inside)) if odd else min(1.0, inside)


def student_p(t: float, freedom: int | None) -> float:
    """Two-sided p value of a t statistic; 1 without degrees of freedom."""
    return 1.0 if freedom == 0 or math.isnan(t) else 1 - student_inside(t, freedom)


def student_quantile(level: float, freedom: int | None) -> float:
    """The t within which a share `level` lies to both sides of 0; infinite without degrees of freedom.

    >>> round(student_quantile(0.95, 19), 4), round(student_quantile(0.95, None), 4)
    (2.093, 1.96)
    """
    if freedom == 0:
        return math.inf
    low, high = 0.0, 1.0
    while student_inside(high, freedom) < level:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_inside(middle, freedom) < level else (low, middle)
    return high


def holm(p: Sequence[float]) -> list[float]:
    """The p values after Holm's correction, in their own order: each may be compared with the level as it is.

    >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    found, largest = [0.0] * len(p), 0.0
    for place, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - place) * p[index]))
        found[index] = largest
    return found
