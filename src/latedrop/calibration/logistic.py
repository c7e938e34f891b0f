"""Logistic regression by Newton's steps, shrunk to given coefficients.

Minimises `sum_i log(1 + exp(-s_i x_i' w)) + sum_j ridge_j (w_j - start_j)^2 / 2`, with `s = 1` for labels of 1 and
`-1` for labels of 0. Steps that do not lower the loss are halved.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["logistic"]

_STEPS, _HALVES = 50, 20


def logistic(inputs: Tensor, labels: Tensor, ridge: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the coefficients `(P,)` of inputs `(N, P)` for labels `(N,)` of 0 and 1; `ridge` and `start` `(P,)`.

    >>> x = torch.tensor([[-1.0, 1.0], [1.0, 1.0]]).double()
    >>> bool(logistic(x, torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.1]))[0] > 0)
    True
    """
    ridge, labels = ridge.to(inputs), labels.to(inputs)
    start = inputs.new_zeros(inputs.shape[1]) if start is None else start.to(inputs)

    def cost(weights: Tensor) -> float:
        fit = binary_cross_entropy_with_logits(inputs @ weights, labels, reduction="sum")
        return float(fit + (ridge * (weights - start).square()).sum() / 2)

    weights, now = start, cost(start)
    for _ in range(_STEPS):
        p = torch.sigmoid(inputs @ weights)
        slope = inputs.T @ (p - labels) + ridge * (weights - start)
        curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + ridge.diag()
        step = torch.linalg.solve(curvature, slope)
        for _ in range(_HALVES):
            after = cost(weights - step)
            if after <= now:
                break
            step = step / 2
        if not after < now:
            break
        weights, last, now = weights - step, now, after
        if last - now <= 1e-12 * abs(last):
            break
    return weights
