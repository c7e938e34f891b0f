"""Weight layers: the modules whose inputs dropout acts on, and which of their arguments these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["DROPOUTS", "LAYERS", "SOURCES", "channel_axis", "layer_inputs"]

_CONVOLUTIONS: dict[type[nn.Module], int] = {
    nn.Conv1d: 1,
    nn.ConvTranspose1d: 1,
    nn.Conv2d: 2,
    nn.ConvTranspose2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose3d: 3,
}
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    *_CONVOLUTIONS,
)
_WHOLE_CHANNELS: dict[type[nn.Module], int] = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, *_WHOLE_CHANNELS)
"""Dropout that a model was trained with; it is off in eval mode."""
SOURCES: tuple[type[nn.Module], ...] = (*LAYERS, nn.Embedding, nn.EmbeddingBag)
"""What comes out of these depends on weights."""


_SPATIAL = {**_CONVOLUTIONS, **_WHOLE_CHANNELS}


def layer_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """The arguments of a weight layer that dropout acts on, by position or keyword."""
    if isinstance(module, nn.MultiheadAttention):
        names: tuple[str, ...] = ("query", "key", "value")
    elif isinstance(module, nn.Bilinear):
        names = ("input1", "input2")
    else:
        names = ("input",)
    found: dict[int | str, Any] = dict(enumerate(args[: len(names)]))
    found.update({name: kwargs[name] for name in names if name in kwargs})
    return {key: value for key, value in found.items() if _maskable(value)}


def channel_axis(module: nn.Module) -> int:
    """The axis of a layer's input, from the end, along which its features lie."""
    return next((-1 - spatial for layer, spatial in _SPATIAL.items() if isinstance(module, layer)), -1)


def _maskable(value: Any) -> bool:
    if isinstance(value, PackedSequence):
        return True
    return isinstance(value, Tensor) and value.is_floating_point()
