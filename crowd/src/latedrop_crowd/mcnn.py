"""MCNN, a people counter, its weights on disk, and what any trained counter is to the rest of this room.

Three columns of convolutions with kernels of three sizes see people of three sizes; a 1x1 convolution fuses their 30
channels to one density map at a quarter of the frame's resolution, whose sum is the count (Zhang et al. 2016).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latedrop import Network
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.files import parsed, write_aside
from latedrop.records import Limits, checked
from latedrop_crowd.frames import RECEPTIVE_FIELD, check_size, enlarged

__all__ = ["MCNN", "STRIDE", "Trained", "as_counter", "faster", "load_weights", "save_weights", "shipped"]

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
    stride, least_side = STRIDE, RECEPTIVE_FIELD

    def __init__(self, channels: int = 1, *, rate: float = 0.0) -> None:
        super().__init__()
        self.channels, self.rate = channels, rate
        self.columns = nn.ModuleList(_column(channels, *column) for column in _COLUMNS)
        self.fuse = nn.Conv2d(30, 1, 1)
        # Densities are far below 1; the last layer works in hundredths of a person.
        self.register_buffer("unit", torch.tensor(0.01))

    def forward(self, x: Tensor) -> Tensor:
        """Compute density maps `(N, 1, h, w)` in people per cell."""
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
        model: in eval mode: frames `(N, C, H, W)` in [0, 1] to density maps `(N, 1, h, w)`.
        roi: cells of the density map that count, bool `(h, w)`; None: all.
        about: how it was made: `set`, `sigma`, `rate`, `seed`, ...; plain JSON.
    """

    model: nn.Module
    roi: Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> Network:
        """The private copy of the model that counts, made once; again where its tensors were moved or replaced."""
        before = self.__dict__.get("_network")
        network = Network(self.model) if before is None else before.current()
        object.__setattr__(self, "_network", network)
        return network

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_network"}  # a copy makes its own

    @property
    def channels(self) -> int:
        """Of the frames that it takes: 1 for grey, 3 for colour."""
        return int(getattr(self.model, "channels", 1))

    @property
    def stride(self) -> int:
        """Pixels of the frame on each side of a cell of its map."""
        return int(getattr(self.model, "stride", STRIDE))

    @property
    def least_side(self) -> int:
        """Pixels that a frame needs on each side: what one cell of the map sees."""
        return int(getattr(self.model, "least_side", self.stride))

    @property
    def device(self) -> torch.device:
        """Return the device of the network."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

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
                f"expected frames whose map has the {h} x {w} cells of the region of interest, about "
                f"{h * self.stride} x {w * self.stride} pixels; found {' x '.join(map(str, density.shape[-2:]))} "
                "cells. Resize the frames, or use weights without a region of interest."
            )
        return density * self.roi.to(density)

    def count_of(self, density: Tensor) -> Tensor:
        """The readout for counts: people inside the region of interest, `(N,)`."""
        return self.masked(density).sum((1, 2, 3))

    def both(self, density: Tensor) -> Tensor:
        """The readout for maps and counts: the flat map, and the count last, `(N, h w + 1)`."""
        flat = self.masked(density).flatten(1)
        return torch.cat([flat, flat.sum(1, keepdim=True)], 1)

    def prepared(self, name: str, image: Tensor) -> Tensor:
        """Enlarge a frame and put it on the network's device; raise `DataError` where it does not fit."""
        channels, stride = self.channels, self.stride
        if image.dim() != 3 or len(image) != channels:
            raise DataError(
                f"expected frames ({channels}, H, W), as the network takes; found {tuple(image.shape)} in {name}. Read "
                f"them with {channels} channel{'s' if channels > 1 else ''}."
            )
        if not bool(image.isfinite().all()):
            raise DataError(f"{name}: expected finite inputs; found NaN or inf. Leave the frame out.")
        enlarge = self.enlarge
        image = enlarged(image, enlarge)
        check_size(image.shape, name, self.least_side)
        cells = (image.shape[1] // stride, image.shape[2] // stride)
        if self.roi is not None and cells != tuple(self.roi.shape):
            h, w = (side * stride // enlarge for side in self.roi.shape)
            raise DataError(
                f"expected frames of about {h} x {w} pixels, the size of the weights' region of interest; found "
                f"{image.shape[1] // enlarge} x {image.shape[2] // enlarge} in {name}. Use the camera that the weights "
                "were trained for, or resize its frames."
            )
        return image.to(self.device)


def save_weights(path: str | os.PathLike[str], trained: Trained) -> None:
    """Write an MCNN as safetensors: its tensors, the region of interest, and `about` as metadata."""
    import safetensors.torch

    model = trained.model
    if not isinstance(model, MCNN):
        raise ArgumentError(
            f"expected an MCNN, as `crowd train` makes it; found {type(model).__name__}. Keep the weights of your own "
            "network as you do, and pass package.module:callable or a .pt2 file as --weights."
        )
    about = {**trained.about, "network": "mcnn", "channels": model.channels}
    try:
        content = json.dumps(about, allow_nan=False)
        _about(content)
    except (TypeError, ValueError) as error:  # of which DataError is one
        raise ArgumentError(f"expected plain JSON about the weights that can be read again; {error}.") from error
    tensors = {name: value.detach().cpu().float().contiguous() for name, value in model.state_dict().items()}
    if trained.roi is not None:
        tensors["roi"] = trained.roi.cpu().to(torch.uint8)
    write_aside(path, safetensors.torch.save(tensors, {_KEY: content}))


def load_weights(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Trained:
    """Read what `save_weights` wrote; nothing is unpickled, and the weights of other networks are a `FileError`."""
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
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise FileError(
            f"expected the weights of an MCNN in {path}; found those of another architecture. Use what `crowd train` "
            f"wrote. ({why} ...)"
        ) from error
    return Trained(model.eval().to(device), None if roi is None else roi.bool().to(device), about)


def shipped(name: str, suffix: str = ".safetensors") -> Path:
    """The path of weights, or of another file beside them, that come with the package."""
    path = _SHIPPED / f"{name}{suffix}"
    if not path.is_file():
        raise ArgumentError(f"expected the name of shipped weights, one of {_shipped_names()}; found {name!r}.")
    return path


def _about(content: str) -> dict[str, Any]:
    """How weights were made; `DataError` where a field that is used later is not as it should be."""
    remedy = "Use what `crowd train` wrote."
    about: dict[str, Any] = checked(
        dict[str, Any], parsed(content, "what weights say about themselves", remedy), "about", remedy
    )
    for name, kind in _ABOUT.items():
        if name in about:
            checked(kind, about[name], f"about.{name}", remedy)
    return about


_ABOUT: dict[str, Any] = {
    "channels": Annotated[int, Limits(1, 3)],
    "enlarge": Annotated[int, Limits(1, 64)],
    "sigma": Annotated[float, Limits(1e-6, 1e6)],
    "set": str | None,
}


def _shipped_names() -> str:
    return ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.safetensors"))) or "none"


def faster(trained: Trained) -> Trained:
    """Lay the weights out so that a CPU runs the network about twice as fast."""
    if trained.device.type == "cpu":
        layout: Any = {"memory_format": torch.channels_last}
        trained.model.to(**layout)
    return trained


class Counter(nn.Module):
    """A network with what goes before and after it: `density_scale · relu(model(input_scale · x))`; see `as_counter`.

    The factors are a buffer, so that a calibration made with others is refused.
    """

    scaling: Tensor

    def __init__(
        self, model: nn.Module, channels: int, stride: int, input_scale: float, density_scale: float, relu: bool
    ) -> None:
        super().__init__()
        for name, value in (("input_scale", input_scale), ("density_scale", density_scale)):
            if not 0 < value < float("inf"):
                raise ArgumentError(f"expected {name} above 0; found {value}. 255 is usual for bytes, 0.01 for maps.")
        if channels not in (1, 3) or int(stride) != stride or stride < 1:
            raise ArgumentError(f"expected 1 or 3 channels and a stride of 1, 2, ...; found {channels} and {stride}.")
        self.model, self.channels, self.stride = model, channels, int(stride)
        self.input_scale, self.density_scale, self.relu = float(input_scale), float(density_scale), bool(relu)
        self.least_side = int(getattr(model, "least_side", stride))
        device = next((parameter.device for parameter in model.parameters()), None)
        factors = [input_scale, density_scale, float(relu), channels, stride]
        self.register_buffer("scaling", torch.tensor(factors, dtype=torch.float64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Compute density maps `(N, 1, h, w)` in people per cell."""
        density = self.model(self.input_scale * x)
        if isinstance(density, Tensor) and density.dim() == 3:
            density = density[:, None]
        wanted = (len(x), 1, x.shape[2] // self.stride, x.shape[3] // self.stride)
        if not isinstance(density, Tensor) or tuple(density.shape) != wanted:
            shape = tuple(density.shape) if isinstance(density, Tensor) else type(density).__name__
            raise OutputError(
                f"expected density maps {wanted} from the counter, a cell for {self.stride} x {self.stride} pixels; "
                f"found {shape}. Pass another stride, frames whose sides are multiples of it, or a wrapper that "
                "returns the map."
            )
        return self.density_scale * (F.relu(density) if self.relu else density)


def as_counter(
    model: nn.Module,
    *,
    channels: int = 1,
    stride: int = STRIDE,
    input_scale: float = 1.0,
    density_scale: float = 1.0,
    relu: bool = False,
    roi: Tensor | None = None,
    about: Mapping[str, Any] | None = None,
) -> Trained:
    """Any trained network with density maps, for all that this room does with a counter.

    Args:
        model: takes frames `(N, channels, H, W)` and gives maps `(N, 1, h, w)` or `(N, h, w)`; it is left as it was.
        channels: 1 where it takes grey frames, 3 for colour.
        stride: pixels of the frame on each side of a cell of its map.
        input_scale: its frames are in [0, input_scale]: 1, or 255 for bytes.
        density_scale: people per cell for each unit of its output.
        relu: cut off densities below 0, where the network itself does not.
        roi: cells that count, bool `(h, w)`; None: all.
        about: what is known of it, such as `set` and `sigma`; plain JSON.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(8), nn.Conv2d(4, 1, 1))
    >>> as_counter(net, stride=8, input_scale=255, relu=True).model(torch.rand(1, 1, 64, 80)).shape
    torch.Size([1, 1, 8, 10])
    """
    if isinstance(model, MCNN):
        raise ArgumentError("expected a network of others; found an MCNN of this package. Pass Trained(model).")
    counter = Counter(model, channels, stride, input_scale, density_scale, relu)
    scaling = {"input_scale": counter.input_scale, "density_scale": counter.density_scale, "relu": counter.relu}
    words = {"network": type(model).__name__, **(about or {}), "counter": scaling}
    if isinstance(model, torch.fx.GraphModule):  # a program has no modes; its eval() would raise
        counter.training = False
    else:
        counter.eval()
    return Trained(counter, roi, words)
