"""Predictions of a network with dropout at its sites, fits to their variance, and scores.

With inverted dropout before the last of `L` linear layers and before others further up, first-order variance is

    Var y = rate / (1 - rate) · sum_s v_s,     v_s = sum over the units i of site s of (a_i · dy/da_i)^2,

which for one hidden layer (a single site before the output layer) is exact: no draws are needed, the mean is the plain
network's, and the scaled variance does not depend on the rate. `sampled` draws masks instead, as the paper does.

A *measure* is, for each part of the rows, a mean and a raw variance of K networks `(K, n)`. On the validation rows are
fitted, with `e2 = (target - mean)^2`,

    raw       nothing: 1 · v + 0
    scaled    scale · v,           scale = mean(e2 / v), of least NLL
    relaxed   scale · v,           scale that balances the calibration curve
    floor     scale · v + floor,   both >= 0, of least NLL

by `latedrop.calibration.scale`, and applied to every part. No variance is below `LEAST` of the plain
network's mean squared validation error, whatever the method. Every quantity is in the target's own unit; NLLs leave out
`log(2 pi) / 2`, as the paper does; areas are over 99 levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.calibration.scale import fit_floor, optimal_scale, relaxed_scale
from latedrop.dropout.masks import draw_keys, hashes, keys_on
from latedrop.errors import ArgumentError
from latedrop.quantiles import ConformalScores


def ideal_nll(error: Tensor) -> Tensor:
    """`mean(1 + log(e^2)) / 2` over the last axis; an error of exactly 0 counts as the smallest that is not."""
    size = error.abs()
    least = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
    return torch.maximum(size, least).log().mean(-1) + 0.5


def conformal_reach(scores: Tensor, levels: list[float]) -> list[float]:
    """Half widths of split conformal intervals from the scores `|e| / std` of held-out rows `(n,)`, level by level.

    A level above `n / (n + 1)` has an unbounded interval.

    >>> conformal_reach(torch.tensor([3.0, 1.0, 2.0]), [0.5, 0.9])
    [2.0, inf]
    """
    # Not by `conformal`, which refuses infinite scores: a row without variance is one that no interval holds.
    fitted = ConformalScores((tuple(scores.double().abs().sort().values.tolist()),), (1.0,), (0.0,))

    def reach(level: float) -> float:
        try:
            return fitted.quantiles((1 + level) / 2)[0]
        except ArgumentError:
            return math.inf

    return [reach(level) for level in levels]


Member: TypeAlias = Sequence[tuple[Tensor, Tensor]]
LEVEL = 0.9

_CHUNK_FLOATS = 8_000_000


@dataclass(frozen=True)
class Predicted:
    """Mean, variance and target of n rows of K networks or rates, `(K, n)`, in the target's unit."""

    mean: Tensor
    variance: Tensor
    target: Tensor

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and target as the library takes K outputs: `(n, K)`, on the CPU."""
        return self.mean.T.cpu(), self.variance.T.cpu(), self.target.T.cpu()


def hidden_units(member: Member, x: Tensor) -> list[Tensor]:
    """Return the inputs of each layer but the first, `(n, units)`: the activations at the sites."""
    units = [x]
    for weight, bias in member[:-1]:
        units.append(torch.relu(units[-1] @ weight + bias))
    return units[1:]


def first_order(member: Member, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output `(n,)`, and the variance of each site per unit of `rate / (1 - rate)`, `(n, sites)`.

    >>> ones = torch.ones
    >>> mean, variance = first_order([(ones(1, 2), 0 * ones(2)), (ones(2, 1), ones(1))], ones(1, 1))
    >>> mean, variance
    (tensor([3.]), tensor([[2.]]))
    """
    units = hidden_units(member, x)
    weight, bias = member[-1]
    mean = units[-1] @ weight + bias
    gradient, variances = weight.T, []
    for a, (weight, _) in zip(reversed(units), reversed(member[:-1]), strict=True):
        # Of a layer's weight, the way back to what entered it; relu lets through where it was above 0.
        variances.append((a * gradient).square().sum(1))
        gradient = (gradient * (a > 0)) @ weight.T
    return mean[:, 0], torch.stack(variances[::-1], 1)


def mask_numbers(member: Member, draws: int, seed: int) -> list[Tensor]:
    """Return uniform numbers of each site, `(draws, units)`, those of the library's masks, which serve every rate."""
    return [
        _uniforms(seed, draws, str(site), len(weight)).to(weight.device) for site, (weight, _) in enumerate(member[1:])
    ]


def _uniforms(seed: int, draws: int, site: str, units: int) -> Tensor:
    """Return the numbers in [0, 1) that masks compare with a rate, `(draws, units)` in float64."""
    keys = keys_on(draw_keys(seed, range(draws), site, 0), torch.device("cpu"))
    return (hashes(keys, units).double() + 2**31) / 2**32


