"""Fit what turns a variance into intervals that hold: a scale and a floor, or quantiles of standardised errors.

With `e2 = (target - mean)^2`, `v` the variance over draws and `n` rows:

- the optimal scale minimises the NLL of `scale · v`: `scale = mean(e2 / v)` (Laves et al. 2020);
- the relaxed scale makes the calibration curve lie as much above as below the bisector: the root of
  `balance(c) = mean over levels of (pi_c(a) - a)`, which never falls as `c` grows;
- with a floor, `scale · v + floor` is fitted by NLL. Writing it as `s · w` with `w = t · v / mean(v) + 1 - t`, the
  best `s` for a given `t` is again `mean(e2 / w)`, and a search over `t` in [0, 1] is left.

Quantiles are `mean + z(q) · std`. With the Gaussian's `z(q) = Phi^{-1}(q)` nothing is left to fit. Two others store the
scale and floor that they were fitted with, and are valid only for these:

- isotonic (Kuleshov, Fenner, Ermon 2018): `z(q) = Phi^{-1}(R^{-1}(q))`, where `R(p)` is the observed frequency of
  targets below the predicted p-quantile, fitted by isotonic regression;
- split-conformal (Vovk, Gammerman, Shafer 2005; Lei et al. 2018): `z((1 ± a)/2) = ± s`, where `s` is the
  `ceil((n + 1) a)`-th smallest of the n scores `|target - mean| / std` on rows that are not used for anything else. The
  target of a new exchangeable row is in its interval with probability at least `a`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop.metrics import miscalibration_area, nll
from latedrop.metrics.entries import average, by_output, columns
from latedrop.metrics.levels import central_quantile, checked_levels, fraction_inside
from latedrop.quantiles import ConformalScores, IsotonicKnots
from latedrop.records import Limits, Tagged, record

__all__ = [
    *("Fitted", "Floors", "Intervals", "Scales", "TradeoffPoint", "along_outputs", "apply_scale", "conformal"),
    *("fit_floor", "isotonic", "least_positive", "lifted", "optimal_scale", "refuse_no_errors", "relaxed_scale"),
    *("residuals", "tradeoff"),
]

_LEVELS, _BALANCED = 99, 1e-4  # of the curve that a relaxed scale balances
_NO_ERROR = 1e-10  # of the root mean square: errors below it count as 0 where a curve is balanced
_KNOTS, _STEPS = 200, 21

Fitted: TypeAlias = tuple[Tensor, Tensor]
"""A scale and a floor, `(1,)` or `(K,)` each."""

Scales: TypeAlias = Annotated[tuple[Annotated[float, Limits(0, 3.4e38)], ...], Limits(1)]
"""One per output, or one for all; in a file, what float32 can hold."""
Floors: TypeAlias = Annotated[tuple[Annotated[float, Limits(0, 1e300)], ...], Limits(1)]
"""Likewise, of variances: what is larger overflows when it is used."""
Intervals: TypeAlias = Annotated[IsotonicKnots | ConformalScores, Tagged()] | None
"""Fitted quantile function; None means Gaussian or Student t."""


@record
@dataclass(frozen=True)
class TradeoffPoint:
    """One step between the optimal and the relaxed scale: the scales and floors, with what they give."""

    scale: Scales
    floor: Floors
    nll: float
    ma: float


def optimal_scale(
    mean: Tensor, variance: Tensor, target: Tensor, *, per_output: bool = False, weights: Tensor | None = None
) -> Tensor:
    """Return the scale of least NLL, `mean(e2 / variance)`, shape `(1,)`, or `(K,)` with `per_output`.

    `weights` `(N,)` say what each row counts.

    >>> optimal_scale(torch.zeros(2), torch.ones(2), torch.tensor([1.0, 3.0]))
    tensor([5.], dtype=torch.float64)
    """
    used = _squares(mean, variance, target, per_output, weights)
    return torch.stack([average(e2 / v, w) for e2, v, w in used])


def relaxed_scale(
    mean: Tensor, variance: Tensor, target: Tensor, *, per_output: bool = False, weights: Tensor | None = None
) -> Tensor:
    """Return the scale at which the calibration curve is balanced around the bisector, `(1,)` or `(K,)`.

    Bisection from an interval around the optimal scale, widened until it holds the root. The balance is a step
    function of the scale: where it jumps over 0, the side of the jump with the smaller balance is returned.

    >>> errors = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    >>> relaxed_scale(torch.zeros(4000), torch.full((4000,), 0.25), errors).round()
    tensor([4.], dtype=torch.float64)
    """
    used = _squares(mean, variance, target, per_output, weights)
    return torch.stack([_balanced(e2 / v, w) for e2, v, w in used])


def fit_floor(
    mean: Tensor, variance: Tensor, target: Tensor, *, per_output: bool = False, weights: Tensor | None = None
) -> Fitted:
    """Return scale and floor, both `>= 0` and `(1,)` or `(K,)`, of least NLL for `scale · variance + floor`.

    `floor = 0` with the optimal scale is among the candidates, so the fit is never worse than without a floor.
    """
    fits = [_floor_of(*used) for used in _squares(mean, variance, target, per_output, weights, positive=False)]
    scales, floors = zip(*fits, strict=True)
    return torch.stack(scales), torch.stack(floors)


def apply_scale(variance: Tensor, scale: Tensor, floor: Tensor) -> Tensor:
    """Return `scale · variance + floor`, where one value serves all outputs or each index of axis 1 has its own."""
    if len(scale) > 1 and (variance.dim() < 2 or variance.shape[1] != len(scale)):
        raise DataError(
            f"expected {len(scale)} outputs along axis 1, as there are that many scales; found variances of shape "
            f"{tuple(variance.shape)}."
        )
    return variance * along_outputs(scale, variance) + along_outputs(floor, variance)


def lifted(variance: Tensor, least: Tensor) -> Tensor:
    """Replace zeros of the variance by `least`, one value for all or one for each index of axis 1."""
    return torch.where(variance > 0, variance, along_outputs(least, variance))


def least_positive(variance: Tensor, per_output: bool) -> Tensor:
    """Return the smallest variance above 0, `(1,)` or of each index of axis 1 `(K,)`; inf where there is none."""
    positive = by_output(torch.where(variance > 0, variance, torch.inf), per_output)
    return torch.stack([column.min() for column in positive])


def along_outputs(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value `(1,)` for all, or `(K,)` along axis 1, to broadcast with `like`, `(N, K, ...)`."""
    values = values.to(like)
    return values.reshape(1, -1, *[1] * (like.dim() - 2)) if len(values) > 1 else values


