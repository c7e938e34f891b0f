"""Many small networks trained at once: multilayer perceptrons as one stack of batched matrix products.

A stack has a member for each (split, rate): ReLU layers with dropout at its rate before every layer but the first,

    a_0 = x,   a_l = relu(a_{l-1} W_l + b_l) · keep_l,   y = a_L W / (1 - rate) + b,

its own rows, masks and Adam state. The mean squared errors of all members are independent of one another, so one
backward pass of their sum gives every member's gradient.

The result of a member does not depend on who is trained beside it. Initial weights, the order of the rows and the
numbers that masks are cut from come from generators seeded by the split alone. The rates of one split share
them, a paired comparison: they start from the same weights, see the same batches, and what a small rate drops
a larger one drops too. The last batch of an epoch is as large as what is left. On CUDA one epoch is a captured graph,
replayed; on the CPU a stack is trained in groups of splits that fit the cache. The numbers drawn depend on the kind of
device.

*Gaussian heads* (Nix and Weigend 1994) have the outputs (m, s), mean and log variance of the target, and
`loss = mean((y - m)^2 exp(-s) / 2 + s / 2)`.

*Concrete dropout* (Gal, Hron, Kendall 2017) learns the rates with the weights. A unit's mask is relaxed to
`m = (1 - q) / (1 - p)`, with `q = sigmoid((logit p + logit u) / 0.1)` and u uniform, which has a derivative by the
rate p. Each site s, before layer s + 1, has a rate of its own. With noise variance `s2` and prior weights of
standard deviation `1 / l`,

    loss = mean( e^2 / (2 s2) + log(s2) / 2 )
         + ( l^2 |W_1|^2 / 2 + sum_s ( l^2 |W_{s+1}|^2 / (2 (1 - p_s)) - H_s · entropy(p_s) ) ) / n

is the negative evidence bound per row of a network with H_s units at site s; W_1 has its bias in it. The rates and the
noise have a learning rate of their own: at the study's small ones they would hardly leave where they start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor

from latedrop.errors import OutputError
from studies.regression.scores import Member, hidden_units

_GROUP_FLOATS = 400_000


@dataclass(frozen=True)
class Layer:
    """Weights `(members, inputs, outputs)` and biases `(members, 1, outputs)` of one layer."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """`(members, n, inputs)` to `(members, n, outputs)`."""
        return torch.baddbmm(self.bias, x, self.weight)


@dataclass(frozen=True)
class Stack:
    """Trained networks, split by split and within a split rate by rate.

    Attributes:
        layers: from the input to the output.
        splits: how many.
        rates: of each split's members.
        snapshots: the layers at earlier epochs, as many as `Plan.snapshots`.
        own: what concrete dropout learned, `(sites + 1, members)`: the logit of each site's rate, and the log of the
            noise variance of the standardised target.
    """

    layers: tuple[Layer, ...]
    splits: int
    rates: tuple[float, ...]
    snapshots: tuple[tuple[Layer, ...], ...] = ()
    own: Tensor | None = None

    def member(self, split: int, rate: int, layers: Sequence[Layer] | None = None) -> tuple[tuple[Tensor, Tensor], ...]:
        """Weight `(inputs, outputs)` and bias `(outputs,)` of each layer of one network, now or at a snapshot."""
        index = split * len(self.rates) + rate
        return tuple((layer.weight[index], layer.bias[index, 0]) for layer in layers or self.layers)

    def history(self, split: int, rate: int) -> list[tuple[tuple[Tensor, Tensor], ...]]:
        """Return one network at each snapshot."""
        return [self.member(split, rate, layers) for layers in self.snapshots]


@dataclass(frozen=True)
class Plan:
    """How the members of a stack are trained.

    Attributes:
        hidden: units of each hidden layer.
        rates: dropout rates; each split has a member for every one of them.
        learning_rate: of Adam.
        batch: rows per step.
        epochs: passes over the rows.
        snapshots: how many epochs of the last quarter are remembered, equally far apart.
    """

    hidden: tuple[int, ...]
    rates: tuple[float, ...]
    learning_rate: float
    batch: int
    epochs: int
    snapshots: int = 0


def key(*names: object) -> int:
    """A seed from names: the same on every machine."""
    digest = blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial(sizes: Sequence[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Weight `(inputs, outputs)` and bias `(outputs,)` of each layer, uniform in `± 1 / sqrt(inputs)`."""
    generator = torch.Generator().manual_seed(key(seed, "initial"))
    layers = []
    for inputs, outputs in pairwise(sizes):
        both = torch.rand(inputs + 1, outputs, generator=generator).mul_(2).sub_(1) / math.sqrt(inputs)
        layers.append((both[:-1], both[-1]))
    return layers


