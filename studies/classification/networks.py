"""The classifiers of the study: a small network without dropout, and the same with dropout in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from studies.classification.data import ImageSet

__all__ = ["BATCH", "CLASSES", "LEARNING_RATE", "drawn_logits", "features", "network", "plain_logits", "trained"]

CLASSES = 10
BATCH, LEARNING_RATE = 64, 1e-3
_WIDTH, _HIDDEN = 16, 64
_ROWS = 500  # that run at once


def network(item: ImageSet, shape: torch.Size, rate: float = 0.0) -> nn.Sequential:
    """Untrained, for images `(channels, height, width)`; with a rate, dropout before every layer but the first.

    That is where `latedrop` injects it. Before a convolution whole channels are dropped, as is usual in training.
    """
    if item.network == "mlp":
        size = shape.numel()
        layers = [nn.Flatten(), nn.Linear(size, _HIDDEN), nn.ReLU(), nn.Dropout(rate), nn.Linear(_HIDDEN, _HIDDEN)]
    else:
        w, quarter = _WIDTH, -(-shape[1] // 4) * -(-shape[2] // 4)
        layers = [nn.Conv2d(shape[0], w, 5, stride=2, padding=2), nn.ReLU(), nn.Dropout2d(rate)]
        layers += [nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(rate)]
        layers += [nn.Linear(2 * w * quarter, _HIDDEN)]
    layers += [nn.ReLU(), nn.Dropout(rate), nn.Linear(_HIDDEN, CLASSES)]
    kept = layers if rate else [layer for layer in layers if not isinstance(layer, (nn.Dropout, nn.Dropout2d))]
    return nn.Sequential(*kept)


def trained(
    item: ImageSet, x: Tensor, y: Tensor, seed: int, epochs: int, rate: float = 0.0, tick: Callable[[], object] = int
) -> nn.Sequential:
    """A network in eval mode, trained by Adam; global random state is left as it was."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        net = network(item, x.shape[1:], rate).to(x.device)
        optimiser = torch.optim.Adam(net.parameters(), LEARNING_RATE)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).to(x.device).split(BATCH):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimiser.step()
            tick()
    return net.eval()


@torch.no_grad()
def plain_logits(net: nn.Module, x: Tensor) -> Tensor:
    """`(N, K)` on the CPU, of the network as it is."""
    return torch.cat([net(part).cpu() for part in x.split(_ROWS)])


@torch.no_grad()
def drawn_logits(net: nn.Module, x: Tensor, draws: int, seed: int) -> Tensor:
    """`(draws, N, K)` on the CPU, of a network that was trained with dropout, its dropout on."""
    layers = [layer for layer in net.modules() if isinstance(layer, (nn.Dropout, nn.Dropout2d))]
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        try:
            for layer in layers:
                layer.train()
            return torch.stack([plain_logits(net, x) for _ in range(draws)])
        finally:
            net.eval()


@torch.no_grad()
def features(net: nn.Sequential, x: Tensor) -> Tensor:
    """What enters the last layer, and a 1, `(N, units + 1)` on the CPU."""
    found = torch.cat([net[:-1](part).cpu() for part in x.split(_ROWS)])
    return torch.cat([found, torch.ones_like(found[:, :1])], 1)