def tradeoff(
    mean: Tensor, variance: Tensor, target: Tensor, start: Fitted, end: Fitted, *, weights: Tensor | None = None
) -> tuple[TradeoffPoint, ...]:
    """Return the path of geometric steps from one (scale, floor) to another, with NLL and miscalibration area."""
    points = []
    for t in torch.linspace(0, 1, _STEPS, dtype=torch.float64):
        scale, floor = (_between(a.double(), b.double(), t) for a, b in zip(start, end, strict=True))
        fitted = apply_scale(variance, scale, floor)
        measured = (float(score(mean, fitted, target, weights=weights)) for score in (nll, miscalibration_area))
        points.append(TradeoffPoint(tuple(scale.tolist()), tuple(floor.tolist()), *measured))
    return tuple(points)


def isotonic(residuals: list[Tensor], scale: tuple[float, ...], floor: tuple[float, ...]) -> IsotonicKnots:
    """Fit isotonic quantiles to standardised residuals `(target - mean) / std`, one flat tensor per output."""
    from sklearn.isotonic import IsotonicRegression

    all_knots, all_observed = [], []
    for residual in _finite(residuals):
        z = np.sort(residual.double().cpu().numpy())
        rank = np.arange(1, len(z) + 1) / (len(z) + 1)
        # Fitted in z, not in p: float64 rounds p to 0 or 1 beyond 8 standard deviations.
        model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(z, rank)
        knots = np.unique(np.quantile(z, np.linspace(0, 1, _KNOTS + 2)[1:-1]))
        all_knots.append(tuple(knots.tolist()))
        all_observed.append(tuple(model.predict(knots).tolist()))
    return IsotonicKnots(tuple(all_knots), tuple(all_observed), scale, floor)


def conformal(residuals: list[Tensor], scale: tuple[float, ...], floor: tuple[float, ...]) -> ConformalScores:
    """Sort the conformal scores `|z|` of standardised residuals, one flat tensor per output."""
    scores = (z.double().abs().sort().values for z in _finite(residuals))
    return ConformalScores(tuple(tuple(values.tolist()) for values in scores), scale, floor)


