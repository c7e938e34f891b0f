"""Networks that nothing here was tuned for, in the sizes in which they are known, with one output: own definitions.

ResNet-50, ConvNeXt-T, an encoder of BERT's base size, a U-Net whose map is summed, an MLP-Mixer. `small` ones have the
same parts and fewer of them, for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Architecture:
    """A network, inputs of so many rows, the many rows of a large batch, and what of its output is read."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    many: int
    readout: Callable[[Tensor], Tensor] | None = None

    def made(self, device: torch.device, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().eval().requires_grad_(False)
        return model.to(device)

    def rows(self, count: int, device: torch.device, seed: int = 0) -> Tensor:
        return self.inputs(count, torch.Generator().manual_seed(seed)).to(device)


class Bottleneck(nn.Module):
    """Three convolutions around a way past."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_normed(inputs, width, 1),
            nn.ReLU(),
            *_normed(width, width, 3, stride),
            nn.ReLU(),
            *_normed(width, 4 * width, 1),
        )
        other = stride > 1 or inputs != 4 * width
        self.past = nn.Sequential(*_normed(inputs, 4 * width, 1, stride)) if other else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.past(x)).relu()


class ResNet(nn.Module):
    """A ResNet of bottlenecks."""

    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normed(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not number else 1))
                inputs = 4 * width * 2**stage
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class ChannelNorm(nn.LayerNorm):
    """Over the channels of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    """Depthwise convolution, norm, two layers, a scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.second(F.gelu(self.first(h)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, depths: tuple[int, ...], widths: tuple[int, ...]) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if number:
                stages += [ChannelNorm(widths[number - 1]), nn.Conv2d(widths[number - 1], width, 2, 2)]
            stages += [NextBlock(width) for _ in range(depth)]
        self.stages, self.norm, self.head = nn.Sequential(*stages), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(x).mean((2, 3))))


class Attention(nn.Module):
    """Attention and a two-layer network, each followed by a norm, as BERT has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.second(F.gelu(self.first(x))))


class Bert(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, length: int, words: int = 30522) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm, self.blocks = nn.LayerNorm(width), nn.Sequential(*(Attention(width, heads) for _ in range(depth)))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.pooler(self.blocks(self.norm(h))[:, 0]).tanh())


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, with ways across."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(_twice(before, after) for before, after in zip([3, *widths], widths, strict=False))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, 2) for below, above in pairs)
        self.joined = nn.ModuleList(_twice(2 * above, above) for _, above in pairs)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            across.append(x)
        for up, joined, other in zip(self.up, self.joined, across[-2::-1], strict=True):
            x = joined(torch.cat([up(x), other], 1))
        return self.last(x)


class Mixing(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, width // 2), nn.GELU(), nn.Linear(width // 2, tokens))
        self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, side: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        tokens = (side // patch) ** 2
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.blocks, self.norm = nn.Sequential(*(Mixing(tokens, width) for _ in range(depth))), nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x).flatten(2).transpose(1, 2))).mean(1))


def architectures(small: bool = False) -> list[Architecture]:
    """Those of the module's docstring, and a wide MLP."""
    side, length = (64, 32) if small else (224, 128)
    pictures = _pictures(side)
    depths = (1, 1, 1, 1) if small else (3, 4, 6, 3)
    return [
        Architecture("resnet50", lambda: ResNet(depths, 16 if small else 64), pictures, 4 if small else 32),
        Architecture(
            "convnext_t",
            lambda: ConvNeXt(
                (1, 1, 2, 1) if small else (3, 3, 9, 3), (24, 48, 96, 192) if small else (96, 192, 384, 768)
            ),
            pictures,
            4 if small else 32,
        ),
        Architecture(
            "bert_base",
            lambda: Bert(2, 96, 4, length, 1000) if small else Bert(12, 768, 12, length),
            lambda rows, generator: torch.randint(0, 1000, (rows, length), generator=generator),
            4 if small else 32,
        ),
        Architecture("unet", lambda: UNet(8 if small else 32, 3 if small else 5), pictures, 2 if small else 8, summed),
        Architecture(
            "mixer",
            lambda: Mixer(side, 16, 64 if small else 512, 2 if small else 8),
            pictures,
            4 if small else 64,
        ),
        Architecture(
            "wide_mlp",
            lambda: nn.Sequential(*_layers([64, *[256 if small else 2048] * 3])),
            lambda rows, generator: torch.randn(rows, 64, generator=generator),
            256 if small else 8192,
        ),
    ]


def summed(output: Tensor) -> Tensor:
    """The sum of a map."""
    return output.float().sum((1, 2, 3))


def _layers(widths: list[int]) -> list[nn.Module]:
    hidden = pairwise(widths)
    return [layer for before, after in hidden for layer in (nn.Linear(before, after), nn.ReLU())] + [
        nn.Linear(widths[-1], 1)
    ]


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def _twice(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(*_normed(inputs, outputs, 3), nn.ReLU(), *_normed(outputs, outputs, 3), nn.ReLU())


def _pictures(side: int) -> Inputs:
    return lambda rows, generator: torch.randn(rows, 3, side, side, generator=generator)