def train(
    x: Tensor,
    y: Tensor,
    plan: Plan,
    seeds: Sequence[int],
    *,
    tick: Callable[[int], object] = lambda steps: None,
    kind: "type[Training] | None" = None,
) -> Stack:
    """Train a network for every split and rate.

    Args:
        x: `(splits, n, inputs)`, float32, standardised.
        y: `(splits, n)`.
        plan: sizes, rates and hyper-parameters.
        seeds: one for each split.
        tick: told how many rows times splits have been trained on since it was told last.
        kind: how a step is taken; by the squared error where None.

    Raises:
        OutputError: a member diverged.
    """
    width = len(plan.rates) * min(plan.batch, x.shape[1]) * max(plan.hidden)
    count = 1 if x.is_cuda else min(len(x), math.ceil(len(x) / max(1, _GROUP_FLOATS // width)))
    edges = [len(x) * index // count for index in range(count + 1)]
    groups = [slice(*ends) for ends in pairwise(edges)]
    trained = [(kind or Training)(x[group], y[group], plan, seeds[group], tick) for group in groups]
    layers, *snapshots = (
        _joined(same) for same in zip(*([each.run(), *each.snapshots] for each in trained), strict=True)
    )
    if not all(bool(torch.isfinite(layer.weight).all()) for layer in layers):
        raise OutputError("expected finite weights after training; found NaN or inf. Lower the learning rate.")
    own = [each.own.detach() for each in trained if each.own is not None]
    return Stack(layers, len(x), plan.rates, tuple(snapshots), torch.cat(own, 1) if own else None)


def _joined(groups: Sequence[Sequence[Layer]]) -> tuple[Layer, ...]:
    """Join the layers of several groups of splits."""
    return tuple(
        Layer(torch.cat([layer.weight for layer in same]), torch.cat([layer.bias for layer in same]))
        for same in zip(*groups, strict=True)
    )


class Training:
    """One stack in training: its parameters, buffers and generators. `run` it once."""

    outputs = 1
    own: Tensor | None = None

    def __init__(self, x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], tick: Callable[[int], object]) -> None:
        self.plan, self.tick, self.x, self.y = plan, tick, x, y
        self.splits, self.rows, inputs = x.shape
        self.layers = [
            Layer(*(each.to(x.device).repeat_interleave(len(plan.rates), 0).requires_grad_() for each in same))
            for same in _initial_layers((inputs, *plan.hidden, self.outputs), seeds)
        ]
        self.parameters = [part for layer in self.layers for part in (layer.weight, layer.bias)]
        self.optimiser = torch.optim.Adam(self.parameters, lr=plan.learning_rate, fused=True, capturable=x.is_cuda)
        self.rates = torch.tensor(plan.rates, device=x.device).view(1, -1, 1, 1)
        self.orders = [torch.Generator(x.device).manual_seed(key(seed, "order")) for seed in seeds]
        self.masks = [torch.Generator(x.device).manual_seed(key(seed, "masks")) for seed in seeds]
        self.order = torch.empty(self.splits, self.rows, device=x.device)
        width = sum(plan.hidden) if self.masked else 0
        self.numbers = torch.empty(self.splits, self.rows, width, device=x.device)
        self.xs, self.ys = torch.empty_like(x), torch.empty_like(y)
        self.snapshots: list[list[Layer]] = []

    @property
    def masked(self) -> bool:
        """Return True if any member has masks."""
        return any(self.plan.rates)

    def run(self) -> list[Layer]:
        """Train for all epochs; return the layers at their end."""
        replay: Callable[[], None] | None = None
        remembered = _last_quarter(self.plan)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for epoch in range(self.plan.epochs):
            self._draw()
            if replay is not None:
                replay()
            elif self.x.is_cuda and self.plan.epochs > 2:
                replay = self._captured()
            else:
                self._epoch()
            if self.x.is_cuda and epoch % 8 == 0:
                torch.cuda.synchronize()
            if epoch in remembered:
                self.snapshots.append(self._now())
            self.tick(self.splits * self.rows)
        return self._now()

    def _now(self) -> list[Layer]:
        return [Layer(layer.weight.detach().clone(), layer.bias.detach().clone()) for layer in self.layers]

    def _draw(self) -> None:
        """Draw the epoch's order of the rows and its uniform numbers, in (0, 1]."""
        for row, generator in zip(self.order, self.orders, strict=True):
            row.uniform_(generator=generator)
        if self.masked:
            for block, generator in zip(self.numbers, self.masks, strict=True):
                block.uniform_(generator=generator)
            self.numbers.neg_().add_(1)
        order = self.order.argsort(1)
        torch.gather(self.x, 1, order[..., None].expand_as(self.x), out=self.xs)
        torch.gather(self.y, 1, order, out=self.ys)

    def _captured(self) -> Callable[[], None]:
        """Run the first epoch, then record the next ones' work, without running it, as a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._epoch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._epoch()
        replay: Callable[[], None] = graph.replay
        return replay

    def _epoch(self) -> None:
        for start in range(0, self.rows, self.plan.batch):
            loss = self._loss(slice(start, min(start + self.plan.batch, self.rows)))
            for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, self.parameters), strict=True):
                parameter.grad.copy_(gradient)  # type: ignore[union-attr]
            self.optimiser.step()

    def _loss(self, rows: slice) -> Tensor:
        """Return the sum of all members' losses on some rows."""
        each, at = len(self.plan.rates), 0
        a = self.xs[:, rows].repeat_interleave(each, 0)
        for site, layer in enumerate(self.layers[:-1]):
            a = layer(a).relu()
            if self.masked:
                a = a * self._mask(site, self.numbers[:, rows, at : at + a.shape[2]])
                at += a.shape[2]
        return self._losses(self.layers[-1](a), self.ys[:, rows].repeat_interleave(each, 0)).mean(1).sum()

    def _mask(self, site: int, numbers: Tensor) -> Tensor:
        """Return masks `(members, batch, units)` of a site from numbers `(splits, batch, units)`."""
        return ((numbers[:, None] > self.rates) / (1 - self.rates)).flatten(0, 1)

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every row, `(members, batch)`."""
        return (output[..., 0] - target).square()


def _initial_layers(sizes: Sequence[int], seeds: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return weights `(splits, inputs, outputs)` and biases `(splits, 1, outputs)` of each layer."""
    members = zip(*(initial(sizes, seed) for seed in seeds), strict=True)
    return [(torch.stack([w for w, _ in same]), torch.stack([b[None] for _, b in same])) for same in members]


def _last_quarter(plan: Plan) -> set[int]:
    """`plan.snapshots` epochs of the last quarter, fewer where it is shorter, the last one among them."""
    if not plan.snapshots:
        return set()
    count = min(plan.snapshots, max(2, plan.epochs // 4), plan.epochs)
    first = plan.epochs - max(count, plan.epochs // 4)
    return {round(first + (plan.epochs - 1 - first) * index / max(1, count - 1)) for index in range(count)}


_TEMPERATURE = 0.1
_LENGTH = 1e-2
_LEARNING_RATE = 1e-2
_FIRST_RATE = 0.1


class ConcreteTraining(Training):
    """As the other stacks, with more parameters for each member: `logit p` of every site, and `log s2`."""

    masked = True
    own: Tensor

    def __init__(self, x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], tick: Callable[[int], object]) -> None:
        super().__init__(x, y, plan, seeds, tick)
        first = math.log(_FIRST_RATE / (1 - _FIRST_RATE))
        start = torch.tensor([first] * len(plan.hidden) + [0.0], device=x.device)
        self.own = start[:, None].repeat(1, len(x)).requires_grad_()
        self.parameters.append(self.own)
        self.optimiser.add_param_group({"params": [self.own], "lr": _LEARNING_RATE})

    def _draw(self) -> None:
        super()._draw()
        self.numbers.logit_(eps=1e-6)

    def _mask(self, site: int, numbers: Tensor) -> Tensor:
        theta = self.own[site, :, None, None]
        return (1 - ((theta + numbers) / _TEMPERATURE).sigmoid()) * (1 + theta.exp())  # 1 / (1 - rate)

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        log_noise = self.own[-1, :, None]
        return (super()._losses(output, target) * (-log_noise).exp() + log_noise) / 2

    def _loss(self, rows: slice) -> Tensor:
        rate = self.own[:-1].sigmoid()
        (first, *others), prior = self.layers, _LENGTH**2 / (2 * self.rows)
        penalty = prior * (first.weight.square().sum() + first.bias.square().sum())
        for site, (p, layer) in enumerate(zip(rate, others, strict=True)):
            penalty = penalty + prior * (layer.weight.square().sum((1, 2)) / (1 - p)).sum()
            entropy = torch.special.entr(p) + torch.special.entr(1 - p)
            penalty = penalty - self.plan.hidden[site] / self.rows * entropy.sum()
        return super()._loss(rows) + penalty


_LIMIT = 12.0


class GaussianTraining(Training):
    """As the other stacks, with two outputs."""

    outputs = 2

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = output.unbind(2)
        # Within bounds, so that one far row cannot overflow the others' gradient; the gradient passes them.
        bounded = log_variance + (log_variance.clamp(-_LIMIT, _LIMIT) - log_variance).detach()
        return ((target - mean).square() * (-bounded).exp() + bounded) / 2


def heads(member: Member, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance `(n,)` of a Gaussian head."""
    weight, bias = member[-1]
    mean, log_variance = (hidden_units(member, x)[-1] @ weight + bias).unbind(1)
    return mean, log_variance.clamp(-_LIMIT, _LIMIT).exp()
