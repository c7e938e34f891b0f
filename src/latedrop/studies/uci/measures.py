"""What a network with dropout at its sites predicts, and how good that is, for every rate.

With inverted dropout before the last of `L` linear layers and before others further up, first-order variance is

    Var y = rate / (1 - rate) · sum_s v_s,     v_s = sum over the units i of site s of (a_i · dy/da_i)^2,

which for one hidden layer (a single site before the output layer) is exact: no draws are needed, the mean is the plain
network's, and the scaled variance does not depend on the rate. `sampled` draws masks instead, as the paper does.

Scales are fitted on the validation rows, and applied to train, validation and test. Every quantity is in the
target's own unit; NLLs leave out `log(2 pi) / 2`, as the paper does; areas are over 99 levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from latedrop.masking.masks import kept, uniforms
from latedrop.metrics.levels import central_quantile, even_levels, fraction_inside
from latedrop.studies.scores import ideal_nll

__all__ = [
    "LEVEL",
    "Member",
    "Predicted",
    "first_order",
    "hidden_units",
    "mask_numbers",
    "rate_measures",
    "sampled",
    "scores",
]

Member: TypeAlias = Sequence[tuple[Tensor, Tensor]]
LEVEL = 0.9

_CHUNK_FLOATS = 8_000_000


@dataclass(frozen=True)
class Predicted:
    """Mean, variance and target of n rows of K networks or rates, `(K, n)`, in the target's unit."""

    mean: Tensor
    variance: Tensor
    target: Tensor


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


def mask_numbers(member: Member, draws: int, seed: int) -> list[Tensor]:
    """Uniform numbers of each site, `(draws, units)`, those of `masking.masks`: they serve every rate and part."""
    return [
        uniforms(seed, range(draws), str(site), 0, weight.shape[:1]).to(weight.device)
        for site, (weight, _) in enumerate(member[1:])
    ]


def sampled(member: Member, x: Tensor, rate: float, numbers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance `(n,)` over thinned networks, whose masks are cut from `numbers` at the rate."""
    first = hidden_units(member, x)[0]
    plain = first_order(member, x)[0]
    draws, widest = len(numbers[0]), max(weight.shape[1] for weight, _ in member[1:])
    chunk = max(1, _CHUNK_FLOATS // (len(x) * widest))
    total, squares = torch.zeros_like(plain), torch.zeros_like(plain)
    for start in range(0, draws, chunk):
        a = first
        for (weight, bias), site in zip(member[1:], numbers, strict=True):
            thinned = kept(site[start : start + chunk], rate, weight.dtype)[:, :, None] * weight
            if a.dim() == 2:
                z = (a @ thinned.transpose(0, 1).flatten(1)).view(len(a), len(thinned), -1).transpose(0, 1) + bias
            else:
                z = torch.baddbmm(bias, a, thinned)
            a = torch.relu(z)
        off = z[..., 0] - plain
        total += off.sum(0)
        squares += off.square().sum(0)
    return plain + total / draws, (squares - total.square() / draws) / (draws - 1)


def scores(predicted: Predicted, scale: Tensor | None = None) -> dict[str, Tensor]:
    """The measures of `(K, n)` predictive Gaussians with variances `scale · variance`, each `(K,)`.

    They are those of `latedrop.metrics`, for K sets of rows in one go.
    """
    e = predicted.target - predicted.mean
    variance = predicted.variance if scale is None else predicted.variance * scale[:, None]
    std = variance.sqrt()
    w = e / std
    ordered = w.abs().sort(1).values
    density = torch.exp(-w.square() / 2) / math.sqrt(2 * math.pi)
    crps = e * torch.erf(w / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
    z = central_quantile(LEVEL)
    levels, quantiles = _levels(e)
    one = torch.full_like(ordered[:, :1], z)
    return {
        "rmse": e.square().mean(1).sqrt(),
        "nll": (w.square() + variance.log()).mean(1) / 2,
        "ma": (fraction_inside(ordered, quantiles.expand(len(e), -1).contiguous()) - levels).abs().mean(1),
        "crps": crps.mean(1),
        "coverage": fraction_inside(ordered, one)[:, 0],
        "width": 2 * z * std.mean(1),
    }


def rate_measures(parts: Mapping[str, Predicted]) -> dict[str, dict[str, Tensor]]:
    """Every measure of K rates and splits, by part: unscaled, scaled and relaxed by what the validation rows say.

    A variance of 0, where every unit is off, is lifted to the smallest one of its rows that is not.
    """
    parts = {name: Predicted(part.mean, _lifted(part.variance), part.target) for name, part in parts.items()}
    held = parts["validation"]
    ratio2 = (held.target - held.mean).square() / held.variance
    scale, relaxed = ratio2.mean(1), _balanced(ratio2)
    found = {}
    for name, part in parts.items():
        row = {"nll_ideal": ideal_nll(part.target - part.mean), "scale": scale, "relaxed_scale": relaxed}
        for kind, factor in (("unscaled", None), ("scaled", scale), ("relaxed", relaxed)):
            measured = scores(part, factor)
            row["rmse"] = measured.pop("rmse")
            row |= {f"{measure}_{kind}": value for measure, value in measured.items()}
        found[name] = row
    return found


def _levels(like: Tensor) -> tuple[Tensor, Tensor]:
    """99 levels and their normal quantiles, `(99,)`."""
    levels = even_levels(99)
    return levels.to(like), central_quantile(levels).to(like)


def _balanced(ratio2: Tensor, tol: float = 1e-4) -> Tensor:
    """`relaxed_scale` of K rows of `e^2 / variance` at once: bisection for a balance of 0."""
    ordered = ratio2.sqrt().sort(1).values
    levels, quantiles = _levels(ratio2)

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


def _lifted(variance: Tensor) -> Tensor:
    least = torch.where(variance > 0, variance, torch.inf).amin(1, keepdim=True)
    return torch.where((variance > 0) | least.isinf(), variance, least)
