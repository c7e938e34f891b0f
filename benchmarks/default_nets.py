"""Small networks trained side by side: multilayer perceptrons with three hidden layers, as one stack.

Each member has rows of its own. A step takes a batch by chance from each member's rows; Adam with a learning rate that
falls along a cosine; of every member the weights with the smallest error on its stopping rows are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

HIDDEN = (50, 50, 50)
STEPS = 3000
BATCH = 64
LEARNING_RATE = 2e-3
_LOOK = 50  # steps between two looks at the stopping rows

Part = tuple[Tensor, Tensor]
Job = tuple[Part, Part]
"""`(x, y)` to fit and `(x, y)` to stop by, of one member."""


def trained(
    jobs: Sequence[Job],
    seed: int,
    *,
    steps: int = STEPS,
    hidden: Sequence[int] = HIDDEN,
    learning_rate: float = LEARNING_RATE,
    device: str = "cpu",
) -> list[nn.Sequential]:
    """One network for each job, on the CPU; all have the same number of inputs."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (jobs[0][0][0].shape[1], *hidden, 1)
    parameters = [
        ((2 * torch.rand(len(jobs), *shape, generator=generator) - 1) / math.sqrt(a)).to(device).requires_grad_(True)
        for a, b in pairwise(sizes)
        for shape in ((a, b), (1, b))
    ]
    x, y, counts = _stacked([job[0] for job in jobs], device)
    x_stop, y_stop, stop_counts = _stacked([job[1] for job in jobs], device)
    real = torch.arange(x_stop.shape[1], device=device)[None] < stop_counts[:, None]
    optimiser = torch.optim.Adam(parameters, learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    best, kept = torch.full((len(jobs),), math.inf, device=device), [p.detach().clone() for p in parameters]
    members = torch.arange(len(jobs), device=device)[:, None]
    for step in range(steps):
        rows = (torch.rand(len(jobs), BATCH, generator=generator).to(device) * counts[:, None]).long()
        optimiser.zero_grad()
        loss = (_output(parameters, x[members, rows]) - y[members, rows]).square().mean(1).sum()
        loss.backward()
        optimiser.step()
        schedule.step()
        if (step + 1) % _LOOK == 0 or step + 1 == steps:
            with torch.no_grad():
                error = (_output(parameters, x_stop) - y_stop).square()
                now = torch.where(real, error, 0).sum(1) / stop_counts
                better = now < best
                best = torch.where(better, now, best)
                for old, new in zip(kept, parameters, strict=True):
                    old[better] = new.detach()[better]
    return [_module([p[i] for p in kept]) for i in range(len(jobs))]


def _output(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    for i in range(0, len(parameters), 2):
        x = torch.baddbmm(parameters[i + 1], x.relu() if i else x, parameters[i])
    return x[..., 0]


def _stacked(parts: Sequence[Part], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all members in one tensor, filled up with zeros, and how many are real."""
    x, y = (nn.utils.rnn.pad_sequence([part[i] for part in parts], batch_first=True) for i in range(2))
    return x.to(device), y.to(device), torch.tensor([len(part[0]) for part in parts], device=device)


def _module(parameters: Sequence[Tensor]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        linear = nn.Linear(*weight.shape)
        with torch.no_grad():
            linear.weight.copy_(weight.T)
            linear.bias.copy_(bias[0])
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()
