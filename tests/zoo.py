"""Small models of many kinds, with the sites that each must have. Random weights, no dropout injected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from networks import Net


@dataclass(frozen=True)
class Case:
    """A model of the zoo, inputs of six rows for it, and what `find_sites` must return."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    sites: tuple[str, ...]
    readout: Any = None

    def make(self) -> tuple[nn.Module, Any]:
        """The model in eval mode and its inputs, from a fixed seed, leaving the global random state alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    nn.init.normal_(module.running_mean)
                    nn.init.uniform_(module.running_var, 0.5, 2)
            return model.eval(), self.inputs()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def batchnorm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 1),
    )


def residual() -> nn.Module:
    """A residual CNN whose skip adds in place."""

    def run(net: Net, x: Tensor) -> Tensor:
        skip = net.stem(x).relu()
        y = net.conv2(net.norm1(net.conv1(skip)).relu())
        y += skip
        return net.head(y.relu().mean((2, 3)))

    stem, first, second = (nn.Conv2d(channels, 8, 3, padding=1) for channels in (3, 8, 8))
    return Net(run, stem=stem, conv1=first, norm1=nn.BatchNorm2d(8), conv2=second, head=nn.Linear(8, 1))


def unet() -> nn.Module:
    """Down, up with a transposed convolution, and a concatenated skip: a map comes out."""

    def run(net: Net, x: Tensor) -> Tensor:
        high = net.down1(x).relu()
        low = net.down2(nn.functional.max_pool2d(high, 2)).relu()
        return net.out(net.merge(torch.cat([high, net.up(low)], 1)).relu())

    down = {"down1": nn.Conv2d(1, 6, 3, padding=1), "down2": nn.Conv2d(6, 12, 3, padding=1)}
    up = {"up": nn.ConvTranspose2d(12, 6, 2, stride=2), "merge": nn.Conv2d(12, 6, 3, padding=1)}
    return Net(run, **down, **up, out=nn.Conv2d(6, 1, 1))


def columns() -> nn.Module:
    """Three columns on the same image, as in MCNN: three first layers."""

    def column(width: int, size: int) -> nn.Module:
        first, second = nn.Conv2d(1, width, size, padding=size // 2), nn.Conv2d(width, 4, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU())

    def run(net: Net, x: Tensor) -> Tensor:
        return net.fuse(torch.cat([column(x) for column in net.columns], 1))

    return Net(run, columns=nn.ModuleList([column(4, 7), column(5, 5), column(6, 3)]), fuse=nn.Conv2d(12, 1, 1))


def forecaster() -> nn.Module:
    """An LSTM over a convolved series, so that the recurrent layer is a site too."""

    def run(net: Net, x: Tensor) -> Tensor:
        states, _ = net.lstm(net.conv(x).transpose(1, 2))
        return net.head(states[:, -1])

    return Net(run, conv=nn.Conv1d(2, 6, 3, padding=1), lstm=nn.LSTM(6, 8, batch_first=True), head=nn.Linear(8, 1))


def time_major() -> nn.Module:
    """A GRU that holds time first inside and folds time and examples together, time outermost."""

    def run(net: Net, x: Tensor) -> Tensor:
        states, _ = net.gru(net.embed(x).transpose(0, 1))
        steps, rows, width = states.shape
        return net.head(states.reshape(steps * rows, width)).view(steps, rows, 1).mean(0)

    return Net(run, embed=nn.Linear(3, 6), gru=nn.GRU(6, 8), head=nn.Linear(8, 1))


def encoder() -> nn.Module:
    """Tokens, an embedding and two transformer encoder layers, which have a fused path in eval mode."""

    def run(net: Net, tokens: Tensor) -> Tensor:
        return net.head(net.encoder(net.embed(tokens)).mean(1))

    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    return Net(run, embed=nn.Embedding(20, 8), encoder=layers, head=nn.Linear(8, 1))


class Attention(nn.Module):
    """Cross attention between two sequences, batch second, as `nn.MultiheadAttention` has it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 8)
        self.right = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        query, memory = self.left(left).transpose(0, 1), self.right(right).transpose(0, 1)
        mixed, _ = self.attention(query=query, key=memory, value=memory)
        return self.head(mixed.mean(0))


def reused() -> nn.Module:
    """One hidden layer applied three times."""

    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x).relu()
        for _ in range(3):
            h = net.again(h).relu()
        return net.head(h)

    return Net(run, first=nn.Linear(5, 16), again=nn.Linear(16, 16), head=nn.Linear(16, 1))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))


def multi_output() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 3))


class DictModel(nn.Module):
    """Takes one dict, gives one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 4, 3)
        self.table = nn.Linear(3, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        image = self.image(batch["image"]).relu().mean((2, 3))
        hidden = torch.cat([image, self.table(batch["table"]).relu()], 1)
        return {"prediction": self.head(hidden), "hidden": hidden}


def volume_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv3d(4, 2, 2, stride=2),
        nn.Flatten(),
        nn.Linear(16, 1),
    )


ZOO = [
    Case("mlp", mlp, lambda: torch.randn(6, 5), ("2", "4")),
    Case("batchnorm_cnn", batchnorm_cnn, lambda: torch.randn(6, 3, 8, 8), ("4", "9")),
    Case("residual_cnn", residual, lambda: torch.randn(6, 3, 8, 8), ("conv1", "conv2", "head")),
    Case("unet", unet, lambda: torch.randn(6, 1, 8, 8), ("down2", "up", "merge", "out")),
    Case("columns", columns, lambda: torch.randn(6, 1, 8, 8), ("columns.0.3", "columns.1.3", "columns.2.3", "fuse")),
    Case("lstm", forecaster, lambda: torch.randn(6, 2, 7), ("lstm", "head")),
    Case("time_major_gru", time_major, lambda: torch.randn(6, 7, 3), ("gru", "head")),
    Case(
        "transformer",
        encoder,
        lambda: torch.randint(20, (6, 5)),
        (
            "encoder.layers.0.self_attn",
            "encoder.layers.0.linear1",
            "encoder.layers.0.linear2",
            "encoder.layers.1.self_attn",
            "encoder.layers.1.linear1",
            "encoder.layers.1.linear2",
            "head",
        ),
    ),
    Case("attention", Attention, lambda: (torch.randn(6, 3, 4), torch.randn(6, 5, 4)), ("attention", "head")),
    Case("reused", reused, lambda: torch.randn(6, 5), ("again", "head")),
    Case("with_dropout", with_dropout, lambda: torch.randn(6, 5), ("3", "5")),
    Case("multi_output", multi_output, lambda: torch.randn(6, 5), ("2",)),
    Case(
        "dict_input",
        DictModel,
        lambda: {"image": torch.randn(6, 1, 5, 5), "table": torch.randn(6, 3)},
        ("head",),
        readout="prediction",
    ),
    Case("volume_cnn", volume_cnn, lambda: torch.randn(6, 1, 4, 4, 4), ("3", "5")),
]
