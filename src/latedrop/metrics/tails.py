"""Student tails: how often errors are several standard deviations large.

An error e of a row with variance v follows `e / (scale · sqrt(v)) ~ t(nu)`. Degrees of freedom and scale maximise the
likelihood of standardised errors `z = e / sqrt(v)`, of rows that the variances were not fitted to, less a price of
`4 / (nu n)` nats for heavy tails. With nu infinite the tails are Gaussian. Fewer than 30 rows cannot tell; what is then
known is that n rows leave the scale itself uncertain, which makes the tail of a Gaussian error a t with n degrees. So
nu is at most n, up to 100 rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.quantiles import student_quantile

__all__ = ["DEGREES", "LEAST_ROWS", "Tail", "fit_tail"]

DEGREES = (3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, math.inf)
LEAST_ROWS = 30
PRICE = 4.0
_MANY = 100  # rows from which on their scale is certain enough
_STEPS = 200


@dataclass(frozen=True)
class Tail:
    """The distribution of standardised errors `z = e / sqrt(v)`: `z / scale ~ t(nu)`.

    Attributes:
        nu: degrees of freedom, a whole number above 2, or infinite.
        scale: above 0.

    >>> round(Tail().quantile(0.975), 2), round(Tail(3.0).quantile(0.975), 2)
    (1.96, 3.18)
    """

    nu: float = math.inf
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.nu > 2 and (math.isinf(self.nu) or self.nu == round(self.nu))) or not 0 < self.scale < math.inf:
            raise ArgumentError(
                "expected whole or infinite degrees of freedom from 3 on, and a scale above 0; found "
                f"{self.nu!r} and {self.scale!r}."
            )

    @property
    def variance(self) -> float:
        """The variance of `z`: what a variance v is multiplied by to be that of the error."""
        return self.scale**2 * (1.0 if math.isinf(self.nu) else self.nu / (self.nu - 2))

    @classmethod
    def unit(cls, degrees: float | None) -> Tail:
        """Return the tail of errors divided by their standard deviation; Gaussian without degrees of freedom."""
        return cls() if degrees is None else cls(degrees, math.sqrt((degrees - 2) / degrees))

    @property
    def degrees(self) -> float | None:
        """Degrees of freedom; None for a Gaussian."""
        return None if math.isinf(self.nu) else self.nu

    def quantile(self, q: float) -> float:
        """Return the z below which the share q lies."""
        return student_quantile(q, self.degrees) * math.sqrt(self.variance)

    def nll(self, error: Tensor, variance: Tensor) -> Tensor:
        """Return the negative log-likelihood of each error, in nats."""
        width = variance.double().sqrt() * self.scale
        t = error.double() / width
        if math.isinf(self.nu):
            return t.square() / 2 + width.log() + math.log(2 * math.pi) / 2
        return (self.nu + 1) / 2 * torch.log1p(t.square() / self.nu) + width.log() - _log_density(self.nu)


def fit_tail(z: Tensor, weights: Tensor | None = None, rows: float | None = None) -> Tail:
    """Return the most likely tail of standardised errors, less the price of heavy ones.

    Args:
        z: any shape; entries are standardised errors of rows that the variances were not fitted to.
        weights: what each entry counts.
        rows: how many independent rows these are, where not all entries are. Below `LEAST_ROWS` the degrees of freedom
            are that number, at least 3, and the scale is 1.

    >>> fit_tail(torch.zeros(12))
    Tail(nu=12.0, scale=1.0)
    """
    flat = z.double().flatten()
    count = float(len(flat)) if rows is None else rows
    most = math.inf if count > _MANY else max(DEGREES[0], float(int(count)))
    if count < LEAST_ROWS:
        return Tail(most)
    counts = torch.ones_like(flat) if weights is None else weights.double().flatten()
    counts = counts / counts.sum()
    best, lowest = Tail(), math.inf
    for nu in dict.fromkeys(min(nu, most) for nu in DEGREES):
        tail = Tail(nu, _scale(flat, counts, nu))
        cost = float(counts @ tail.nll(flat, torch.ones_like(flat))) + PRICE / (nu * count)
        if cost < lowest:
            best, lowest = tail, cost
    return best


def _scale(z: Tensor, counts: Tensor, nu: float) -> float:
    """Return the most likely scale for given degrees of freedom, by expectation maximisation."""
    squares = z.square()
    tiny = torch.finfo(torch.float64).tiny
    size = max(float(counts @ squares), tiny)
    if math.isinf(nu):
        return math.sqrt(size)
    for _ in range(_STEPS):
        last, size = size, max(float(counts @ ((nu + 1) * squares / (nu + squares / size))), tiny)
        if abs(size - last) <= 1e-12 * size:
            break
    return math.sqrt(size)


def _log_density(nu: float) -> float:
    """Return the logarithm of the density at 0."""
    return math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - math.log(nu * math.pi) / 2
