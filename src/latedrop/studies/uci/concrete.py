"""Concrete dropout (Gal, Hron, Kendall 2017): the rate is learned with the weights, not searched for.

A unit's mask is relaxed to `m = (1 - q) / (1 - p)`, with `q = sigmoid((logit p + logit u) / 0.1)` and u uniform, which
has a derivative with respect to the rate p. Each site s, before layer s + 1, has a rate of its own. With noise variance
`s2` and prior weights of standard deviation `1 / l`,

    loss = mean( e^2 / (2 s2) + log(s2) / 2 )
         + ( l^2 |W_1|^2 / 2 + sum_s ( l^2 |W_{s+1}|^2 / (2 (1 - p_s)) - H_s · entropy(p_s) ) ) / n

is the negative evidence bound per row of a network with H_s units at site s. The rates and the noise have a learning
rate of their own: at the study's small ones they would hardly leave where they start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    """Networks, and the rates `(splits, sites)` and noise variances of the standardised target `(splits,)` learned."""

    stack: Stack
    rate: Tensor
    noise: Tensor


def train_concrete(
    x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], *, tick: Callable[[int], None] = lambda rows: None
) -> Concrete:
    """Train one network for every split; the rates of `plan` are not looked at.

    Args:
        x: `(splits, n, inputs)`, float32, standardised.
        y: `(splits, n)`.
        plan: sizes and hyper-parameters.
        seeds: one for each split.
        tick: told the rows times splits that have been trained on.
    """

    def work(group: slice, told: Callable[[int], None]) -> tuple[list[Layer], Tensor]:
        training = _ConcreteTraining(x[group], y[group], plan, seeds[group], told)
        return training.run(), training.own.detach()

    found = in_groups(work, x, plan.batch * max(plan.hidden), tick)
    *logits, log_noise = torch.cat([own for _, own in found], 1)
    stack = Stack(tuple(joined([layers for layers, _ in found])), len(x), (0.0,))
    return Concrete(stack, torch.stack(logits, 1).sigmoid(), log_noise.exp())


class _ConcreteTraining(Training):
    """As the other stacks, with more parameters for each member: `logit p` of every site, and `log s2`."""

    unit = 1.0

    def __init__(self, x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], tick: Callable[[int], None]) -> None:
        super().__init__(x, y, replace(plan, rates=(0.0,), snapshots=0), seeds, tick, masked=True)
        first = math.log(_FIRST_RATE / (1 - _FIRST_RATE))
        start = torch.tensor([first] * len(plan.hidden) + [0.0], device=x.device)
        self.own = start[:, None].repeat(1, len(x))
        self.own.grad = torch.zeros_like(self.own)
        self.optimiser.add_param_group({"params": [self.own], "lr": _LEARNING_RATE})

    def _step(self, rows: slice) -> None:
        batch, prior = rows.stop - rows.start, _LENGTH**2 / self.rows
        *thetas, log_noise = (value.view(-1, 1, 1) for value in self.own)
        precision = (-log_noise).exp()
        x = self.xs[:, rows]
        inputs, at = [x], 0
        sites: list[tuple[Tensor, Tensor]] = []
        for (weight, bias), theta in zip(self.layers, thetas, strict=False):
            z = torch.baddbmm(bias, inputs[-1], weight) if sites else torch.bmm(x, weight)
            uniform = self.numbers[:, rows, at : at + weight.shape[2]]
            q = torch.logit(uniform, eps=1e-6).add_(theta).div_(_TEMPERATURE).sigmoid_()
            # The derivative of relu times the mask, which is what a unit is multiplied by on the way back.
            slope = (1 - q).mul_(1 + theta.exp()).mul_(z > 0)
            inputs.append(z * slope)
            sites.append((q, slope))
            at += weight.shape[2]
        weight, bias = self.layers[-1]
        error = torch.baddbmm(bias, inputs[-1], weight).sub_(self.ys[:, rows, None])
        own = [0.5 - (error.square().mean((1, 2)) * precision.flatten()) / 2]
        g = error * (precision / batch)
        for index in range(len(sites), 0, -1):
            weight, (q, slope), theta = self.layers[index][0], sites[index - 1], thetas[index - 1]
            p, (by_weight, by_bias) = theta.sigmoid(), self.gradients[index]
            torch.bmm(inputs[index].transpose(1, 2), g, out=by_weight).add_(weight * (prior / (1 - p)))
            torch.sum(g, 1, keepdim=True, out=by_bias)
            back = torch.bmm(g, weight.transpose(1, 2))
            # d mask / d logit p = mask (p - q / temperature).
            by_rate = (back * inputs[index]).mul_(p - q / _TEMPERATURE).sum((1, 2))
            flat, share = theta.flatten(), p.flatten()
            by_rate += prior * weight.square().sum((1, 2)) * flat.exp() / 2
            own.insert(0, by_rate + self.plan.hidden[index - 1] / self.rows * share * (1 - share) * flat)
            g = back.mul_(slope)
        first = self.layers[0][0]
        torch.bmm(x.transpose(1, 2), g, out=self.gradients[0][0]).add_(first * prior)
        assert self.own.grad is not None
        self.own.grad.copy_(torch.stack(own))
