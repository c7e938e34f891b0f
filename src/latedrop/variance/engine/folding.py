"""Torch's own layers over many draws at once: draws join the batch, and the layer runs once as it always does.

`torch.vmap` has rules for operators, not for layers. It takes a linear layer apart into a product and a sum, copies the
input of a BatchNorm to bring draws beside channels, and has no rule at all for `nn.LSTM` or, on a CPU, for attention.
None of these lets the examples of a batch meet, so inputs `(T, N, ...)` of T draws can be run as `T · N` examples, and
the outputs be unfolded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latedrop.masking.masks import thinned
from latedrop.model.forward import rerouted

__all__ = ["Fused", "batched", "foldable"]

_functorch = torch._C._functorch
_is_batched = _functorch.is_batchedtensor

_POINTWISE = {layer.forward for layer in (nn.Linear, nn.LayerNorm, nn.RMSNorm)}
"""Act along the last axes: whatever precedes them counts examples."""
_SPATIAL = {
    layer.forward: axes
    for axes, layers in (
        (1, (nn.Conv1d, nn.ConvTranspose1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)),
        (2, (nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)),
        (3, (nn.Conv3d, nn.ConvTranspose3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d)),
    )
    for layer in layers
}
"""Take `(N, C, ...)` with so many axes behind the channels; of one axis less, a single example."""
_NORMS = {nn.BatchNorm2d.forward, nn.GroupNorm.forward}
"""Take `(N, C, ...)`; BatchNorm in eval mode, where examples do not meet."""
_CONVOLUTIONS = {None, *(layer._conv_forward for layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d))}
"""What `forward` of a convolution calls; a subclass may have its own."""
_RECURRENT = {nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward}


@contextmanager
def foldable(model: nn.Module) -> Iterator[None]:
    """Layers of `model` take batched tensors of `torch.vmap` as more examples, while the context lasts."""
    routes: dict[nn.Module, Callable[..., Any]] = {}
    for layer in model.modules():
        forward = getattr(type(layer), "forward", None)  # TorchScript has none to show
        if "forward" in layer.__dict__:
            continue
        if forward in _RECURRENT:
            routes[layer] = partial(_recurrent, layer)
        elif forward in _POINTWISE:
            routes[layer] = partial(_folded_call, layer, None)
        elif forward in _SPATIAL and getattr(type(layer), "_conv_forward", None) in _CONVOLUTIONS:
            routes[layer] = partial(_folded_call, layer, _SPATIAL[forward] + 2)
        elif forward in _NORMS:
            routes[layer] = partial(_folded_call, layer, 0)
    attend = F.scaled_dot_product_attention
    with rerouted(routes):
        F.scaled_dot_product_attention = partial(_attention, attend)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = attend


def _folded_call(layer: nn.Module, axes: int | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A layer of one input: `axes` is how many it has with the examples, None where it does not matter."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not _is_batched(args[0]):
        return forward(*args, **kwargs)
    value, level = args[0], _functorch.maybe_current_level() or 0
    if _functorch.maybe_get_level(value) != level or not _shared(layer):
        return forward(value)
    draws = _draws(value)
    fold = axes is not None and value.dim() != axes - 1
    output = forward(_folded(value, 0, level, draws) if fold else _unbatched(value, level, draws))
    if type(output) is not Tensor or _is_batched(output):  # with indices, or of weights that differ after all
        return forward(value)
    return _unfolded(output, 0, level, draws, value.shape[0]) if fold else batched(output, level)


def batched(values: Tensor, level: int, axis: int = 0) -> Tensor:
    """Values with draws along an axis as a batch of `vmap`."""
    found: Tensor = _functorch._add_batch_dim(values, axis, level)
    return found


def _unbatched(value: Tensor, level: int, draws: int, axis: int = 0) -> Tensor:
    """The other way round."""
    whole: Tensor = _functorch._remove_batch_dim(value, level, draws, axis)
    return whole


class Fused:
    """Stands where masks on a CUDA device would: hashed and multiplied in one kernel, where the value allows it.

    Args:
        keys: of the draws, on the device.
        shape: of a mask.
        rate: of the site.
        level: of the `vmap` that has all the draws; None where there is but one, outside of it.
        plain: gives the masks themselves.
    """

    def __init__(
        self, keys: Tensor, shape: tuple[int, ...], rate: float, level: int | None, plain: Callable[[], Any]
    ) -> None:
        self._keys, self._shape, self._rate, self._level, self._plain = keys, shape, rate, level, plain

    def expand(self, *shape: int) -> Any:
        """The masks themselves, of another shape."""
        return self._plain().expand(*shape)

    def __rmul__(self, value: Tensor) -> Tensor:
        whole = None if value.requires_grad and torch.is_grad_enabled() else self._whole(value)
        found = None if whole is None else thinned(whole, self._keys, self._shape, self._rate)
        if found is None:
            product: Tensor = value * self._plain()
            return product
        return found[0] if self._level is None else batched(found, self._level)

    def _whole(self, value: Tensor) -> Tensor | None:
        """The value with an axis of draws in front; None where other transforms have wrapped it."""
        draws = len(self._keys)
        if not _functorch.is_functorch_wrapped_tensor(value):
            return value.expand(draws, *value.shape)
        if self._level is None or not _is_batched(value) or _functorch.maybe_get_level(value) != self._level:
            return None
        whole = _unbatched(value, self._level, draws)
        return None if _functorch.is_functorch_wrapped_tensor(whole) else whole


def _shared(layer: nn.Module) -> bool:
    """Whether all draws have the same weights, and examples do not meet."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
        return False
    own = layer.__dict__
    if own["_modules"] or "weight" in own or "bias" in own:  # parametrized, or made by a hook
        return False
    return not any(_is_batched(v) for kind in ("_parameters", "_buffers") for v in own[kind].values() if v is not None)


