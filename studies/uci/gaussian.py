"""Networks with a Gaussian head: mean and log variance of the target, trained by the NLL (Nix and Weigend 1994).

    loss = mean( (y - m)^2 exp(-s) / 2 + s / 2 ),     outputs (m, s),

from the same initial hidden weights, batches and Adam as the networks of one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from studies.uci.measures import Member, hidden_units
from studies.uci.stacked import Plan, Stack, Training, train

__all__ = ["GaussianTraining", "heads", "train_gaussian"]

_LIMIT = 12.0


class GaussianTraining(Training):
    """As the other stacks, with two outputs."""

    outputs = 2

    def _loss_gradient(self, output: Tensor, rows: slice) -> Tensor:
        batch, each = rows.stop - rows.start, len(self.plan.rates)
        target = self.ys[:, rows].repeat_interleave(each, 0) if each > 1 else self.ys[:, rows]
        error = output[..., 0] - target
        # Within bounds, so that one far row cannot overflow the others' gradient.
        precision = output[..., 1].clamp(-_LIMIT, _LIMIT).neg().exp()
        weighted = error * precision
        return torch.stack([weighted, (1 - error * weighted) / 2], -1).div_(batch)


def train_gaussian(
    x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], *, tick: Callable[[int], None] = lambda rows: None
) -> Stack:
    """See `stacked.train`: a stack whose last layers have two outputs."""
    return train(x, y, plan, seeds, tick=tick, kind=GaussianTraining)


def heads(member: Member, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance `(n,)` of a Gaussian head."""
    weight, bias = member[-1]
    mean, log_variance = (hidden_units(member, x)[-1] @ weight + bias).unbind(1)
    return mean, log_variance.clamp(-_LIMIT, _LIMIT).exp()
