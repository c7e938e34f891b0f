"""Standardised quantiles `z(q)` in plain numbers: of a Gaussian, of isotonic and of conformal intervals.

They need neither torch nor numpy, so that intervals can be made where neither is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from latedrop.errors import ArgumentError

__all__ = ["checked_level", "conformal_quantile", "conformal_score", "gaussian_quantile", "isotonic_quantile"]


def checked_level(level: Any) -> float:
    """A level or a quantile as a float inside (0, 1), or `ArgumentError`."""
    try:
        value = math.nan if isinstance(level, (bool, str)) else float(level)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not 0 < value < 1:
        raise ArgumentError(f"expected a probability inside (0, 1); found {level!r}. A 90 % interval is level 0.9.")
    return value


def gaussian_quantile(q: float) -> float:
    """`Phi^{-1}(q)`.

    >>> round(gaussian_quantile(0.975), 4)
    1.96
    """
    return NormalDist().inv_cdf(q) if 0 < q < 1 else math.copysign(math.inf, q - 0.5)


def isotonic_quantile(knots: Sequence[float], observed: Sequence[float], q: float) -> float:
    """Where the frequency `observed` at the standardised residuals `knots` reaches q."""
    inside = min(max(q, observed[0]), observed[-1])
    # Beyond the outermost knot the data say nothing: a Gaussian tail goes on from there.
    tail = 0.0 if inside == q else gaussian_quantile(q) - gaussian_quantile(inside)
    return _interpolated(inside, observed, knots) + tail


def conformal_quantile(scores: Sequence[float], q: float) -> float:
    """`± s`, with `s` the score of the central interval that ends at q."""
    return math.copysign(1.0, q - 0.5) * conformal_score(scores, abs(2 * q - 1))


def conformal_score(
    scores: Sequence[float],
    level: float,
    least: float = 0.0,
    purpose: str = " for an interval",
    remedy: str = "Calibrate with more conformal_data, or ask for a lower level.",
) -> float:
    """The `ceil((n + 1) level)`-th smallest of the n sorted scores; `least` where that is none of them."""
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        needed = math.ceil(level / (1 - level) - 1e-9)
        raise ArgumentError(
            f"expected at least {needed} conformal rows{purpose} at level {level:g}; found {len(scores)}. {remedy}"
        )
    return scores[rank - 1] if rank > 0 else least


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Piecewise linear, in the middle of the flat stretches of `xs`."""
    below = max(i for i, value in enumerate(xs) if value <= x)
    above = min(i for i, value in enumerate(xs) if value >= x)
    if xs[above] <= xs[below]:
        return (ys[below] + ys[above]) / 2
    return ys[below] + (ys[above] - ys[below]) * (x - xs[below]) / (xs[above] - xs[below])
