"""Mask gradients of a row: what first order makes of every unit, `phi = h · dy/dh`, one number per unit or channel.

Positions (pixels, steps) and calls of one layer are summed. More than `WIDEST` units are folded into that many: some
signs are flipped, and every `width`-th unit is added up, which keeps inner products on average. The signs follow from a
hash, so they are the same on every machine and in every version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from latedrop.data.arrays import apart, widened
from latedrop.dropout.masks import STEP, mixed
from latedrop.network.network import Network
from latedrop.network.sites import Site, channel_axis

__all__ = ["WIDEST", "folded", "joined_gradients"]

WIDEST = 512
_MOST_NUMBERS = 2**22  # of the matrices of all outputs together


def joined_gradients(network: Network, sites: Sequence[Site], phi: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return `(N, K, D)` from `phi` of each of K outputs, `(N, units)` by the names of the sites."""
    rows = [torch.cat([_by_channel(network, site, entry[site.name]) for site in sites], 1) for entry in phi]
    joined = torch.stack(rows, 1)
    return folded(joined, min(WIDEST, max(8, int((_MOST_NUMBERS / len(phi)) ** 0.5))))


def folded(phi: Tensor, width: int) -> Tensor:
    """Fold `(..., U)` into `(..., width)`; nothing is done where U is at most `width`."""
    units = phi.shape[-1]
    if units <= width:
        return phi
    layers = -(-units // width)
    padded = pad(phi * _signs(units).to(phi), (0, layers * width - units))
    return padded.reshape(*phi.shape[:-1], layers, width).sum(-2)


def _by_channel(network: Network, site: Site, phi: Tensor) -> Tensor:
    """Sum `(N, units)` over positions and calls, to `(N, channels)`."""
    layer = network.layers.get(site.name) if site.weight is None else None
    axis = channel_axis(layer) if layer is not None and len(site.units) > 1 else -1
    channels = site.units[axis]
    if phi.shape[1] == channels or phi.shape[1] % channels:
        return widened(phi)
    wide = torch.promote_types(phi.dtype, torch.float32)
    if axis == -1:
        return phi.reshape(len(phi), -1, channels).sum(1, dtype=wide)
    calls = site.calls if phi.shape[1] % (site.calls * channels) == 0 else 1
    return phi.reshape(len(phi), calls, channels, -1).sum((1, 3), dtype=wide)


@lru_cache(maxsize=8)
def _signs(units: int) -> Tensor:
    """Return 1 or -1 for each unit."""
    return apart(partial(_drawn, units))  # a graph would hold how they are made in place of them


def _drawn(units: int) -> Tensor:
    with np.errstate(over="ignore"):
        start = mixed(np.array([1], np.uint64))
        keys = mixed(start + np.arange(1, units + 1, dtype=np.uint64) * STEP)
    return torch.from_numpy(np.where(keys & np.uint64(1), 1.0, -1.0))
