"""Concrete dropout (Gal, Hron, Kendall 2017): the rate is learned with the weights, not searched for.

A unit's mask is relaxed to `m = (1 - q) / (1 - p)`, with `q = sigmoid((logit p + logit u) / 0.1)` and u uniform, which
has a derivative with respect to the rate p. With noise variance `s2` and prior weights of standard deviation `1 / l`,

    loss = mean( e^2 / (2 s2) + log(s2) / 2 ) + ( l^2 |W_1|^2 / 2 + l^2 |W_2|^2 / (2 (1 - p)) - H · entropy(p) ) / n

is the negative evidence bound per row of a network with H hidden units and dropout before its output layer. The rate
and the noise have a learning rate of their own: at the study's small ones they would hardly leave where they start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from latedrop.studies.uci.stacked import Layer, Plan, Stack, Training, in_groups, joined

__all__ = ["Concrete", "train_concrete"]

_TEMPERATURE = 0.1
_LENGTH = 1e-2
_LEARNING_RATE = 1e-2
_FIRST_RATE = 0.1


@dataclass(frozen=True)
class Concrete:
    """Networks, and the rate and the noise variance (of the standardised target) that each learned, `(splits,)`."""

    stack: Stack
    rate: Tensor
    noise: Tensor


def train_concrete(
    x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], *, tick: Callable[[int], None] = lambda rows: None
) -> Concrete:
    """Train one network for every split; `plan` has one hidden layer, and its rates are not looked at.

    Args:
        x: `(splits, n, inputs)`, float32, standardised.
        y: `(splits, n)`.
        plan: size and hyper-parameters.
        seeds: one for each split.
        tick: told the rows times splits that have been trained on.
    """

    def work(group: slice, told: Callable[[int], None]) -> tuple[list[Layer], Tensor]:
        training = _ConcreteTraining(x[group], y[group], plan, seeds[group], told)
        return training.run(), training.own.detach()

    found = in_groups(work, x, plan.batch * plan.hidden[0], tick)
    theta, log_noise = torch.cat([own for _, own in found], 1)
    stack = Stack(tuple(joined([layers for layers, _ in found])), len(x), (0.0,))
    return Concrete(stack, theta.sigmoid(), log_noise.exp())


class _ConcreteTraining(Training):
    """As the other stacks, with two more parameters for each member: `logit p` and `log s2`."""

    unit = 1.0

    def __init__(self, x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], tick: Callable[[int], None]) -> None:
        plan = Plan(plan.hidden, (0.0,), plan.learning_rate, plan.batch, plan.epochs)
        super().__init__(x, y, plan, seeds, tick, masked=True)
        start = torch.tensor([math.log(_FIRST_RATE / (1 - _FIRST_RATE)), 0.0], device=x.device)
        self.own = start[:, None].repeat(1, len(x))
        self.own.grad = torch.zeros_like(self.own)
        self.optimiser.add_param_group({"params": [self.own], "lr": _LEARNING_RATE})

    def _step(self, rows: slice) -> None:
        batch, width = rows.stop - rows.start, self.plan.hidden[0]
        (first, _), (second, bias) = self.layers
        (first_gradient, _), (second_gradient, bias_gradient) = self.gradients
        theta, log_noise = (value.view(-1, 1, 1) for value in self.own)
        p, precision, prior = theta.sigmoid(), (-log_noise).exp(), _LENGTH**2 / self.rows
        x = self.xs[:, rows]
        a = torch.bmm(x, first).relu_()
        q = torch.logit(self.numbers[:, rows], eps=1e-6).add_(theta).div_(_TEMPERATURE).sigmoid_()
        mask = (1 - q).mul_(1 + theta.exp())
        thinned = a * mask
        error = torch.baddbmm(bias, thinned, second).sub_(self.ys[:, rows, None])
        g = error * (precision / batch)
        torch.bmm(thinned.transpose(1, 2), g, out=second_gradient).add_(second * (prior / (1 - p)))
        torch.sum(g, 1, keepdim=True, out=bias_gradient)
        back = g * second.transpose(1, 2)
        # d mask / d logit p = mask (p - q / temperature).
        by_rate = (back * thinned).mul_(p - q / _TEMPERATURE).sum((1, 2))
        square = second.square().sum((1, 2))
        flat_theta, flat_p = self.own[0], p.flatten()
        by_rate += (prior * square * flat_theta.exp()) / 2 + width / self.rows * flat_p * (1 - flat_p) * flat_theta
        by_noise = 0.5 - (error.square().mean((1, 2)) * precision.flatten()) / 2
        back = back.mul_(mask).mul_(a > 0)
        torch.bmm(x.transpose(1, 2), back, out=first_gradient).add_(first * prior)
        assert self.own.grad is not None
        self.own.grad.copy_(torch.stack([by_rate, by_noise]))
