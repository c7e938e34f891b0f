"""Rate-In (Zeevi et al. 2025): dropout rates for each layer and each row, without labels, from lost information.

A layer's activations of one row are taken as values of one quantity A, and those after dropout as values of B. The rate
is raised until a share `LOSS` of the information that A has about itself is lost:

    1 - I(A; B) / H(A) = LOSS.

We count: A falls into bins, one for exactly 0 and ten of equal width up to the row's largest activation, with shares
`q_b`. Dropout at rate p moves a share p of each bin into that of 0 (to multiply what is kept by 1 / (1 - p) loses
nothing), so

    I(A; B) = H(B) - (1 - q_0) h(p),     B: q_0 + p (1 - q_0) in the bin of 0, (1 - p) q_b in the others,

with the binary entropy h. I falls from H(A) to 0 as p goes from 0 to 1: bisection finds the rate. The paper estimates
such a loss from drawn masks and moves the rate by steps; the share of 10 % is that of its published example. A row
whose units all fall into one bin has no information to lose, and rate 0. The variance is that of dropout at these
rates, to first order (exact with one hidden layer).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOSS", "information_kept", "row_rates"]

LOSS = 0.1
_BINS = 10
_STEPS = 40


def row_rates(activations: Tensor, loss: float = LOSS) -> Tensor:
    """The rate of each row `(n,)` at a site with activations `(n, units)`, none below 0."""
    shares = _shares(activations)
    whole = information_kept(shares, torch.zeros_like(shares[:, 0]))
    low, high = torch.zeros_like(whole), torch.ones_like(whole)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        enough = information_kept(shares, middle) >= (1 - loss) * whole
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return torch.where(whole > 1e-12, low, 0.0)


def information_kept(shares: Tensor, rate: Tensor) -> Tensor:
    """`I(A; B)` in nats `(n,)` for shares `(n, bins)`, the first of 0, and rates `(n,)`.

    >>> information_kept(torch.tensor([[0.5, 0.5]]), torch.tensor([1.0]))
    tensor([0.])
    """
    p, zero = rate[:, None], shares[:, :1]
    after = torch.cat([zero + p * (1 - zero), (1 - p) * shares[:, 1:]], 1)
    return _entropy(after) - (1 - zero[:, 0]) * _entropy(torch.cat([p, 1 - p], 1))


def _shares(activations: Tensor) -> Tensor:
    most = activations.amax(1, keepdim=True).clamp_min(torch.finfo(activations.dtype).tiny)
    place = (activations / most * _BINS).ceil().long().clamp(0, _BINS)
    counts = torch.zeros(len(activations), _BINS + 1, dtype=activations.dtype, device=activations.device)
    return counts.scatter_add_(1, place, torch.ones_like(activations)) / activations.shape[1]


def _entropy(shares: Tensor) -> Tensor:
    return -torch.xlogy(shares, shares).sum(1)
