"""Small networks that train in seconds, and rows that are divided by chance, for the benchmarks that need both."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor]
"""Inputs and targets."""
BATCH, LEARNING_RATE, HIDDEN = 64, 2e-3, (50, 50, 50)
_LOOK = 50  # steps between two looks at the stopping rows


def mlp(inputs: int, outputs: int = 1, hidden: Sequence[int] = (64, 64)) -> nn.Sequential:
    """Return a perceptron with random weights."""
    layers: list[nn.Module] = []
    for a, b in pairwise((inputs, *hidden, outputs)):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error; a single output may have a dimension of its own."""
    return (output.flatten() - y.flatten()).square().mean()


def interval_measures(low: Any, high: Any, y: Any, level: float) -> dict[str, float]:
    """Return the share of targets in intervals, their mean width, and the interval score of Winkler (1972)."""
    width, missed = high - low, (low - y).clip(0) + (y - high).clip(0)
    score = width + 2 / (1 - level) * missed
    return {
        "coverage": float((missed == 0).sum()) / max(1, len(y)),
        "width": float(width.mean()),
        "score": float(score.mean()),
    }


def calibration_error(p: Tensor, right: Tensor) -> float:
    """Return the mean distance of probability and share in 15 bins of as many rows."""
    ordered, order = p.sort()
    parts = zip(ordered.tensor_split(15), right[order].tensor_split(15), strict=True)
    return float(np.mean([abs(float(chance.mean() - share.mean())) for chance, share in parts]))


def random_batches(count: int, dice: torch.Generator, steps: int = 1000) -> list[Tensor]:
    """Draw the rows of each step."""
    return [torch.randint(count, (BATCH,), generator=dice) for _ in range(steps)]


def members(inputs: int, counts: Sequence[int], seed: int, steps: int) -> Iterator[tuple[nn.Sequential, Tensor]]:
    """Yield a perceptron and its batches for each number of rows, from one generator that draws for all at once."""
    dice = torch.Generator().manual_seed(seed)
    nets = [mlp(inputs, hidden=HIDDEN) for _ in counts]
    for layers in zip(*[net[::2] for net in nets], strict=True):
        a, b = layers[0].in_features, layers[0].out_features
        weights, biases = (torch.rand(len(nets), *shape, generator=dice) for shape in ((a, b), (b,)))
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            layer.weight.data = (2 * weight.T - 1).contiguous() / math.sqrt(a)
            layer.bias.data = (2 * bias - 1) / math.sqrt(a)
    rows = (torch.rand(steps, len(nets), BATCH, generator=dice) * torch.tensor(counts)[:, None]).long()
    yield from zip(nets, rows.unbind(1), strict=True)


def trained(
    net: nn.Module,
    rows: Rows,
    stop: Rows | None = None,
    *,
    batches: Sequence[Tensor] | Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = squared_error,
    decay: bool = True,
) -> nn.Module:
    """Take a step of Adam for each batch, at a rate that falls along a cosine or stays; return it in eval mode.

    With stopping rows the weights returned are those of the least loss on them.
    """
    optimiser = torch.optim.Adam(net.parameters(), LEARNING_RATE)
    steps = len(batches)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 0.0 if decay else LEARNING_RATE)
    least, best = math.inf, net.state_dict()
    for number, batch in enumerate(batches, 1):
        step(optimiser, loss(net(rows[0][batch]), rows[1][batch]))
        schedule.step()
        if stop is not None and (number % _LOOK == 0 or number == steps):
            with torch.no_grad():
                now = float(loss(net(stop[0]), stop[1]))
            if now < least:
                least, best = now, {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(best)
    return net.eval().requires_grad_(False)


def step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step down the gradient of a loss."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def divided(rows: Rows, seed: int, shares: Sequence[float]) -> list[Rows]:
    """Divide rows by chance."""
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
    ends = (np.cumsum(shares)[:-1] * len(order)).round().astype(int).tolist()
    return [(rows[0][part], rows[1][part]) for part in order.tensor_split(ends)]


def scaled(parts: Sequence[Rows], *, targets: bool = True) -> list[Rows]:
    """Standardise inputs, and targets unless these are labels, by the first rows."""
    moments = [(part.mean(0), part.std(0).clamp_min(1e-6)) for part in parts[0][: 1 + targets]]
    return [
        tuple((part - m) / s for part, (m, s) in zip(rows, moments, strict=False)) + rows[len(moments) :]
        for rows in parts
    ]


def fitted(net: nn.Module, rows: Rows, seed: int) -> nn.Module:
    """Train on nine tenths of the rows; the others say when to stop."""
    dice = torch.Generator().manual_seed(seed)
    stop, fit = torch.randperm(len(rows[0]), generator=dice).tensor_split([len(rows[0]) // 10])
    stop_rows, fit_rows = ((rows[0][part], rows[1][part]) for part in (stop, fit))
    return trained(net, fit_rows, stop_rows, batches=random_batches(len(fit), dice))
