"""The networks that the benchmarks run, how small ones are trained in seconds, and how rows are divided by chance."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor]  # inputs and targets
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


Task = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Net:
    """A network, a function that makes its inputs and targets, and how it is measured."""

    name: str
    build: Callable[[], nn.Module]  # with random weights, or those that come with a package
    task: Task  # from a number of rows and a generator
    readout: Callable[[Any], Tensor] | None = None  # None: the output itself
    rows: int = 0  # that a variance is judged on
    batches: dict[str, int] = field(default_factory=dict)  # rows that time and memory are measured with

    def built(self, device: torch.device, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(device)

    def trained(self, device: torch.device, seed: int = 0, steps: int = 150) -> nn.Module:
        """The network after some steps of Adam, without dropout."""
        model = self.built(device, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        optimiser = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(steps):
            x, y = (t.to(device) for t in self.task(min(self.rows, 32), generator))
            output = model(x)
            step(optimiser, squared_error(output if self.readout is None else self.readout(output), y))
        return model.eval().requires_grad_(False)

    def inputs(self, rows: int, device: torch.device, seed: int = 0) -> Tensor:
        return self.task(rows, torch.Generator().manual_seed(seed))[0].to(device)


class Residual(nn.Module):
    """A stem, residual blocks with BatchNorm, a linear head."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(*_layer(width), nn.ReLU(), *_layer(width)) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        for block in self.blocks:
            h = (h + block(h)).relu()
        return self.head(h.mean((2, 3)))


def _layer(width: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)


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


def count(output: Tensor) -> Tensor:
    return output.sum((1, 2, 3))


def table_task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 64, generator=generator)
    return x, x[:, 0] * x[:, 1] + x[:, 2].sin() + x[:, 3].abs()


def image_task(side: int) -> Task:
    def task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        strength = 0.2 + 2 * torch.rand(rows, 1, 1, 1, generator=generator)
        x = torch.randn(rows, 3, side, side, generator=generator) * strength
        return x, strength.flatten() + x.mean((1, 2, 3))

    return task


def token_task(length: int) -> Task:
    def task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, length, 16, generator=generator)
        x = x + torch.randn(rows, 1, 16, generator=generator)
        return x, x[..., 0].mean(1) * x[..., 1].mean(1) + x[..., 2].amax(1)

    return task


def crowd_task(height: int, width: int) -> Task:
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


def small_nets() -> list[Net]:
    """Return four networks that train in seconds, to judge a variance by."""
    return [
        Net("mlp", lambda: mlp(64, hidden=(64,) * 3), table_task, None, 200),
        Net("residual_cnn", lambda: Residual(12, 2), image_task(10), None, 100),
        Net("transformer", lambda: Encoder(32, 2), token_task(8), None, 100),
        Net("mcnn_count", _counter, crowd_task(32, 40), count, 60),
    ]


class ViT(nn.Module):
    """A vision transformer of plain linear layers; the mean of the tokens goes to one output."""

    def __init__(self, side: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class Block(nn.Module):
    """Attention and a two-layer network, each with a norm before and a way past."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Forecaster(nn.Module):
    """Two LSTM layers, each a module of its own, and a linear head on the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LSTM(16, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.first(x)
        steps, _ = self.second(steps)
        return self.head(steps[:, -1])


def uci_task(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 13, generator=generator)
    return x, x[:, 0] * x[:, 1] + x[:, 2].sin()


def speed_nets(kind: str) -> list[Net]:
    """The networks of the comparison in speed, sized for a `cpu` or a `gpu`.

    The large batch fills the machine. One frame of MCNN fills a CPU, so there is no larger batch there.
    """
    gpu = kind == "gpu"

    def batches(on_gpu: int, on_cpu: int | None) -> dict[str, int]:
        large = on_gpu if gpu else on_cpu
        return {"small": 1} if large is None else {"small": 1, "large": large}

    side, vit = (224, (224, 16, 384, 12, 6)) if gpu else (64, (64, 8, 128, 4, 4))
    return [
        Net("uci_mlp", lambda: mlp(13, hidden=(50,)), uci_task, batches=batches(65536, 4096)),
        Net("wide_mlp", lambda: mlp(64, hidden=(2048 if gpu else 512,) * 3), table_task, batches=batches(8192, 1024)),
        Net("residual_cnn", lambda: Residual(128 if gpu else 32, 3), image_task(32), batches=batches(64, 8)),
        Net("transformer", lambda: ViT(*vit), image_task(side), batches=batches(32, 8)),
        Net("mcnn", lambda: _counter("mall"), crowd_task(480, 640), batches=batches(8, None)),
        Net("lstm", lambda: Forecaster(256 if gpu else 64), token_task(96 if gpu else 48), batches=batches(1024, 64)),
    ]


def _counter(name: str | None = None) -> nn.Module:
    import latedrop_crowd as crowd  # not everybody who measures other networks has it

    return crowd.MCNN() if name is None else crowd.load_weights(crowd.shipped(name)).model
