"""What a compiled program takes for granted about its model: when that has changed, another program is made.

A program was traced once. It reads weights and buffers from where they lie, so that what is written into them in place
counts; all else that the model's code looked at is fixed in it.
"""

from __future__ import annotations

from array import array
from collections import deque
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.model.contents import Contents, holds_little
from latedrop.torch_inside import contents_of, stands_for_others, version_of
from latedrop.variance.engine.refusing import refuse

__all__ = ["Looks", "looked_at", "quick_snapshot", "snapshot"]

_ATOMS = {bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_FEW, _FEW_BYTES, _DEEP = 1000, 2**16, 6


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """A model's modules with their code, hooks and attributes, and where their tensors lie: something to compare.

    Plain values count as such, also in lists, dicts and objects a few steps away; all else by identity.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1))
    >>> before = snapshot(net)
    >>> net[1].negative_slope = 0.2
    >>> snapshot(net) == before
    False
    """
    return _modules(model, {}, 0)


def quick_snapshot(model: nn.Module) -> tuple[Any, ...]:
    """The same; of a small network that holds what it held, the last one: a look at where its weights lie will do."""
    known = _LAST.get(model)
    if known is not None:
        contents, weights, places, last = known
        if contents.of(model) and list(map(_place, weights)) == places:
            return last
    found = snapshot(model)
    if holds_little(model):
        weights = [*model.parameters(), *model.buffers()]
        _LAST[model] = Contents(model), weights, list(map(_place, weights)), found
    return found


_LAST: WeakKeyDictionary[nn.Module, tuple[Contents, list[Tensor], list[Any], tuple[Any, ...]]] = WeakKeyDictionary()


def looked_at(value: Any) -> Any:
    """What stands for any object in such a comparison."""
    return _value(value, {}, 0)


class Looks(TorchFunctionMode):
    """Notes which constant tensors the code inside turns into Python numbers: these are fixed in what is traced.

    Of what is computed from the inputs nobody may do so: their numbers will be others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            values = [value for value in args if isinstance(value, Tensor)]
            if func in _TAKEN_OUT and any(map(stands_for_others, values)):
                refuse(f"Python code that takes values out of its tensors ({func.__name__})")
            self._seen += [(value, version_of(value)) for value in values]
        return func(*args, **(kwargs or {}))

    def still_hold(self) -> bool:
        """Whether none of these tensors was changed since."""
        return all(version_of(tensor) == version for tensor, version in self._seen)


_NAMES = "item __bool__ __int__ __float__ __index__ __complex__ __contains__ equal allclose"
_TAKEN_OUT = {getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")}
_LOOKS = {*(getattr(Tensor, name) for name in _NAMES.split()), torch.equal, torch.allclose, *_TAKEN_OUT}


def _modules(model: nn.Module, known: dict[int, Any], depth: int) -> tuple[Any, ...]:
    found: list[Any] = []
    modules = list(model.modules())
    known.update({id(module): id(module) for module in modules})
    for module in modules:
        marks, tensors, attributes = contents_of(module)
        found += id(module), type(module), getattr(type(module), "forward", None), *marks, *map(_place, tensors)
        for name, value in attributes.items():
            found += name, _value(value, known, depth)
    return tuple(found)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    try:
        return tensor.data_ptr(), tensor.stride()
    except (NotImplementedError, RuntimeError):  # in a form without an address
        return (id(tensor),)


def _value(value: Any, known: dict[int, Any], depth: int) -> Any:
    """Two that are equal stand for the same values."""
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if kind is float:
        return repr(value)  # 0.0 == -0.0
    if id(value) not in known:
        known[id(value)] = id(value)  # it may hold itself
        known[id(value)] = _inside(value, kind, known, depth)
    return known[id(value)]


def _inside(value: Any, kind: type, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Tensor):
        return id(value), *_place(value), version_of(value)
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _FEW_BYTES:
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, (array, bytearray)) and len(value) <= _FEW_BYTES:
        return kind, bytes(value)
    if depth > _DEEP:
        return id(value)
    if isinstance(value, nn.Module):  # that is none of the model's own
        return _modules(value, known, depth + 1)
    if isinstance(value, (list, tuple, set, frozenset, deque)) and len(value) <= _FEW:
        return kind, *(_value(item, known, depth + 1) for item in value)
    if isinstance(value, dict) and len(value) <= _FEW:
        pairs = value.items()
        return kind, *((_value(key, known, depth + 1), _value(item, known, depth + 1)) for key, item in pairs)
    return id(value), _value(_held(value), known, depth + 1)


def _held(value: Any) -> Any:
    """What an object of any other kind holds."""
    if isinstance(value, MethodType):
        return id(value.__self__), value.__func__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__
    if isinstance(value, CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # nothing yet
            return None
    if isinstance(value, (type, ModuleType)):
        return None
    slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    own = getattr(value, "__dict__", None)
    found = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return {**found, **own} if type(own) is dict else found


def _names(slots: Any) -> Any:
    return (slots,) if isinstance(slots, str) else slots
