"""Small networks with the same weights in every test, and how they are trained."""

from collections.abc import Callable
from itertools import pairwise

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
