"""How far dropout moves several outputs apart, to first order.

With `g_k` the gradients of output k with respect to the masks of site s, each per unit of `rate / (1 - rate)`, the
variance of the difference of two outputs is

    D_kj = |g_k - g_j|^2 = |g_k|^2 + |g_j|^2 - 2 g_k · g_j,

so that one backward pass for each output gives the variances of all differences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from latedrop.model.calling import Readout
from latedrop.model.rows import row_count, take_rows
from latedrop.model.sites import Sites
from latedrop.torch_inside import being_traced
from latedrop.variance.first_order import gradients_by_rows

__all__ = ["differences"]

_MOST_NUMBERS = 2**24


def differences(model: nn.Module, x: Any, sites: Sites, readout: Readout = None) -> tuple[Tensor, Tensor]:
    """Outputs `(N, K)`, and the variances of their differences by site, `(N, sites, K, K)`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> from latedrop import find_sites
    >>> mean, spread = differences(net, torch.ones(5, 2), find_sites(net, torch.ones(5, 2)))
    >>> mean.shape, spread.shape
    (torch.Size([5, 3]), torch.Size([5, 1, 3, 3]))
    """
    outputs, found = [], []
    rows = row_count(x)
    done, chunk = 0, rows if being_traced() else 1
    while done < rows:
        part = take_rows(x, slice(done, done + chunk))
        for mean, columns in gradients_by_rows(model, part, sites, readout):
            grams = []
            numbers = 0
            for site in sites:
                gradients = torch.stack([column[site.name] for column in columns], 1)
                numbers += gradients[0].numel()
                grams.append(gradients @ gradients.transpose(1, 2))
            gram = torch.stack(grams, 1)
            squares = gram.diagonal(dim1=-2, dim2=-1)
            apart = squares[..., :, None] + squares[..., None, :] - 2 * gram
            outputs.append(mean.reshape(len(mean), -1))
            found.append(apart.clamp_min(0))
        done += row_count(part)
        chunk = max(1, _MOST_NUMBERS // max(1, numbers))  # after a first row, which tells how large it is
    return torch.cat(outputs), torch.cat(found)
