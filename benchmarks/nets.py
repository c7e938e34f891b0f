"""The networks that the benchmarks run, briefly trained on made-up tasks so that their weights are not noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Net:
    """A network, a maker of inputs and targets of `rows` examples, and how to read the output."""

    name: str
    build: Callable[[], nn.Module]
    task: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    readout: Callable[[Any], Tensor] | None
    rows: int
    steps: int = 150

    def trained(self, device: torch.device, seed: int = 0) -> nn.Module:
        """The network after a few hundred steps of Adam, without dropout."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().to(device)
        generator = torch.Generator().manual_seed(seed + 1)
        optimiser = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(self.steps):
            x, y = (t.to(device) for t in self.task(min(self.rows, 32), generator))
            output = model(x)
            loss = ((output if self.readout is None else self.readout(output)).flatten() - y).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return model.eval().requires_grad_(False)


class Residual(nn.Module):
    """A stem, residual blocks with BatchNorm, a linear head."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        for block in self.blocks:
            h = (h + block(h)).relu()
        return self.head(h.mean((2, 3)))


class Encoder(nn.Module):
    """A transformer encoder over real-valued tokens."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class MCNN(nn.Module):
    """Three columns of convolutions, fused to a density map at a quarter of the resolution (Zhang et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        columns = ((9, 7, (16, 32, 16, 8)), (7, 5, (20, 40, 20, 10)), (5, 3, (24, 48, 24, 12)))
        self.columns = nn.ModuleList(self._column(*column) for column in columns)
        self.fuse = nn.Conv2d(30, 1, 1)

    @staticmethod
    def _column(first: int, size: int, widths: tuple[int, int, int, int]) -> nn.Sequential:
        a, b, c, d = widths
        return nn.Sequential(
            nn.Conv2d(1, a, first, padding=first // 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(a, b, size, padding=size // 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(b, c, size, padding=size // 2),
            nn.ReLU(),
            nn.Conv2d(c, d, size, padding=size // 2),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse(torch.cat([column(x) for column in self.columns], 1))


def count(output: Tensor) -> Tensor:
    """The sum of a density map."""
    return output.sum((1, 2, 3))


def table_task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 64, generator=generator)
    return x, x[:, 0] * x[:, 1] + x[:, 2].sin() + x[:, 3].abs()


def image_task(side: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        strength = 0.2 + 2 * torch.rand(rows, 1, 1, 1, generator=generator)
        x = torch.randn(rows, 3, side, side, generator=generator) * strength
        return x, strength.flatten() + x.mean((1, 2, 3))

    return task


def token_task(length: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, length, 16, generator=generator)
        x = x + torch.randn(rows, 1, 16, generator=generator)
        return x, x[..., 0].mean(1) * x[..., 1].mean(1) + x[..., 2].amax(1)

    return task


def crowd_task(height: int, width: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    """Bright spots on noise; the count is what is asked for."""

    def task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        heads = torch.randint(0, 30, (rows,), generator=generator)
        x = 0.1 * torch.randn(rows, 1, height, width, generator=generator)
        for image, number in zip(x, heads.tolist(), strict=True):
            for _ in range(number):
                top = int(torch.randint(0, height - 4, (), generator=generator))
                left = int(torch.randint(0, width - 4, (), generator=generator))
                image[0, top : top + 4, left : left + 4] += 1
        return x, heads.float()

    return task


def nets(size: str) -> list[Net]:
    """The four networks: `small` to judge the variance by, `cpu` and `gpu` to fill such a machine."""
    if size == "small":
        return [
            Net("mlp", lambda: _mlp(64), table_task, None, 200),
            Net("residual_cnn", lambda: Residual(12, 2), image_task(10), None, 100),
            Net("transformer", lambda: Encoder(32, 2), token_task(8), None, 100),
            Net("mcnn_count", MCNN, crowd_task(32, 40), count, 60),
        ]
    large = size == "gpu"
    return [
        Net("mlp", lambda: _mlp(2048 if large else 512), table_task, None, 65536 if large else 4096, 0),
        Net("residual_cnn", lambda: Residual(128 if large else 32, 3), image_task(32), None, 256 if large else 16, 0),
        Net("transformer", lambda: Encoder(512 if large else 128, 4), token_task(128), None, 128 if large else 8, 0),
        Net("mcnn_count", MCNN, crowd_task(480, 640) if large else crowd_task(240, 320), count, 8 if large else 1, 0),
    ]


def _mlp(width: int) -> nn.Module:
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))
