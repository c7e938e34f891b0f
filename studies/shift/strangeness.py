"""How far a row is from the training rows in feature space, as a variance: what the library's default has inside.

With `h` what enters the sites of a network, the two are those of `latedrop.terms`: leverage,
`h' (G + r · tr(G) / d · I)^-1 h` with `G` the mean of `h h'` over the training rows, and the mean squared distance to
the ten nearest training rows. They have no unit of the target: only what is fitted to validation rows can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from studies.uci.measures import hidden_units
from studies.uci.methods import Moments, Network

__all__ = ["leverage", "neighbours"]

_RIDGE = 1e-3
_NEAREST = 10


def leverage(net: Network) -> Moments:
    """Of the features of every part but the training rows, on the network's mean."""
    train = _with_one(_features(net, "train"))
    count, width = train.shape
    gram = train.T @ train / count
    gram.diagonal().add_(_RIDGE * max(1.0, width / count) ** 2 * gram.diagonal().mean())
    root = torch.linalg.cholesky(gram)

    def values(part: str) -> Tensor:
        h = _with_one(_features(net, part))
        solved: Tensor = torch.linalg.solve_triangular(root, h.T, upper=False)
        return solved.square().sum(0)

    return {part: (net.mean[part], values(part)) for part in net.judged}


def neighbours(net: Network) -> Moments:
    """Of the features of every part but the training rows, on the network's mean; dead units are left out."""
    train = _features(net, "train")
    spread, center = torch.std_mean(train, 0)
    spread = torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
    points = (train - center) / spread
    nearest = min(_NEAREST, len(train))

    def values(part: str) -> Tensor:
        distances = torch.cdist((_features(net, part) - center) / spread, points)
        return distances.topk(nearest, largest=False).values.square().mean(1)

    return {part: (net.mean[part], values(part)) for part in net.judged}


def _features(net: Network, part: str) -> Tensor:
    """What enters the sites, one after the other, `(n, units)`."""
    return torch.cat(hidden_units(net.member, net.x[part]), 1)


def _with_one(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)
