"""What is done to a variance before it is judged, in the same way for every measure of it.

A measure is, for each part of the rows, a mean and a raw variance of K networks `(K, n)`. On the validation rows are
fitted, with `e2 = (target - mean)^2`,

    raw       nothing: 1 · v + 0
    scaled    scale · v,           scale = mean(e2 / v), of least NLL
    relaxed   scale · v,           scale that balances the calibration curve
    floor     scale · v + floor,   both >= 0, of least NLL

as `latedrop.calibration.scale` does for one K, and applied to every part. No variance is below `LEAST` of the plain
network's mean squared validation error, whatever the method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from latedrop.metrics.levels import fraction_inside
from studies.scores import ideal_nll
from studies.uci.measures import Predicted, levels_of, rank_correlation, scores

__all__ = ["HOWS", "LEAST", "Fit", "Measure", "fits", "lifted", "processed", "rate_measures", "surface"]

Measure: TypeAlias = Mapping[str, Predicted]
"""By part of the rows; the raw variance of K networks."""

HOWS = ("raw", "scaled", "relaxed", "floor")
LEAST = 1e-4

_GRID = 60
_GOLDEN = 60


@dataclass(frozen=True)
class Fit:
    """`scale · variance + floor`, `(K,)` each; the floor in the squared unit of the target."""

    scale: Tensor
    floor: Tensor

    def applied(self, part: Predicted, least: Tensor) -> Predicted:
        """The part with the fitted variance, which is at least `least`, `(K,)`."""
        variance = part.variance * self.scale[:, None] + self.floor[:, None]
        return Predicted(part.mean, torch.maximum(variance, least[:, None]), part.target)


def processed(measure: Measure, least: Tensor, hows: Sequence[str] = HOWS) -> dict[str, dict[str, Predicted]]:
    """Every part, by how its variance was treated. See the module."""
    measure = lifted(measure)
    found = fits(measure["validation"], hows)
    return {how: {name: found[how].applied(part, least) for name, part in measure.items()} for how in hows}


def lifted(measure: Measure) -> dict[str, Predicted]:
    """Rows without variance, where every unit is off, are given the smallest one of the validation rows."""
    held = measure["validation"].variance
    least = torch.where(held > 0, held, torch.inf).amin(1, keepdim=True)
    least = torch.where(least.isinf(), 1.0, least)
    return {
        name: Predicted(part.mean, torch.where(part.variance > 0, part.variance, least), part.target)
        for name, part in measure.items()
    }


def fits(held: Predicted, hows: Sequence[str] = HOWS) -> dict[str, Fit]:
    """What is fitted to the validation rows, by how."""
    e2 = (held.target - held.mean).square()
    ratio2 = e2 / held.variance
    one, zero = torch.ones_like(e2[:, 0]), torch.zeros_like(e2[:, 0])
    made = {
        "raw": lambda: Fit(one, zero),
        "scaled": lambda: Fit(ratio2.mean(1), zero),
        "relaxed": lambda: Fit(_balanced(ratio2), zero),
        "floor": lambda: _with_floor(e2, held.variance),
    }
    return {how: made[how]() for how in hows}


def rate_measures(measure: Measure, least: Tensor) -> dict[str, dict[str, Tensor]]:
    """Every measure of K rates and splits by part, `(K,)` each: of the raw variance and of all that is made of it."""
    measure = lifted(measure)
    found = fits(measure["validation"])
    floor = found["floor"]
    fitted = {"scale": found["scaled"].scale, "relaxed_scale": found["relaxed"].scale}
    fitted |= {"floor_scale": floor.scale, "floor": floor.floor}
    rows = {}
    for name, part in measure.items():
        error = part.target - part.mean
        share = floor.floor / (floor.scale * part.variance.mean(1) + floor.floor)
        row = {"nll_ideal": ideal_nll(error), **fitted, "floor_share": share}
        row["ranking"] = rank_correlation(part.variance, error.abs())
        for how, fit in found.items():
            measured = scores(fit.applied(part, least))
            row["rmse"] = measured.pop("rmse")
            row |= {f"{kind}_{'unscaled' if how == 'raw' else how}": value for kind, value in measured.items()}
        rows[name] = row
    return rows


def surface(held: Predicted, scales: Tensor) -> Tensor:
    """The NLL of `scale · variance` on rows of K rates, `(K, scales)`."""
    best = ((held.target - held.mean).square() / held.variance).mean(1, keepdim=True)
    return (best / scales + scales.log() + held.variance.log().mean(1, keepdim=True)) / 2


def _balanced(ratio2: Tensor, tol: float = 1e-4) -> Tensor:
    """`relaxed_scale` of K rows of `e^2 / variance` at once: bisection for a balance of 0."""
    ordered = ratio2.sqrt().sort(1).values
    levels, quantiles = levels_of(ratio2)

    def balance(c: Tensor) -> Tensor:
        return (fraction_inside(ordered, quantiles * c.sqrt()[:, None]) - levels).mean(1)

    low, high = ratio2.mean(1) / 2, ratio2.mean(1) * 2
    while bool((outside := balance(low) > 0).any()):
        low = torch.where(outside, low / 2, low)
    while bool((outside := balance(high) < 0).any()):
        high = torch.where(outside, high * 2, high)
    found = torch.full_like(low, torch.nan)
    while bool((found.isnan() & (high > low * (1 + 1e-9))).any()):
        middle = (low * high).sqrt()
        value = balance(middle)
        found = torch.where(found.isnan() & (value.abs() < tol), middle, found)
        low, high = torch.where(value < 0, middle, low), torch.where(value < 0, high, middle)
    nearer = torch.where(balance(low).abs() < balance(high).abs(), low, high)
    return torch.where(found.isnan(), nearer, found)


def _with_floor(e2: Tensor, v: Tensor) -> Fit:
    """`fit_floor` of K rows at once: its grid over the share of the variance, then golden section."""
    size = v.mean(1)
    unit = v / size[:, None]

    def cost(t: Tensor) -> Tensor:
        w = t[:, None] * unit + (1 - t)[:, None]
        value = (e2 / w).mean(1).log() + w.log().mean(1)
        return torch.where(torch.isfinite(value), value, torch.inf)

    inner = torch.logspace(-4, 0, _GRID, dtype=v.dtype, device=v.device) / 2
    grid = torch.cat([v.new_zeros(1), inner, (1 - inner[:-1]).flip(0), v.new_ones(1)])
    best = torch.stack([cost(t.expand(len(v))) for t in grid]).argmin(0)
    low, high = grid[(best - 1).clamp_min(0)], grid[(best + 1).clamp_max(len(grid) - 1)]
    golden = (5**0.5 - 1) / 2
    for _ in range(_GOLDEN):
        a, b = high - golden * (high - low), low + golden * (high - low)
        left = cost(a) < cost(b)
        low, high = torch.where(left, low, a), torch.where(left, b, high)
    middle = (low + high) / 2
    t = torch.where(cost(middle) < cost(grid[best]), middle, grid[best])
    s = (e2 / (t[:, None] * unit + (1 - t)[:, None])).mean(1)
    return Fit(s * t / size, s * (1 - t))
