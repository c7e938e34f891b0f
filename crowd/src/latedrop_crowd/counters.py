"""Counters that others trained: any network with density maps, and the weights of other people's MCNNs.

A counter gives `density_scale · relu(model(input_scale · x))` for frames `x` in [0, 1]; the count is the map's sum.
What a public repository calls its layers does not matter: the convolutions of an MCNN all differ in shape, so each
weight has one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, DataError
from latedrop_crowd.mcnn import MCNN, STRIDE, Counter, Trained

__all__ = ["as_counter", "mcnn_from_state"]


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
    if isinstance(model, MCNN) and model.centred:
        raise ArgumentError("expected a network of others; found an MCNN of this package. Pass Trained(model).")
    counter = Counter(
        model,
        channels=channels,
        stride=stride,
        input_scale=input_scale,
        density_scale=density_scale,
        relu=relu,
    )
    if next(model.parameters(), None) is not None:
        counter.scaling = counter.scaling.to(next(model.parameters()).device)
    said = {"network": type(model).__name__, **(about or {}), "counter": counter.settings()}
    if isinstance(model, torch.fx.GraphModule):  # a program has no modes; its eval() would raise
        counter.training = False
        return Trained(counter, roi, said)
    return Trained(counter.eval(), roi, said)


def mcnn_from_state(
    state: Mapping[str, Any],
    *,
    input_scale: float = 255.0,
    density_scale: float = 1.0,
    relu: bool = True,
    about: Mapping[str, Any] | None = None,
) -> Trained:
    """The MCNN whose weights somebody else trained, from its state dict; `save_weights` keeps it.

    Names do not matter; weights are told by their shapes, and a bias belongs to the weight of the same name.

    Args:
        state: weights by name, as `torch.load(path, weights_only=True)` gives them.
        input_scale: frames were in [0, input_scale] in training; public MCNNs take grey bytes.
        density_scale: people per cell for each unit of the map.
        relu: whether a ReLU follows the last convolution, as in most public code.
        about: what is known of it, such as `set` and `sigma`; plain JSON.

    Raises:
        DataError: not the weights of an MCNN; the message names what is missing or left over.
    """
    found = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    kernels = {name: value for name, value in found.items() if value.dim() == 4}
    first = next((value for value in kernels.values() if tuple(value.shape[2:]) == (9, 9)), None)
    channels = 1 if first is None else int(first.shape[1])
    if channels not in (1, 3):
        raise DataError(f"expected an MCNN for frames of 1 or 3 channels; found {channels}.")
    with torch.random.fork_rng(devices=[]):
        model = MCNN(channels, centred=False)
    places = {tuple(value.shape): name for name, value in model.state_dict().items() if value.dim() == 4}
    matched: dict[str, Tensor] = {}
    used = set()
    for name, kernel in kernels.items():
        place = places.get(tuple(kernel.shape))
        bias = name.removesuffix("weight") + "bias"
        if place is None or place in matched or bias not in found:
            continue
        matched |= {place: kernel, place.removesuffix("weight") + "bias": found[bias]}
        used |= {name, bias}
    missing = [name for name in places.values() if name not in matched]
    left = [f"{name} {tuple(found[name].shape)}" for name in found if name not in used]
    if missing or left:
        raise DataError(
            "expected the 13 convolutions of an MCNN, each with its bias, and nothing else (no batch normalisation); "
            f"{_some('missing', [f'{n} {s}' for s, n in places.items() if n in missing])}"
            f"{_some('left over', left)}pass the network itself to as_counter."
        )
    matched["unit"] = model.unit
    model.load_state_dict({name: value.float() for name, value in matched.items()})
    trained = as_counter(
        model, channels=channels, input_scale=input_scale, density_scale=density_scale, relu=relu, about=about
    )
    return Trained(trained.model, None, {**trained.about, "network": "mcnn", "channels": channels})


def _some(what: str, names: list[str]) -> str:
    return f"{what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; " if names else ""
