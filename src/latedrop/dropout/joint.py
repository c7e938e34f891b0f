"""How far dropout moves several outputs apart, to first order.

With `g_k` the gradients of output k with respect to the masks of site s, each per unit of `rate / (1 - rate)`, the
variance of the difference of two outputs is

    D_kj = |g_k - g_j|^2 = |g_k|^2 + |g_j|^2 - 2 g_k · g_j.

Something taken from all `g_k` alike changes nothing, so that the gradients of `y_k - y_K`, one backward pass for each
output but the last, give the variances of all differences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from latedrop.data.rows import row_count, take_rows
from latedrop.dropout.first_order import gradients_by_rows
from latedrop.network.calling import Readout, part_of
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.torch_private import being_traced

__all__ = ["differences"]

_MOST_NUMBERS = 2**24
_USUAL_OUTPUTS = 16


def differences(model: nn.Module | Network, x: Any, sites: Sites, readout: Readout = None) -> Tensor:
    """Variances of the differences of K outputs by site, `(N, sites, K, K)`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> from latedrop import find_sites
    >>> differences(net, torch.ones(5, 2), find_sites(net, torch.ones(5, 2))).shape
    torch.Size([5, 1, 3, 3])
    """

    def from_last(output: Any) -> Tensor:
        flat: Tensor = part_of(output, readout).flatten(1)
        return flat[:, :-1] - flat[:, -1:]

    network, rows, found = Network.of(model), row_count(x), []
    done, numbers = 0, _USUAL_OUTPUTS * sum(site.count * site.calls for site in sites)  # a guess, for the first rows
    while done < rows:
        chunk = rows if being_traced() else max(1, _MOST_NUMBERS // max(1, numbers))
        part = take_rows(x, slice(done, done + chunk))
        for _, columns in gradients_by_rows(network, part, sites, from_last):
            gradients = [torch.stack([column[site.name] for column in columns], 1) for site in sites]
            numbers = sum(one[0].numel() for one in gradients)
            gram = pad(torch.stack([one @ one.mT for one in gradients], 1), (0, 1, 0, 1))
            squares = gram.diagonal(dim1=-2, dim2=-1)
            found.append((squares[..., :, None] + squares[..., None, :] - 2 * gram).clamp_min(0))
        done += row_count(part)
    return torch.cat(found)
