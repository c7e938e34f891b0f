"""What the modules of a model hold, by identity: tells that something was exchanged, without a look at any value.

Layers, weights, buffers, flags, hooks and attributes are all entries of some dict of a module. Two looks at these dicts
find the same objects in the same order, unless somebody has written in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from latedrop.torch_inside import HOLDERS, REPLACED, is_torchs_own, wrapped_attribute

__all__ = ["Contents", "holds_little"]

_DICTS = tuple(name for name, kind in HOLDERS.items() if issubclass(kind, dict) and not name.endswith("_kwargs"))
_HOOKS = tuple(name for name in _DICTS if name.endswith("_hooks"))
_MOST_MODULES, _MOST_NUMBERS = 64, 2**20
_ATOMS = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type, type(None), BuiltinFunctionType)
_END = object()


class Contents:
    """The objects that the modules of a model hold now.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> contents = Contents(net)
    >>> before, _, after = contents.of(net), net.eval(), contents.of(net)
    >>> before, after
    (True, False)
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        dicts = [held for module in modules for held in _dicts(module)]
        self._empty = [held for held in dicts if not held]
        self._views: list[Any] = [view for held in dicts if held for view in (held, held.values())]
        self._views.append((_END,))
        self._known = list(chain.from_iterable(self._views))
        self._parts = modules[1:]  # the model itself is held by nobody
        self._marks = [vars(model), type(model), *map(vars, self._parts), *map(type, self._parts)]
        self._kinds: list[Any] = list({*map(type, modules)})
        self._code = [kind.forward for kind in self._kinds]

    def of(self, model: nn.Module) -> bool:
        """Whether the modules of the model hold the same objects as when this was made."""
        try:
            same = not any(self._empty) and all(map(is_, chain.from_iterable(self._views), self._known))
        except RuntimeError:  # another thread writes meanwhile
            return False
        if not same or [kind.forward for kind in self._kinds] != self._code:
            return False
        marks = chain((vars(model), type(model)), map(vars, self._parts), map(type, self._parts))
        return all(map(is_, marks, self._marks))


def holds_little(model: nn.Module) -> bool:
    """Whether a network is small, and holds nothing but layers, weights and what cannot be written into.

    Not so with hooks, with lists, tensors or objects of one's own, with recurrent layers and with attention.
    """
    modules = list(islice(model.modules(), _MOST_MODULES + 1))
    if len(modules) > _MOST_MODULES or sum(weight.numel() for weight in model.parameters()) > _MOST_NUMBERS:
        return False
    return all(type(weight) is nn.Parameter for weight in model.parameters()) and all(map(_is_plain, modules))


def _is_plain(module: nn.Module) -> bool:
    state = vars(module)
    if isinstance(module, (torch.jit.ScriptModule, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        return False
    if wrapped_attribute(module) is not None or any(state.get(name) for name in (*_HOOKS, *REPLACED)):
        return False
    if is_torchs_own(module):
        return True
    own = {name: value for name, value in state.items() if name not in _OF_ALL}
    return next(module.buffers(recurse=False), None) is None and all(map(_is_fixed, own.values()))


def _is_fixed(value: Any) -> bool:
    """Whether something has no inside that could be written to."""
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in _ATOMS or (type(value) is FunctionType and value.__closure__ is None)


def _dicts(module: nn.Module) -> Iterator[dict[str, Any]]:
    state = vars(module)
    yield state
    yield from (state[name] for name in _DICTS if name in state)


_OF_ALL = frozenset(vars(nn.Module()))
