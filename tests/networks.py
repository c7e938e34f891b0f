"""Small networks with the same weights in every test, and how they are trained."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Make linear layers of these widths from a seed; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), act())]
        return nn.Sequential(*layers[:-1])


def trained(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    rate: float,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> nn.Module:
    """Fit a network to all rows by Adam, and put it into eval mode."""
    optimiser = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model.eval()


def noisy(
    model: nn.Module, count: int = 60, seed: int = 0, noise: float = 0.3, inputs: int = 3, **kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return random inputs `(count, inputs)`, and a model's outputs with Gaussian noise; `dtype=` is that of both."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=dice, **kind)
    with torch.no_grad():
        y = model(x)
    return x, y + noise * torch.randn(y.shape, generator=dice, **kind)


class Net(nn.Module):
    """A network of named parts, run by a function of the network and its inputs; plain tensors are buffers."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Any, *more: Any) -> Any:
        return self.run(self, x, *more)


class Raw(nn.Module):
    """Three layers out of raw parameters: a function, an operator and a fused one."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(16, 5) / 2), nn.Parameter(torch.randn(16))
        self.w2, self.b2 = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8))
        self.w3, self.b3 = nn.Parameter(torch.randn(outputs, 8)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.w1, self.b1).relu()
        h = torch.tanh(h @ self.w2 + self.b2)
        return torch.addmm(self.b3, h, self.w3.t())
