"""Recurrent layers over many draws at once: torch has no batching rule for them, so draws are folded into the batch.

The examples of a batch do not meet in `nn.LSTM`, `nn.GRU` or `nn.RNN`. Inputs `(T, N, L, F)` of T draws are therefore
run as `T · N` examples, and the outputs are unfolded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.forward import rerouted

__all__ = ["foldable"]

_functorch = torch._C._functorch


@contextmanager
def foldable(model: nn.Module) -> Iterator[None]:
    """Recurrent layers of `model` take batched tensors of `torch.vmap` while the context lasts."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase) and _is_stock(module)]
    with rerouted({layer: partial(_forward, layer) for layer in layers}):
        yield


def _forward(layer: nn.RNNBase, forward: Callable[..., Any], input: Any, hx: Any = None) -> Any:
    states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    values = (input, *states)
    plain = not all(isinstance(value, Tensor) for value in values) or not any(map(_functorch.is_batchedtensor, values))
    if plain or input.dim() != 3:
        return forward(input, hx)
    level = _functorch.maybe_current_level() or 0
    if any(_functorch.maybe_get_level(v) != level for v in values if _functorch.is_batchedtensor(v)):
        return forward(input, hx)  # batched by a vmap of the model's own
    draws = next(_draws(value) for value in values if _functorch.is_batchedtensor(value))
    axis = 0 if layer.batch_first else 1
    fold = partial(_folded, level=level, draws=draws)
    states = tuple(fold(state, axis=1) for state in states)
    output, last = forward(fold(input, axis=axis), states if isinstance(hx, tuple) else states[0] if states else None)
    rows = input.shape[axis]
    unfold = partial(_unfolded, level=level, draws=draws, rows=rows)
    lasts = tuple(unfold(value, axis=1) for value in (last if isinstance(last, tuple) else (last,)))
    return unfold(output, axis=axis), lasts if isinstance(last, tuple) else lasts[0]


def _is_stock(layer: nn.RNNBase) -> bool:
    """Whether `forward` is torch's: one of the user's own may take and give anything."""
    return type(layer).forward in (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward) and "forward" not in vars(layer)


def _draws(value: Tensor) -> int:
    return int(_functorch.get_unwrapped(value).shape[_functorch.maybe_get_bdim(value)])


def _folded(value: Tensor, axis: int, level: int, draws: int) -> Tensor:
    if not _functorch.is_batchedtensor(value):
        return value.unsqueeze(axis).expand(*value.shape[:axis], draws, *value.shape[axis:]).flatten(axis, axis + 1)
    whole: Tensor = _functorch._remove_batch_dim(value, level, draws, axis)
    return whole.flatten(axis, axis + 1)


def _unfolded(value: Tensor, axis: int, level: int, draws: int, rows: int) -> Tensor:
    found: Tensor = _functorch._add_batch_dim(value.unflatten(axis, (draws, rows)), axis, level)
    return found