def residuals(mean: Tensor, variance: Tensor, target: Tensor, per_output: bool) -> list[Tensor]:
    """Return standardised residuals `(target - mean) / std`, flat: one tensor, or one per index of axis 1."""
    z = (target.to(mean) - mean) / variance.sqrt()
    return [column.flatten() for column in by_output(z, per_output)]


def _finite(residuals: list[Tensor]) -> list[Tensor]:
    bad = sum(int((~torch.isfinite(z)).sum()) for z in residuals)
    if bad:
        raise DataError(
            f"expected finite standardised residuals; found {bad} NaN or inf: the variance is 0, or the output "
            "of a row overflows. Use more draws or floor=True, and leave rows out that a prediction flags."
        )
    return residuals


def _squares(
    mean: Tensor, variance: Tensor, target: Tensor, per_output: bool, weights: Tensor | None, *, positive: bool = True
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Flatten squared error, variance and weight, in float64: once, or for each index of axis 1."""
    mean, variance, target = (torch.as_tensor(values).double() for values in (mean, variance, target))
    used = columns(mean, variance, target, per_output, weights, positive=positive)
    if not all(bool(error.any()) for error, _, _ in used):
        refuse_no_errors()
    return [(error.square(), v, w) for error, v, w in used]


def refuse_no_errors() -> NoReturn:
    """Raise `DataError` where there is nothing to fit a variance to."""
    raise DataError(
        "expected errors to fit a variance to; found every prediction equal to its target, perhaps of one "
        "output alone. Pass held-out data, not what the model was fitted to."
    )


def _balanced(ratio2: Tensor, weights: Tensor | None) -> Tensor:
    """Return the relaxed scale of one output, from `ratio2 = e2 / variance`."""
    levels = checked_levels(_LEVELS).to(ratio2.device)
    ordered, order = ratio2.sqrt().sort()
    # Sparse maps are exactly right nearly everywhere, up to tails of kernels: a root among those is no scale.
    ordered = torch.where(ordered > _NO_ERROR * average(ratio2, weights).sqrt(), ordered, 0.0)
    counted = None if weights is None else weights[order]
    z = central_quantile(levels)

    def balance(c: Tensor) -> float:
        return float((fraction_inside(ordered, z * c.sqrt(), counted) - levels).mean())

    # Below this scale only errors of exactly 0 are inside, at any level; half of them keep the balance above 0.
    least: Tensor = (ordered[ordered > 0][0] / z[-1]).square() * (1 - 1e-9)
    if balance(least) >= 0:
        return least
    scale = average(ratio2, weights)
    low, high = scale / 2, scale * 2
    while balance(low) > 0:
        low = low / 2
    while balance(high) < 0:
        high = high * 2
    while bool(high > low * (1 + 1e-9)):
        middle = (low * high).sqrt()
        value = balance(middle)
        if abs(value) < _BALANCED:
            return middle
        low, high = (middle, high) if value < 0 else (low, middle)
    return low if abs(balance(low)) < abs(balance(high)) else high


def _floor_of(e2: Tensor, v: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    if not bool(v.any()):
        return v.new_zeros(()), average(e2, weights)
    size = v.mean()
    unit = v / size

    def cost(t: Tensor) -> Tensor:
        w = t * unit + (1 - t)
        value = average(e2 / w, weights).log() + average(w.log(), weights)
        return torch.where(torch.isfinite(value), value, torch.inf)

    # The cost can have several dips: a fine grid, denser towards both ends, then a search around its best.
    inner = torch.logspace(-4, 0, 60, dtype=v.dtype, device=v.device) / 2
    grid = torch.cat([v.new_zeros(1), inner, (1 - inner[:-1]).flip(0), v.new_ones(1)])
    best = int(torch.stack([cost(t) for t in grid]).argmin())
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (5**0.5 - 1) / 2
    for _ in range(60):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if bool(cost(a) < cost(b)) else (a, high)
    t = min((grid[best], (low + high) / 2), key=lambda t: float(cost(t)))
    s = average(e2 / (t * unit + (1 - t)), weights)
    return s * t / size, s * (1 - t)


def _between(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """Return the geometric step where both ends are above 0, else the arithmetic one."""
    return torch.where((start > 0) & (end > 0), start ** (1 - t) * end**t, (1 - t) * start + t * end)
