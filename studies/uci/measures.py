"""What a network with dropout at its sites predicts, and how good that is, for every rate.

With inverted dropout before the last of `L` linear layers and before others further up, first-order variance is

    Var y = rate / (1 - rate) · sum_s v_s,     v_s = sum over the units i of site s of (a_i · dy/da_i)^2,

which for one hidden layer (a single site before the output layer) is exact: no draws are needed, the mean is the plain
network's, and the scaled variance does not depend on the rate. `sampled` draws masks instead, as the paper does.

Every quantity is in the target's own unit; NLLs leave out `log(2 pi) / 2`, as the paper does; areas are over 99 levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from latedrop.dropout.masks import kept, uniforms
from latedrop.metrics.levels import central_quantile, even_levels, fraction_inside

__all__ = [
    "LEVEL",
    "Member",
    "Predicted",
    "first_order",
    "hidden_units",
    "levels_of",
    "mask_numbers",
    "rank_correlation",
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


def scores(predicted: Predicted) -> dict[str, Tensor]:
    """The measures of `(K, n)` predictive Gaussians, each `(K,)`.

    They are those of `latedrop.metrics`, for K sets of rows in one go.
    """
    e, variance = predicted.target - predicted.mean, predicted.variance
    std = variance.sqrt()
    w = e / std
    ordered = w.abs().sort(1).values
    density = torch.exp(-w.square() / 2) / math.sqrt(2 * math.pi)
    crps = e * torch.erf(w / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
    z = central_quantile(LEVEL)
    levels, quantiles = levels_of(e)
    one = torch.full_like(ordered[:, :1], z)
    return {
        "rmse": e.square().mean(1).sqrt(),
        "nll": (w.square() + variance.log()).mean(1) / 2,
        "ma": (fraction_inside(ordered, quantiles.expand(len(e), -1).contiguous()) - levels).abs().mean(1),
        "crps": crps.mean(1),
        "coverage": fraction_inside(ordered, one)[:, 0],
        "width": 2 * z * std.mean(1),
        "ranking": rank_correlation(variance, e.abs()),
    }


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of `(K, n)` values, `(K,)`; ties share ranks, and a constant has 0.

    >>> rank_correlation(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.0, 3.0, 9.0]]))
    tensor([1.], dtype=torch.float64)
    """
    first, second = (ranks - ranks.mean(1, keepdim=True) for ranks in (_ranks(a), _ranks(b)))
    size = (first.square().sum(1) * second.square().sum(1)).sqrt()
    return torch.where(size > 0, (first * second).sum(1) / size.clamp_min(0.25), 0.0)


def levels_of(like: Tensor) -> tuple[Tensor, Tensor]:
    """99 levels and their normal quantiles, `(99,)`."""
    levels = even_levels(99)
    return levels.to(like), central_quantile(levels).to(like)


def _ranks(values: Tensor) -> Tensor:
    """Twice the rank; equal values share the mean of theirs."""
    ordered, values = values.sort(1).values, values.contiguous()
    ends = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return sum(ends, torch.zeros_like(values, dtype=torch.float64))
