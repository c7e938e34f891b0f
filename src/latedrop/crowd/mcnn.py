"""MCNN, a people counter, and its weights on disk.

Three columns of convolutions with kernels of three sizes see people of three sizes; a 1x1 convolution fuses their 30
channels to one density map at a quarter of the frame's resolution, whose sum is the count (Zhang et al. 2016).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.files import write_aside
from latedrop.records import Fields, number, or_none, parsed, text, whole
from latedrop.terminal import need

__all__ = ["MCNN", "STRIDE", "Trained", "load_weights", "save_weights", "shipped"]

STRIDE = 4
"""Pixels of the frame on each side of a cell of the density map."""
_COLUMNS = ((9, 7, (16, 32, 16, 8)), (7, 5, (20, 40, 20, 10)), (5, 3, (24, 48, 24, 12)))
_SHIPPED = Path(__file__).parent / "weights"
_KEY = "latedrop"


class MCNN(nn.Module):
    """The multi-column network: frames `(N, C, H, W)` in [0, 1] to density maps `(N, 1, H // 4, W // 4)`.

    Args:
        channels: 1 for grey frames, 3 for colour.
        rate: embedded dropout: in train mode, before every convolution but the first of each column. In eval mode
            the network is the plain one; `latedrop.sample` at the same rate gives its draws.

    >>> MCNN()(torch.rand(2, 1, 64, 96)).shape
    torch.Size([2, 1, 16, 24])
    """

    unit: Tensor

    def __init__(self, channels: int = 1, *, rate: float = 0.0) -> None:
        super().__init__()
        self.channels, self.rate = channels, rate
        self.columns = nn.ModuleList(_column(channels, *column) for column in _COLUMNS)
        self.fuse = nn.Conv2d(30, 1, 1)
        # Densities are far below 1; the last layer works in hundredths of a person.
        self.register_buffer("unit", torch.tensor(0.01))

    def forward(self, x: Tensor) -> Tensor:
        """Density maps, people per cell."""
        x = 2 * x - 1
        columns = [self._run(column, x) for column in self.columns]
        density: Tensor = self.fuse(self._drop(torch.cat(columns, 1)))
        return self.unit * density

    def _run(self, column: nn.Module, x: Tensor) -> Tensor:
        for index, layer in enumerate(column.children()):
            x = layer(self._drop(x) if index and isinstance(layer, nn.Conv2d) else x)
        return x

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate) if self.training and self.rate else x


def _column(channels: int, first: int, size: int, widths: tuple[int, int, int, int]) -> nn.Sequential:
    a, b, c, d = widths
    return nn.Sequential(
        nn.Conv2d(channels, a, first, padding=first // 2),
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


@dataclass(frozen=True)
class Trained:
    """A trained network and what it was trained for.

    Attributes:
        model: in eval mode.
        roi: cells of the density map that count, bool `(h, w)`; None: all.
        about: how it was made: `set`, `sigma`, `rate`, `seed`, ...; plain JSON.
    """

    model: MCNN
    roi: Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def enlarge(self) -> int:
        """How many times larger than in their files the network was shown its frames."""
        return int(self.about.get("enlarge", 1))

    def masked(self, density: Tensor) -> Tensor:
        """The map with zeros outside the region of interest, `(N, 1, h, w)`."""
        if self.roi is None:
            return density
        if density.shape[-2:] != self.roi.shape:
            h, w = self.roi.shape
            raise DataError(
                f"expected frames whose map has the {h} x {w} cells of the region of interest, about {h * STRIDE} x "
                f"{w * STRIDE} pixels; found {' x '.join(map(str, density.shape[-2:]))} cells. Resize the frames, or "
                "use weights without a region of interest."
            )
        return density * self.roi.to(density)

    def count_of(self, density: Tensor) -> Tensor:
        """The readout for counts: people inside the region of interest, `(N,)`."""
        return self.masked(density).sum((1, 2, 3))

    def both(self, density: Tensor) -> Tensor:
        """The readout for maps and counts: the flat map, and the count last, `(N, h w + 1)`."""
        flat = self.masked(density).flatten(1)
        return torch.cat([flat, flat.sum(1, keepdim=True)], 1)


def save_weights(path: str | os.PathLike[str], trained: Trained) -> None:
    """Write a network as safetensors: its tensors, the region of interest, and `about` as metadata."""
    need("crowd", "safetensors")
    import safetensors.torch

    tensors = {name: value.detach().cpu().contiguous() for name, value in trained.model.state_dict().items()}
    if trained.roi is not None:
        tensors["roi"] = trained.roi.cpu().to(torch.uint8)
    about = {"network": "mcnn", "channels": trained.model.channels, **trained.about}
    write_aside(path, safetensors.torch.save(tensors, {_KEY: json.dumps(about)}))


def load_weights(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Trained:
    """Read what `save_weights` wrote; nothing is unpickled.

    Raises:
        FileError: no such file, not safetensors, or the weights of another architecture.
    """
    need("crowd", "safetensors")
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileError(f"expected weights at {path}; there is no such file. Shipped names: {_shipped_names()}.")
    try:
        with safe_open(path, "pt") as file:
            about = _about((file.metadata() or {}).get(_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except DataError as error:
        raise FileError(f"{path}: {error}") from error
    except (SafetensorError, OSError) as error:
        raise FileError(f"expected a safetensors file at {path}; {error}. Use what `crowd train` wrote.") from error
    roi = tensors.pop("roi", None)
    with torch.random.fork_rng(devices=[]):  # initial weights that are thrown away should not move the caller's dice
        model = MCNN(about.get("channels", 1))
    _check(tensors, model.state_dict(), path)
    model.load_state_dict(tensors)
    return Trained(model.eval().to(device), None if roi is None else roi.bool().to(device), about)


def shipped(name: str, suffix: str = ".safetensors") -> Path:
    """The path of weights, or of another file beside them, that come with the package.

    Raises:
        ArgumentError: no weights of that name.
    """
    path = _SHIPPED / f"{name}{suffix}"
    if not path.is_file():
        raise ArgumentError(f"expected the name of shipped weights, one of {_shipped_names()}; found {name!r}.")
    return path


def _about(content: str) -> dict[str, Any]:
    """How weights were made; `DataError` where a field that is used later is not as it should be."""
    about: dict[str, Any] = parsed(content, "what weights say about themselves", "Use what `crowd train` wrote.")
    fields = Fields(about, "about")
    fields.maybe("channels", 1, whole, least=1, most=3)
    fields.maybe("enlarge", 1, whole, least=1, most=64)
    fields.maybe("sigma", 1.0, number, least=1e-6, most=1e6)
    fields.maybe("set", None, or_none(text))
    return about


def _shipped_names() -> str:
    return ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.safetensors"))) or "none"


def _check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless both have the same names and shapes."""
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    other = [n for n in expected.keys() & found.keys() if expected[n].shape != found[n].shape]
    if missing or extra or other:
        said = [
            f"{label} {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
            for label, names in (("missing", missing), ("unknown", extra), ("of another shape", other))
            if names
        ]
        raise FileError(
            f"expected the weights of an MCNN in {path}; found those of another architecture: {'; '.join(said)}. "
            "Use what `crowd train` wrote."
        )
