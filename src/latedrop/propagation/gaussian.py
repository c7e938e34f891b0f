"""Mean and variance of a function of independent Gaussians, element by element.

With `Z ~ N(a, 1)`, `phi` and `Phi` the density and distribution function of the standard Gaussian,

    E max(Z, 0) = a · Phi(a) + phi(a),     E max(Z, 0)^2 = (a^2 + 1) · Phi(a) + a · phi(a),

from which the functions with one kink or two and the maximum of two units (Clark 1961) follow; other functions are
integrated by Gauss-Hermite quadrature. Each mean is written as the function of the mean plus a correction that
vanishes with the variance, so that a variance of 0 gives the function's own value; no variance comes out negative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, sqrt
from typing import TypeAlias

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

__all__ = ["TwoMoments", "clamped", "larger", "piecewise_linear", "smooth"]

TwoMoments: TypeAlias = tuple[Tensor, Tensor]
"""Mean and variance, of the same shape."""


def piecewise_linear(f: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, slope: float | Tensor) -> TwoMoments:
    """Return the moments of an `f` with slope 1 above 0 and `slope` below: ReLU (0), leaky ReLU, absolute value (-1).

    `f(X) = slope · X + (1 - slope) · max(X, 0)`, and the covariance of the two terms is that of `X` times `P(X > 0)`.

    >>> m, v = piecewise_linear(torch.relu, torch.tensor([0.0, 3.0]), torch.tensor([1.0, 0.0]), slope=0)
    >>> m, v
    (tensor([0.3989, 3.0000]), tensor([0.3408, 0.0000]))
    """
    s = v.sqrt()
    above, variance, excess = _rectified(_in_stds(m, s))
    bend = 1 - slope
    factor = slope * slope + bend * bend * variance + 2 * slope * bend * above
    return f(m) + bend * s * excess, (v * factor).clamp_min(0)


def clamped(m: Tensor, v: Tensor, low: float | None, high: float | None) -> TwoMoments:
    """Return the moments of `X` limited to `low` and `high`; None leaves a side open.

    With `R_b = max(X - b, 0)`, `Var = Var R_low - Var R_high - 2 · E R_high · (high - E)`.
    """
    s, limited = v.sqrt(), m.clamp(low, high) if low is not None or high is not None else m
    variance, shift = v, torch.zeros_like(m)
    if low is not None:
        _, factor, excess = _rectified(_in_stds(m - low, s))
        variance, shift = v * factor, s * excess
    if high is not None:
        _, factor, excess = _rectified(_in_stds(m - high, s))
        shift = shift - s * excess
        above = (m - high).relu() + s * excess
        variance = variance - v * factor - 2 * above * (high - limited - shift)
    return limited + shift, variance.clamp_min(0)


def larger(a: TwoMoments, b: TwoMoments) -> TwoMoments:
    """Return the moments of the larger of two units."""
    total = a[1] + b[1]
    s = total.sqrt()
    above, variance, excess = _rectified(_in_stds(a[0] - b[0], s))
    v = a[1] * above + b[1] * (1 - above) - total * (above - variance)
    return torch.maximum(a[0], b[0]) + s * excess, v.clamp_min(0)


def smooth(f: Callable[[Tensor], Tensor], m: Tensor, v: Tensor) -> TwoMoments:
    """Return the moments of any `f` by quadrature with seven nodes, which is exact for polynomials of degree 6."""
    s, centre = v.sqrt(), f(m)
    first, second = torch.zeros_like(m), torch.zeros_like(m)
    for node, weight in _quadrature():
        step = f(m + node * s) - centre
        first += weight * step
        second += weight * step.square()
    return centre + first, (second - first.square()).clamp_min(0)


@cache
def _quadrature() -> list[tuple[float, float]]:
    """Return nodes and weights of a standard Gaussian, without the node at 0, which adds nothing."""
    nodes, weights = hermegauss(7)
    return [(z, w) for z, w in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True) if abs(z) > 1e-9]


def _rectified(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for `Z ~ N(a, 1)`, `P(Z > 0)`, the variance of `max(Z, 0)`, and `E max(Z, 0) - max(a, 0)`."""
    above, below = torch.special.ndtr(a), torch.special.ndtr(-a)
    density = (-0.5 * a.square()).exp() / sqrt(2 * pi)
    variance = above + a.square() * above * below - a * density * (above - below) - density.square()
    excess = density - a.abs() * torch.minimum(above, below)
    return above, variance.clamp_min(0), excess.clamp_min(0)


def _in_stds(m: Tensor, s: Tensor) -> Tensor:
    """Return `m / s`, finite where `s` is 0: beyond 20 standard deviations nothing changes."""
    return (m / s.clamp_min(torch.finfo(s.dtype).tiny)).clamp(-20, 20)
