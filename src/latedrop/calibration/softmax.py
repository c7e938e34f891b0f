"""Probabilities of uncertain logits.

With logits `z` and `D_kj` the variance of `z_k - z_j` under dropout, take one class against all others: with
`q_j = p_j / (1 - p_k)` and `l_k = z_k - log sum_(j != k) exp z_j`, to second order in the doubt

    E l_k = l_k - B_k / 2,    Var l_k = sum_j q_j D_kj - B_k,    B_k = sum_ij q_i q_j D_ij / 2,

and the mean of the softmax is about that of `sigmoid(l_k)` with a Gaussian `l_k`, brought to a sum of 1. This mean is
summed over a few points: the better-known `sigmoid(E l_k / sqrt(1 + pi / 8 · Var l_k))` (MacKay 1992) is off by up to
0.02, and by several nats for labels that are very unlikely. A temperature divides `z`, and its square `D`. Without
doubt it is the softmax itself. Of many classes the likeliest `TOP` are looked at one by one; all others together are
one class more, whose logit dropout does not move.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from latedrop.data.arrays import apart

__all__ = ["MOST", "TOP", "entropy", "information", "log_mean_softmax", "mutual_information", "read_classes"]

MOST = 16
"""Classes whose logits are all looked at one by one."""
TOP = 10
_STEP, _POINTS = 0.5, 10
_WIDEST = 6.0


def read_classes(logits: Tensor) -> Tensor:
    """The logits whose differences count: all of few, else the largest ones, and 0 for all others together."""
    if logits.shape[1] <= MOST:
        return logits
    return torch.cat([logits.topk(TOP, 1).values, torch.zeros_like(logits[:, :1])], 1)


def log_mean_softmax(logits: Tensor, spread: Tensor | None, temperature: Tensor) -> Tensor:
    """Log probabilities `(N, K)`.

    Args:
        logits: `(N, K)`.
        spread: `(N, k, k)`, the variances of the differences of what `read_classes` gives; None: no doubt.
        temperature: `(N,)` or a number.
    """
    scaled = logits / temperature.reshape(-1, 1)
    if spread is None:
        return torch.log_softmax(scaled, 1)
    spread = spread / temperature.reshape(-1, 1, 1).square()
    if logits.shape[1] <= MOST:
        return _one_against_all(scaled, spread)
    top, places = scaled.topk(TOP, 1)
    others = scaled.scatter(1, places, -torch.inf)
    together = others.logsumexp(1, keepdim=True)
    found = _one_against_all(torch.cat([top, together], 1), spread)
    return (others - together + found[:, -1:]).scatter(1, places, found[:, :-1])


def _one_against_all(logits: Tensor, spread: Tensor) -> Tensor:
    k = logits.shape[1]
    own = torch.eye(k, dtype=torch.bool, device=logits.device)
    rivals = logits[:, None, :].expand(-1, k, -1).masked_fill(own, -torch.inf)
    together = rivals.logsumexp(2)
    q = (rivals - together[..., None]).exp()
    bent = torch.einsum("nki,nij,nkj->nk", q, spread, q) / 2
    variance = (torch.einsum("nkj,nkj->nk", q, spread) - bent).clamp_min(0)
    return torch.log_softmax(_log_mean_sigmoid(logits - together - bent / 2, variance), 1)


def _log_mean_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """The log of the mean of `sigmoid(l)`, `l` Gaussian; the probability is off by 0.0015 at most.

    With `e^(-a l)`, `0 <= a <= 1`, taken out of the sigmoid, the points lie where the product with the density is
    large, also for a mean far below 0. They are too far apart for a larger deviation than `_WIDEST`, where a sigmoid
    is nearly a step: there the mean shrinks with the deviation.
    """
    own = math.pi**2 / 3  # the variance of which a sigmoid is the distribution
    variance = variance.clamp_min(1e-12)
    narrow = variance.clamp_max(_WIDEST**2)
    mean = mean * ((narrow + own) / (variance + own)).sqrt()
    tilt = (-mean / narrow).clamp(0, 1)
    points = _STEP * torch.arange(-_POINTS, _POINTS + 1, dtype=mean.dtype, device=mean.device)
    weights = torch.log_softmax(-points.square() / 2, 0)
    at = (mean + tilt * narrow)[..., None] + narrow.sqrt()[..., None] * points
    terms = torch.nn.functional.logsigmoid(at) - tilt[..., None] * at + weights
    return terms.logsumexp(-1) + tilt * mean + tilt.square() * narrow / 2


def mutual_information(logits: Tensor, spread: Tensor, temperature: Tensor, draws: int = 256, seed: int = 0) -> Tensor:
    """What the label would tell about the thinned network, `(N,)` in nats: entropy of the mean minus mean entropy.

    Gaussian logits with these variances of their differences stand for draws of the network. The arguments are those
    of `log_mean_softmax`; the classes beyond the likeliest count as one.
    """
    scaled = logits / temperature.reshape(-1, 1)
    spread = spread / temperature.reshape(-1, 1, 1).square()
    if logits.shape[1] > MOST:
        top, places = scaled.topk(TOP, 1)
        scaled = torch.cat([top, scaled.scatter(1, places, -torch.inf).logsumexp(1, keepdim=True)], 1)
    k = scaled.shape[1]
    center = torch.eye(k, dtype=logits.dtype, device=logits.device) - 1 / k
    values, vectors = torch.linalg.eigh(-center @ spread @ center / 2)  # of logits less their mean, which goes unseen
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]
    noise = _noise(draws // 2, k, seed).to(logits)
    logs = torch.log_softmax(scaled + torch.einsum("nkj,tj->tnk", root, torch.cat([noise, -noise])), 2)
    return information(logs)


@lru_cache(maxsize=16)
def _noise(draws: int, classes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return apart(partial(torch.randn, draws, classes, dtype=torch.float64, generator=generator))


def information(logs: Tensor) -> Tensor:
    """Entropy of the mean minus mean entropy, `(N,)`, of log probabilities of draws `(T, N, K)`."""
    mean = logs.logsumexp(0) - math.log(len(logs))
    return (entropy(mean) - entropy(logs).mean(0)).clamp_min(0)


def entropy(logs: Tensor) -> Tensor:
    """`(...,)` in nats, of log probabilities `(..., K)`."""
    return 0 - (logs.exp() * logs.clamp_min(-1e30)).sum(-1)  # 0 of a sure row, where a minus alone gives -0.0
