"""Counters that others trained: any network with density maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latedrop.errors import ArgumentError, OutputError
from latedrop_crowd.mcnn import MCNN, STRIDE, Trained

__all__ = ["Counter", "as_counter"]


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
        """Density maps, people per cell."""
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
        return Trained(counter, roi, words)
    return Trained(counter.eval(), roi, words)