def _recurrent(layer: Any, forward: Callable[..., Any], input: Any, hx: Any = None) -> Any:
    states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    values = (input, *states)
    plain = not all(isinstance(value, Tensor) for value in values) or not any(map(_is_batched, values))
    if plain or input.dim() != 3:
        return forward(input, hx)
    level = _functorch.maybe_current_level() or 0
    if any(_functorch.maybe_get_level(v) != level for v in values if _is_batched(v)):
        return forward(input, hx)  # batched by a vmap of the model's own
    draws = next(_draws(value) for value in values if _is_batched(value))
    axis = 0 if layer.batch_first else 1
    fold = partial(_folded, level=level, draws=draws)
    states = tuple(fold(state, axis=1) for state in states)
    output, last = forward(fold(input, axis=axis), states if isinstance(hx, tuple) else states[0] if states else None)
    rows = input.shape[axis]
    unfold = partial(_unfolded, level=level, draws=draws, rows=rows)
    lasts = tuple(unfold(value, axis=1) for value in (last if isinstance(last, tuple) else (last,)))
    return unfold(output, axis=axis), lasts if isinstance(last, tuple) else lasts[0]


def _attention(attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """`(N, H, L, E)` of draws that have all their own queries, keys and values, and neither a mask nor dropout."""
    level = _functorch.maybe_current_level() or 0
    values, others = args[:3], args[3:]
    given = dict(zip(("attn_mask", "dropout_p"), others, strict=False)) | kwargs
    plain = len(values) < 3 or given.get("attn_mask") is not None or given.get("dropout_p")
    if plain or not all(_is_batched(v) and v.dim() == 4 and _functorch.maybe_get_level(v) == level for v in values):
        return attend(*args, **kwargs)
    draws, rows = _draws(values[0]), values[0].shape[0]
    if any(value.shape[0] != rows for value in values):
        return attend(*args, **kwargs)
    folded = (_folded(value, 0, level, draws) for value in values)
    return _unfolded(attend(*folded, *others, **kwargs), 0, level, draws, rows)


def _draws(value: Tensor) -> int:
    return int(_functorch.get_unwrapped(value).shape[_functorch.maybe_get_bdim(value)])


def _folded(value: Tensor, axis: int, level: int, draws: int) -> Tensor:
    if not _is_batched(value):
        return value.unsqueeze(axis).expand(*value.shape[:axis], draws, *value.shape[axis:]).flatten(axis, axis + 1)
    return _unbatched(value, level, draws, axis).flatten(axis, axis + 1)


def _unfolded(value: Tensor, axis: int, level: int, draws: int, rows: int) -> Tensor:
    return batched(value.unflatten(axis, (draws, rows)), level, axis)
