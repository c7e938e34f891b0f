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
