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

from studies.uci.stacked import Layer, Plan, Stack, Training, in_groups, joined

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
        self.widths = torch.tensor(plan.hidden, device=x.device)[:, None] / self.rows
        self.optimiser.add_param_group({"params": [self.own], "lr": _LEARNING_RATE})

    def _draw(self) -> None:
        super()._draw()
        self.numbers.logit_(eps=1e-6).div_(_TEMPERATURE)

    def _step(self, rows: slice) -> None:
        batch, prior = rows.stop - rows.start, _LENGTH**2 / self.rows
        theta, precision = self.own[:-1, :, None, None], (-self.own[-1]).exp()
        rate, keep = theta.sigmoid(), 1 + theta.exp()  # keep is 1 / (1 - rate)
        shift, pull = theta / _TEMPERATURE, prior * keep
        x = self.xs[:, rows]
        inputs, at = [x], 0
        sites: list[tuple[Tensor, Tensor, Tensor]] = []
        for index, width in enumerate(self.plan.hidden):
            weight, bias = self.layers[index]
            a = torch.baddbmm(bias, inputs[-1], weight) if index else torch.bmm(x, weight)
            q = torch.add(self.numbers[:, rows, at : at + width], shift[index]).sigmoid_()
            mask = torch.rsub(q, 1).mul_(keep[index])
            inputs.append(a.relu_() * mask)
            sites.append((a, q, mask))
            at += width
        weight, bias = self.layers[-1]
        error = torch.baddbmm(bias, inputs[-1], weight).sub_(self.ys[:, rows, None])
        g = error * (precision / batch).view(-1, 1, 1)
        by_rate: list[Tensor] = []
        squares: list[Tensor] = []
        for index in range(len(sites), 0, -1):
            weight, (a, q, mask) = self.layers[index][0], sites[index - 1]
            torch.bmm(inputs[index].transpose(1, 2), g, out=self.gradients[index][0]).addcmul_(weight, pull[index - 1])
            torch.sum(g, 1, keepdim=True, out=self.gradients[index][1])
            back = torch.bmm(g, weight.transpose(1, 2))
            # d mask / d logit p = mask (p - q / temperature).
            slope = torch.add(rate[index - 1], q, alpha=-1 / _TEMPERATURE).mul_(inputs[index])
            by_rate.insert(0, slope.mul_(back).sum((1, 2)))
            squares.insert(0, weight.square().sum((1, 2)))
            # The derivative of relu: what came out as 0 sends nothing back.
            g = torch.ops.aten.threshold_backward(back.mul_(mask), a, 0.0)
        torch.bmm(x.transpose(1, 2), g, out=self.gradients[0][0]).add_(self.layers[0][0], alpha=prior)
        theta, rate, keep = (values[:, :, 0, 0] for values in (theta, rate, keep))
        entropy = self.widths * rate * (1 - rate) * theta
        assert self.own.grad is not None
        self.own.grad[:-1] = torch.stack(by_rate) + prior / 2 * torch.stack(squares) * (keep - 1) + entropy
        self.own.grad[-1] = 0.5 - error.square().mean((1, 2)) * precision / 2
