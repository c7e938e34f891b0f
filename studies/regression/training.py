"""Many small networks trained at once: multilayer perceptrons as one stack of batched matrix products.

A stack has a member for each (split, rate): ReLU layers with dropout at its rate before every layer but the first,

    a_0 = x,   a_l = relu(a_{l-1} W_l + b_l) · keep_l,   y = a_L W / (1 - rate) + b,

its own rows, masks and Adam state. The mean squared errors of all members are independent of one another, so one
backward pass, written out by hand, gives every member's gradient. All parameters lie in one flat tensor: an
optimiser step is one fused Adam.

The result of a member does not depend on who is trained beside it. Initial weights, the order of the rows and the
numbers that masks are cut from come from generators seeded by the split alone. The rates of one split share
them, a paired comparison: they start from the same weights, see the same batches, and what a small rate drops
a larger one drops too. The last batch of an epoch is as large as what is left. On CUDA one epoch is a captured graph,
replayed; on the CPU a stack is trained in groups of splits that fit the cache, one thread for each. The numbers drawn
depend on the kind of device.

*Gaussian heads* (Nix and Weigend 1994) have the outputs (m, s), mean and log variance of the target, and
`loss = mean((y - m)^2 exp(-s) / 2 + s / 2)`.

*Concrete dropout* (Gal, Hron, Kendall 2017) learns the rates with the weights. A unit's mask is relaxed to
`m = (1 - q) / (1 - p)`, with `q = sigmoid((logit p + logit u) / 0.1)` and u uniform, which has a derivative by the
rate p. Each site s, before layer s + 1, has a rate of its own. With noise variance `s2` and prior weights of
standard deviation `1 / l`,

    loss = mean( e^2 / (2 s2) + log(s2) / 2 )
         + ( l^2 |W_1|^2 / 2 + sum_s ( l^2 |W_{s+1}|^2 / (2 (1 - p_s)) - H_s · entropy(p_s) ) ) / n

is the negative evidence bound per row of a network with H_s units at site s. The rates and the noise have a learning
rate of their own: at the study's small ones they would hardly leave where they start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor

from latedrop.devices import one_thread
from latedrop.errors import OutputError
from studies.regression.scores import Member, hidden_units

T = TypeVar("T")

_GROUP_FLOATS = 400_000
_LARGE = 2.0**100


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
    """

    layers: tuple[Layer, ...]
    splits: int
    rates: tuple[float, ...]
    snapshots: tuple[tuple[Layer, ...], ...] = ()

    def member(self, split: int, rate: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Weight `(inputs, outputs)` and bias `(outputs,)` of each layer of one network."""
        index = split * len(self.rates) + rate
        return _member(self.layers, index)

    def history(self, split: int, rate: int) -> list[tuple[tuple[Tensor, Tensor], ...]]:
        """Return one network at each snapshot."""
        index = split * len(self.rates) + rate
        return [_member(layers, index) for layers in self.snapshots]


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
    kind: type[Training] | None = None,
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

    def work(group: slice, report: Callable[[int], object]) -> list[list[Layer]]:
        training = (kind or Training)(x[group], y[group], plan, seeds[group], report)
        return [training.run(), *training.snapshots]

    groups = in_groups(work, x, width, tick)
    layers, *snapshots = (joined(same) for same in zip(*groups, strict=True))
    if not all(bool(torch.isfinite(layer.weight).all()) for layer in layers):
        raise OutputError("expected finite weights after training; found NaN or inf. Lower the learning rate.")
    return Stack(tuple(layers), len(x), plan.rates, tuple(map(tuple, snapshots)))


class Training:
    """One stack in training: its parameters, buffers and generators. `run` it once."""

    unit = _LARGE  # of the numbers that masks are cut from
    outputs = 1

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        plan: Plan,
        seeds: Sequence[int],
        tick: Callable[[int], object],
        *,
        masked: bool | None = None,
    ) -> None:
        self.plan, self.tick, device = plan, tick, x.device
        self.splits, self.rows, inputs = x.shape
        self.members = self.splits * len(plan.rates)
        # A column of ones makes the first bias a row of the first weight, and its gradient part of the same product.
        self.x, self.y = torch.cat([x, torch.ones_like(x[..., :1])], -1), y
        self.sizes = (inputs, *plan.hidden, self.outputs)
        self.flat, self.layers = self._drawn_weights(seeds)
        self.gradient = torch.zeros_like(self.flat)
        self.gradients = self._views(self.gradient)
        self.flat.grad = self.gradient
        self.optimiser = torch.optim.Adam([self.flat], lr=plan.learning_rate, fused=True, capturable=x.is_cuda)
        rates = torch.tensor(plan.rates, device=device)
        self.thresholds = rates.view(1, -1, 1, 1) * _LARGE
        self.inverse = (1 / (1 - rates)).repeat(self.splits).view(-1, 1, 1)
        self.masked = any(plan.rates) if masked is None else masked
        self.orders = [torch.Generator(device).manual_seed(key(seed, "order")) for seed in seeds]
        self.masks = [torch.Generator(device).manual_seed(key(seed, "masks")) for seed in seeds]
        self.order = torch.empty(self.splits, self.rows, device=device)
        self.numbers = torch.empty(self.splits, self.rows, sum(plan.hidden) if self.masked else 0, device=device)
        self.xs, self.ys = torch.empty_like(self.x), torch.empty_like(self.y)
        self.buffers: dict[tuple[int, int, str], Tensor] = {}
        self.snapshots: list[list[Layer]] = []

    def run(self) -> list[Layer]:
        """All epochs; the layers at their end."""
        replay: Callable[[], None] | None = None
        remembered = _last_quarter(self.plan)
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
        first, *others = self.layers
        weight = first[0].detach().clone()
        layers = [Layer(weight[:, :-1], weight[:, -1:])]
        return layers + [Layer(w.detach().clone(), b.detach().clone()) for w, b in others]

    def _drawn_weights(self, seeds: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        inputs, *others = self.sizes
        pairs = zip([inputs + 1, *others[:-1]], others, strict=True)
        count = self.members * sum(i * o + (o if n else 0) for n, (i, o) in enumerate(pairs))
        flat = torch.empty(count, device=self.x.device)
        views = self._views(flat)
        for split, seed in enumerate(seeds):
            members = slice(split * len(self.plan.rates), (split + 1) * len(self.plan.rates))
            for (weight, bias), (w, b) in zip(views, initial(self.sizes, seed), strict=True):
                if bias.numel():
                    weight[members], bias[members] = w.to(flat), b.to(flat)
                else:
                    weight[members] = torch.cat([w, b[None]]).to(flat)
        return flat, views

    def _views(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases as parts of the flat tensor; the first layer's bias is in its weight."""
        views, at = [], 0
        for index, (inputs, outputs) in enumerate(pairwise(self.sizes)):
            pair = []
            for rows in (inputs, 1) if index else (inputs + 1, 0):
                count = self.members * rows * outputs
                pair.append(flat[at : at + count].view(self.members, rows, outputs))
                at += count
            views.append((pair[0], pair[1]))
        return views

    def _draw(self) -> None:
        """The epoch's order of the rows and its uniform numbers, in (0, 1]."""
        for row, generator in zip(self.order, self.orders, strict=True):
            row.uniform_(generator=generator)
        if self.masked:
            for block, generator in zip(self.numbers, self.masks, strict=True):
                block.uniform_(generator=generator)
            self.numbers.neg_().add_(1)
            self.numbers.mul_(self.unit)
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
            self._step(slice(start, min(start + self.plan.batch, self.rows)))
            self.optimiser.step()

    def _step(self, rows: slice) -> None:
        """The gradient of every member's mean squared error on some rows."""
        batch, rates = rows.stop - rows.start, len(self.plan.rates)
        x = self._stacked(self.xs[:, rows], self._buffer(batch, self.sizes[0] + 1, "x"))
        activations, weights, at = [x], [self.layers[0][0]], 0
        for index, width in enumerate(self.plan.hidden):
            a, spare = self._buffer(batch, width, f"a{index}"), self._buffer(batch, width, f"g{index + 1}")
            if index:
                torch.baddbmm(self.layers[index][1], activations[-1], weights[-1], out=a)
            else:
                torch.bmm(x, weights[0], out=a)
            if self.masked:
                # Where a unit is dropped the difference is far below 0, and relu does the rest: no slow bool mask.
                numbers = self.numbers[:, None, rows, at : at + width]
                torch.sub(numbers, self.thresholds, out=spare.view(self.splits, rates, batch, width))
                torch.minimum(a, spare, out=a)
                at += width
            activations.append(a.relu_())
            weight = self.layers[index + 1][0]
            weights.append(weight * self.inverse if self.masked else weight)
        g = self._loss_gradient(torch.baddbmm(self.layers[-1][1], activations[-1], weights[-1]), rows)
        for index in range(len(self.layers) - 1, -1, -1):
            weight, bias = self.gradients[index]
            a = activations[index]
            torch.bmm(a.transpose(1, 2), g, out=weight)
            if index == 0:
                return
            if self.masked:
                weight.mul_(self.inverse)
            torch.sum(g, 1, keepdim=True, out=bias)
            # Each layer has its own buffer: a product must not be written over what it is made of.
            back = self._buffer(batch, a.shape[2], f"g{index}")
            if g.shape[2] == 1:
                torch.mul(g, weights[index].transpose(1, 2), out=back)
            else:
                torch.bmm(g, weights[index].transpose(1, 2), out=back)
            # The derivative of relu and the mask: what came out as 0 sends nothing back.
            g = torch.ops.aten.threshold_backward.grad_input(back, a, 0.0, grad_input=back)

    def _loss_gradient(self, output: Tensor, rows: slice) -> Tensor:
        """Of the mean squared error with respect to the output `(members, batch, 1)`."""
        batch = rows.stop - rows.start
        output.view(self.splits, -1, batch).sub_(self.ys[:, None, rows])
        return output.mul_(2 / batch)

    def _stacked(self, part: Tensor, out: Tensor) -> Tensor:
        """A split's rows for each of its members."""
        out.view(self.splits, -1, *part.shape[1:]).copy_(part[:, None])
        return out

    def _buffer(self, batch: int, width: int, name: str) -> Tensor:
        buffer = self.buffers.get((batch, width, name))
        if buffer is None:
            buffer = torch.empty(self.members, batch, width, device=self.x.device)
            self.buffers[batch, width, name] = buffer
        return buffer


def in_groups(
    work: Callable[[slice, Callable[[int], object]], T], x: Tensor, width: int, tick: Callable[[int], object]
) -> list[T]:
    """`work` on slices of the splits: all at once on CUDA; on the CPU as many as fit the cache, a thread for each.

    Args:
        work: is told which splits, and whom to tell of progress.
        x: `(splits, n, inputs)`.
        width: floats that a step needs for each split.
        tick: see `train`.
    """
    splits, threads = len(x), torch.get_num_threads()
    if x.is_cuda:
        return [work(slice(0, splits), tick)]
    count = math.ceil(splits / max(1, _GROUP_FLOATS // width))
    count = min(splits, math.ceil(count / threads) * threads)
    edges = [splits * index // count for index in range(count + 1)]
    stop = Event()
    report = _until(stop, tick)
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, slice(start, end), report) for start, end in pairwise(edges)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            # Ctrl-C reaches the main thread alone; the others end with their epoch.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def joined(groups: Sequence[Sequence[Layer]]) -> list[Layer]:
    """The layers of several groups of splits as those of one."""
    return [
        Layer(torch.cat([layer.weight for layer in same]), torch.cat([layer.bias for layer in same]))
        for same in zip(*groups, strict=True)
    ]


def _until(stop: Event, tick: Callable[[int], object]) -> Callable[[int], object]:
    def told(steps: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        tick(steps)

    return told


def _member(layers: Sequence[Layer], index: int) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple((layer.weight[index], layer.bias[index, 0]) for layer in layers)


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


@dataclass(frozen=True)
class Concrete:
    """Networks, and the rates `(splits, sites)` and noise variances of the standardised target `(splits,)` learned."""

    stack: Stack
    rate: Tensor
    noise: Tensor


def train_concrete(
    x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], *, tick: Callable[[int], object] = lambda rows: None
) -> Concrete:
    """Train one network for every split; the rates of `plan` are not looked at.

    Args:
        x: `(splits, n, inputs)`, float32, standardised.
        y: `(splits, n)`.
        plan: sizes and hyper-parameters.
        seeds: one for each split.
        tick: told the rows times splits that have been trained on.
    """

    def work(group: slice, report: Callable[[int], object]) -> tuple[list[Layer], Tensor]:
        training = _ConcreteTraining(x[group], y[group], plan, seeds[group], report)
        return training.run(), training.own.detach()

    groups = in_groups(work, x, plan.batch * max(plan.hidden), tick)
    *logits, log_noise = torch.cat([own for _, own in groups], 1)
    stack = Stack(tuple(joined([layers for layers, _ in groups])), len(x), (0.0,))
    return Concrete(stack, torch.stack(logits, 1).sigmoid(), log_noise.exp())


class _ConcreteTraining(Training):
    """As the other stacks, with more parameters for each member: `logit p` of every site, and `log s2`."""

    unit = 1.0

    def __init__(self, x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], tick: Callable[[int], object]) -> None:
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


def heads(member: Member, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance `(n,)` of a Gaussian head."""
    weight, bias = member[-1]
    mean, log_variance = (hidden_units(member, x)[-1] @ weight + bias).unbind(1)
    return mean, log_variance.clamp(-_LIMIT, _LIMIT).exp()
