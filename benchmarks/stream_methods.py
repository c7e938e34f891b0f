"""Ways to follow the errors of a stream, to compare with the library's: each a few lines, one output.

Every method gives half the width of the next interval, in standard deviations, and then learns the standardised error
of a label (after the bias that it was told). `issued` is a variant of the library's that learns from whether the
interval that was given at the time held the label, and not from whether the one of now would.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Protocol

import numpy as np

from latedrop.streams.tracking import KEEP, MOST, PRIOR, STEP, student

WINDOW = 50
PSEUDO = [NormalDist().inv_cdf(0.5 + (i + 0.5) / 40) for i in range(20)]
"""Scores of a calibrated predictor, which stand in until there are labels."""


class Method(Protocol):
    """Half the width of an interval, and how it learns."""

    def half(self) -> float: ...

    def learn(self, score: float, given: float) -> None: ...


class Fixed:
    """The predictor's own interval."""

    def __init__(self, level: float) -> None:
        self.level, self.z = level, NormalDist().inv_cdf((1 + level) / 2)

    def half(self) -> float:
        return self.z

    def learn(self, score: float, given: float) -> None:
        """Nothing."""


class Rolling(Fixed):
    """Split conformal on the last scores."""

    def __init__(self, level: float) -> None:
        super().__init__(level)
        self.scores = list(PSEUDO)

    def _at(self, level: float) -> float:
        known = sorted(self.scores[-WINDOW:])
        rank = int(np.ceil((len(known) + 1) * level - 1e-9))
        return 0.0 if rank < 1 else known[rank - 1] if rank <= len(known) else 1.5 * known[-1]

    def half(self) -> float:
        return self._at(self.level)

    def learn(self, score: float, given: float) -> None:
        self.scores.append(score)


class Aci(Rolling):
    """Adaptive conformal inference (Gibbs and Candes 2021)."""

    rate = 0.05

    def __init__(self, level: float) -> None:
        super().__init__(level)
        self.miss = 1 - level

    def half(self) -> float:
        return self._at(1 - min(max(self.miss, 1e-3), 0.999))

    def learn(self, score: float, given: float) -> None:
        self.miss += self.rate * (1 - self.level - (score > self.half()))
        super().learn(score, given)


class DtAci(Rolling):
    """Several of them, aggregated (Gibbs and Candes 2022); an interval of 20 labels sets its rates."""

    rates = np.array([0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128])

    def __init__(self, level: float) -> None:
        super().__init__(level)
        count, a, span = len(self.rates), 1 - level, 20
        self.misses, self.weights, self.share = np.full(count, a), np.full(count, 1 / count), 1 / (2 * span)
        self.eta = sqrt(3 / span) * sqrt((log(count * span) + 2) / ((1 - a) ** 2 * a**3 + a**2 * (1 - a) ** 3))

    def half(self) -> float:
        return self._at(1 - min(max(float(self.weights @ self.misses), 1e-3), 0.999))

    def learn(self, score: float, given: float) -> None:
        known, a = self.scores[-WINDOW:], 1 - self.level
        beta = (sum(k >= score for k in known) + 0.5) / (len(known) + 1)
        loss = a * (beta - self.misses) - np.minimum(0, beta - self.misses)
        weights = self.weights * np.exp(-self.eta * loss)
        self.weights = (1 - self.share) * weights / weights.sum() + self.share / len(weights)
        self.misses = np.clip(self.misses + self.rates * (a - (self.misses > beta)), 0, 1)
        super().learn(score, given)


class P(Fixed):
    """Quantile tracking (Angelopoulos, Candes, Tibshirani 2023), steps a tenth of the largest of the last scores."""

    def __init__(self, level: float) -> None:
        super().__init__(level)
        self.at, self.last = self.z, [self.z]

    def half(self) -> float:
        return max(self.at, 0.0)

    def learn(self, score: float, given: float) -> None:
        self.last = [*self.last, score][-WINDOW:]
        self.at += 0.1 * max(self.last) * ((score > self.half()) - (1 - self.level))


class Pi(P):
    """With the integrator of the same paper, tan(S log(n + 1) / (10 (n + 1)))."""

    def __init__(self, level: float) -> None:
        super().__init__(level)
        self.sum, self.count = 0.0, 0

    def half(self) -> float:
        inside = self.sum * log(self.count + 1) / (10 * (self.count + 1))
        return max(self.at + float(np.tan(np.clip(inside, -1.5, 1.5))), 0.0)

    def learn(self, score: float, given: float) -> None:
        missed = score > self.half()
        super().learn(score, given)
        self.sum, self.count = self.sum + missed - (1 - self.level), self.count + 1


class Log(Fixed):
    """Quantile tracking of the logarithm of the score, without a running scale."""

    def __init__(self, level: float) -> None:
        super().__init__(level)
        self.theta = 0.0

    def half(self) -> float:
        return self.z * exp(self.theta)

    def learn(self, score: float, given: float) -> None:
        self.theta += STEP * ((score > self.half()) - (1 - self.level))


class Scaled(Log):
    """With a running scale: what the library does."""

    def __init__(self, level: float) -> None:
        super().__init__(level)
        self.squares = self.weight = 0.0

    def half(self) -> float:
        t = student(self.z, PRIOR + self.weight) if self.weight else self.z
        return t * exp(self.theta) * sqrt((PRIOR + self.squares) / (PRIOR + self.weight))

    def learn(self, score: float, given: float) -> None:
        super().learn(score, given)
        square = (PRIOR + self.squares) / (PRIOR + self.weight)
        self.squares = KEEP * self.squares + min(score**2, MOST**2 * square)
        self.weight = KEEP * self.weight + 1


class Issued(Scaled):
    """The same, from whether the interval that was given held the label."""

    def learn(self, score: float, given: float) -> None:
        before = self.theta
        super().learn(score, given)
        self.theta = min(before + STEP * ((score > given) - (1 - self.level)), 600.0)


METHODS: dict[str, Callable[[float], Method]] = {
    "the predictor's own": Fixed,
    "rolling conformal": Rolling,
    "ACI": Aci,
    "DtACI": DtAci,
    "P": P,
    "PI": Pi,
    "P of the logarithm": Log,
    "the same with a running scale": Scaled,
}