def sampled(member: Member, x: Tensor, rates: Sequence[float], numbers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance `(n,)` over thinned networks, whose masks are cut from `numbers` at the rate of each site."""
    first = hidden_units(member, x)[0]
    plain = first_order(member, x)[0]
    draws, widest = len(numbers[0]), max(weight.shape[1] for weight, _ in member[1:])
    chunk = max(1, _CHUNK_FLOATS // (len(x) * widest))
    total, squares = torch.zeros_like(plain), torch.zeros_like(plain)
    for start in range(0, draws, chunk):
        a = first
        for (weight, bias), site, rate in zip(member[1:], numbers, rates, strict=True):
            masks = (site[start : start + chunk] >= rate).to(weight.dtype) / (1 - rate)
            thinned = masks[:, :, None] * weight
            if a.dim() == 2:
                z = (a @ thinned.transpose(0, 1).flatten(1)).view(len(a), len(thinned), -1).transpose(0, 1) + bias
            else:
                z = torch.baddbmm(bias, a, thinned)
            a = torch.relu(z)
        off = z[..., 0] - plain
        total += off.sum(0)
        squares += off.square().sum(0)
    return plain + total / draws, (squares - total.square() / draws) / (draws - 1)


def scores(predicted: Predicted) -> dict[str, Tensor]:
    """Measure `(K, n)` predictive Gaussians by `latedrop.metrics`, each measure `(K,)`, on the CPU."""
    rows = predicted.columns()
    return {
        "rmse": metrics.rmse(*rows, per_output=True),
        "nll": metrics.nll(*rows, per_output=True, constant=False),
        "ma": metrics.miscalibration_area(*rows, per_output=True),
        "crps": metrics.crps(*rows, per_output=True),
        "coverage": metrics.coverage(*rows, per_output=True, level=LEVEL),
        "width": metrics.interval_width(*rows, per_output=True, level=LEVEL),
        "ranking": metrics.rank_correlation(*rows, per_output=True),
    }


Measure: TypeAlias = Mapping[str, Predicted]
"""By part of the rows; the raw variance of K networks."""

HOWS = ("raw", "scaled", "relaxed", "floor")
LEAST = 1e-4


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
    fitted = fits(measure["validation"], hows)
    return {how: {name: fitted[how].applied(part, least) for name, part in measure.items()} for how in hows}


def lifted(measure: Measure) -> dict[str, Predicted]:
    """Rows without variance, where every unit is off, are given the smallest one of the validation rows."""
    validation = measure["validation"].variance
    least = torch.where(validation > 0, validation, torch.inf).amin(1, keepdim=True)
    least = torch.where(least.isinf(), 1.0, least)
    return {
        name: Predicted(part.mean, torch.where(part.variance > 0, part.variance, least), part.target)
        for name, part in measure.items()
    }


def fits(validation: Predicted, hows: Sequence[str] = HOWS) -> dict[str, Fit]:
    """Fit to the validation rows, by how, with the functions that `calibrate` fits with."""
    rows, like = validation.columns(), validation.variance
    one, zero = torch.ones_like(like[:, 0]), torch.zeros_like(like[:, 0])
    made: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "raw": lambda: (one, zero),
        "scaled": lambda: (optimal_scale(*rows, per_output=True), zero),
        "relaxed": lambda: (relaxed_scale(*rows, per_output=True), zero),
        "floor": lambda: fit_floor(*rows, per_output=True),
    }
    return {how: Fit(*(value.to(like) for value in made[how]())) for how in hows}


def rate_measures(measure: Measure, least: Tensor) -> dict[str, dict[str, Tensor]]:
    """Every measure of K rates and splits by part, `(K,)` each: of the raw variance and of all that is made of it."""
    measure = lifted(measure)
    fitted_by = fits(measure["validation"])
    floor = fitted_by["floor"]
    fitted = {"scale": fitted_by["scaled"].scale, "relaxed_scale": fitted_by["relaxed"].scale}
    fitted |= {"floor_scale": floor.scale, "floor": floor.floor}
    rows = {}
    for name, part in measure.items():
        error = part.target - part.mean
        share = floor.floor / (floor.scale * part.variance.mean(1) + floor.floor)
        row = {"nll_ideal": ideal_nll(error), **fitted, "floor_share": share}
        row["ranking"] = metrics.rank_correlation(*part.columns(), per_output=True)
        for how, fit in fitted_by.items():
            measured = scores(fit.applied(part, least))
            row["rmse"] = measured.pop("rmse")
            row |= {f"{kind}_{'unscaled' if how == 'raw' else how}": value for kind, value in measured.items()}
        rows[name] = row
    return rows
