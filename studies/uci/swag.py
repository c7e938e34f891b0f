"""SWAG (Maddox et al. 2019): a Gaussian over the weights, from where training went in its last quarter.

With K snapshots of the weights, their mean `m`, variance `d` of each weight and deviations `D` from the mean, a draw is

    w = m + sqrt(d / 2) z_1 + D' z_2 / sqrt(2 (K - 1)),     z_1, z_2 standard normal.

The snapshots are those of the plain network's own training: Adam at its constant learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from studies.uci.measures import Member
from studies.uci.stacked import key

__all__ = ["SNAPSHOTS", "swag"]

SNAPSHOTS = 20
_DRAWS = 50


def swag(history: Sequence[Member], x: Mapping[str, Tensor], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance `(n,)` over drawn networks, by part.

    Args:
        history: a network at two snapshots or more.
        x: inputs by part.
        seed: of the draws.
    """
    flat = torch.stack([torch.cat([part.flatten() for layer in member for part in layer]) for member in history])
    mean, deviations = flat.mean(0), flat - flat.mean(0)
    generator = torch.Generator().manual_seed(key(seed, "swag"))
    z = torch.randn(_DRAWS, flat.shape[1] + len(flat), generator=generator, dtype=torch.float64).to(flat)
    low_rank = z[:, flat.shape[1] :] @ deviations / math.sqrt(2 * (len(flat) - 1))
    drawn = mean + z[:, : flat.shape[1]] * (deviations.square().mean(0) / 2).sqrt() + low_rank
    sizes = [weight.shape[0] for weight, _ in history[0]] + [history[0][-1][0].shape[1]]
    return {part: _moments(drawn, sizes, rows) for part, rows in x.items()}


def _moments(drawn: Tensor, sizes: Sequence[int], x: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for weights in drawn:
        a, at, last = x, 0, len(sizes) - 2
        for index, (inputs, width) in enumerate(pairwise(sizes)):
            weight = weights[at : at + inputs * width].view(inputs, width)
            at += inputs * width
            a = torch.addmm(weights[at : at + width], a, weight)
            at += width
            a = a if index == last else a.relu_()
        outputs.append(a[:, 0])
    found = torch.stack(outputs)
    return found.mean(0), found.var(0)
