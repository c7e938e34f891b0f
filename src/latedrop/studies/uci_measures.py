"""What a network with dropout at its sites predicts, and how good that is, for every rate.

With inverted dropout before the last of `L` linear layers and before others further up, first-order variance is

    Var y = rate / (1 - rate) · sum_s v_s,     v_s = sum over the units i of site s of (a_i · dy/da_i)^2,

which for one hidden layer (a single site before the output layer) is exact: no draws are needed, the mean is the plain
network's, and the scaled variance does not depend on the rate. `sampled` draws masks instead, as the paper does.

Scales are fitted on the validation rows, and applied to train, validation and test. Every quantity is in the
target's own unit; NLLs leave out `log(2 pi) / 2`, as the paper does; areas are over 99 levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.masks import masks, uniforms
from latedrop.scale import optimal_scale, relaxed_scale

__all__ = ["LEVEL", "Predicted", "first_order", "hidden_units", "rate_measures", "sampled", "scores"]

Member: TypeAlias = Sequence[tuple[Tensor, Tensor]]
LEVEL = 0.9

_CHUNK_FLOATS = 8_000_000


@dataclass(frozen=True)
class Predicted:
    """Mean, variance and target of some rows, `(n,)` each, in the target's unit."""

    mean: Tensor
    variance: Tensor
    target: Tensor

    def times(self, scale: Tensor) -> Predicted:
        """The same with every variance multiplied."""
        return Predicted(self.mean, self.variance * scale, self.target)


def hidden_units(member: Member, x: Tensor) -> list[Tensor]:
    """What enters each layer but the first, `(n, units)`: the activations at the sites."""
    found = [x]
    for weight, bias in member[:-1]:
        found.append(torch.relu(found[-1] @ weight + bias))
    return found[1:]


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


def sampled(member: Member, x: Tensor, rate: float, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Mean and variance `(n,)` over thinned networks; masks are those of `latedrop.masks`, nested in the rate."""
    first = hidden_units(member, x)[0]
    plain = first_order(member, x)[0]
    widest = max(weight.shape[1] for weight, _ in member[1:])
    chunk = max(1, _CHUNK_FLOATS // (len(x) * widest))
    total, squares = torch.zeros_like(plain), torch.zeros_like(plain)
    for start in range(0, draws, chunk):
        some = range(start, min(start + chunk, draws))
        a: Tensor = first
        for site, (weight, bias) in enumerate(member[1:]):
            numbers = uniforms(seed, some, str(site), 0, weight.shape[:1], torch.device("cpu"))
            thinned = masks(numbers, rate, weight.dtype).to(weight.device)[:, :, None] * weight
            if a.dim() == 2:
                z = (a @ thinned.transpose(0, 1).flatten(1)).view(len(a), len(some), -1).transpose(0, 1) + bias
            else:
                z = torch.baddbmm(bias, a, thinned)
            a = torch.relu(z)
        off = z[..., 0] - plain
        total += off.sum(0)
        squares += off.square().sum(0)
    return plain + total / draws, (squares - total.square() / draws) / (draws - 1)


def scores(predicted: Predicted) -> dict[str, float]:
    """The measures of one predictive Gaussian."""
    row = (predicted.mean, predicted.variance, predicted.target)
    return {
        "rmse": float(metrics.rmse(*row)),
        "nll": float(metrics.nll(*row, constant=False)),
        "ma": float(metrics.miscalibration_area(*row)),
        "crps": float(metrics.crps(*row)),
        "coverage": float(metrics.coverage(*row, level=LEVEL)),
        "width": float(metrics.interval_width(*row, level=LEVEL)),
    }


def rate_measures(parts: Mapping[str, Predicted]) -> dict[str, dict[str, float]]:
    """Every measure of one rate, by part: unscaled, scaled and relaxed, with the scales of the validation rows.

    A variance of 0, where every unit is off, is lifted to the smallest one of its part that is not.
    """
    parts = {name: Predicted(part.mean, _lifted(part.variance), part.target) for name, part in parts.items()}
    held = parts["validation"]
    scale = optimal_scale(held.mean, held.variance, held.target)
    relaxed = relaxed_scale(held.mean, held.variance, held.target)
    found = {}
    for name, part in parts.items():
        row = {
            "nll_ideal": float(metrics.ideal_nll(part.mean, None, part.target, constant=False)),
            "scale": float(scale),
            "relaxed_scale": float(relaxed),
        }
        for kind, factor in (("unscaled", torch.ones_like(scale)), ("scaled", scale), ("relaxed", relaxed)):
            measured = scores(part.times(factor))
            row["rmse"] = measured.pop("rmse")
            row |= {f"{measure}_{kind}": value for measure, value in measured.items()}
        found[name] = row
    return found


def _lifted(variance: Tensor) -> Tensor:
    positive = variance > 0
    if bool(positive.all()) or not bool(positive.any()):
        return variance
    return torch.where(positive, variance, variance[positive].min())
