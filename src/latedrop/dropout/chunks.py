"""How many draws run at once: what fits the caches of a CPU, or fills another device without filling its memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from latedrop.data.rows import row_count
from latedrop.network.network import Network
from latedrop.network.sites import Site

__all__ = ["fitting_chunk"]

_CACHE_BYTES = {"cpu": 16 * 2**20}  # of all draws that run at once, where these are small; beyond it caches overflow
_SMALL_BYTES = 512 * 2**20  # the same on other devices, which have no such cache to lose
_CUDA_BYTES = 2**31  # and on a CUDA device, where each pass costs its launches; a sixteenth of its memory at most
_FULL = 20  # draws that fill any other device; with more, only memory would grow


def fitting_chunk(network: Network, x: Any, sites: Sequence[Site], draws: int) -> int:
    """How many of so many draws to run at once.

    On a CPU, what fits its caches. On a CUDA device as many as are small; of large ones 20, or what fits a sixteenth of
    its memory. Elsewhere as many as are small. The last pass has as many as all others, or nearly: programs fill it up.
    """
    parameter = network.weight
    widest = max(site.count * max(1.0, _widening(network.layers.get(site.name))) for site in sites)
    per_draw = int(3 * widest * (row_count(x) + 1) * parameter.element_size())
    device = parameter.device
    if device.type != "cuda":
        return _evenly(draws, max(1, _CACHE_BYTES.get(device.type, _SMALL_BYTES) // per_draw))
    most = _memory(device) // 16
    few = max(_SMALL_BYTES, min(_CUDA_BYTES, most)) // per_draw
    return _evenly(draws, max(1, few, min(most // per_draw, _FULL)))


@cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _evenly(draws: int, most: int) -> int:
    """Draws of each pass, where no more than `most` fit.

    >>> _evenly(50, 20), _evenly(50, 60)
    (17, 50)
    """
    passes = -(-draws // most)
    return -(-draws // passes)


def _widening(layer: nn.Module | None) -> float:
    """Outputs of a layer for each of its inputs, where it tells."""
    if isinstance(layer, nn.Linear):
        return layer.out_features / layer.in_features
    if isinstance(layer, nn.RNNBase):
        return layer.hidden_size / layer.input_size
    return layer.out_channels / layer.in_channels if isinstance(layer, nn.Conv2d) else 1.0
