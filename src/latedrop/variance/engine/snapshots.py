"""What a compiled program takes for granted about its model: when that has changed, another program is made.

A program was traced once. It reads weights and buffers from where they lie, so that what is written into them in place
counts; all else that the model's code looked at is fixed in it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from operator import is_
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from latedrop.model.arrays import is_table
from latedrop.model.by_model import ByModel
from latedrop.model.contents import Contents, holds_little
from latedrop.model.rows import tensors
from latedrop.model.storages import address
from latedrop.model.twin import in_slots
from latedrop.torch_inside import contents_of, is_torchs_own, stands_for_others, version_of
from latedrop.variance.engine.refusing import refuse
from latedrop.variance.engine.shared import Repeated

__all__ = ["Looks", "looked_at", "quick_snapshot", "snapshot"]

_ATOMS = {bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, Decimal, Fraction}
_FEW, _MANY, _FEW_BYTES, _DEEP = 1000, 100_000, 2**20, 6
_Known: TypeAlias = "dict[int, tuple[Any, Any]]"
"""By identity: an object, held so that no other comes to lie there, and what stands for it."""


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """A model's modules with their code, hooks and attributes, and where their tensors lie: something to compare.

    Plain values count as such, also in lists, dicts and objects a few steps away; so does what the classes of modules
    hold. All else counts by identity: lists of more than 100,000 numbers, arrays of more than a megabyte.

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
        contents, weights, places, kinds, code, last = known
        if contents.of(model) and list(map(_place, weights)) == places and _in_classes(kinds) == code:
            return last
    found = snapshot(model)
    if holds_little(model):
        weights, kinds = [*model.parameters(), *model.buffers()], _kinds(model.modules())
        _LAST[model] = Contents(model), weights, list(map(_place, weights)), kinds, _in_classes(kinds), found
    return found


_Last: TypeAlias = "tuple[Contents, list[Tensor], list[Any], list[type], _Same, tuple[Any, ...]]"
_LAST: ByModel[_Last] = ByModel()


def looked_at(value: Any) -> Any:
    """What stands for any object in such a comparison."""
    return _value(value, {}, 0)


class Looks(TorchFunctionMode):
    """Notes which constant tensors the code inside turns into Python numbers: these are fixed in what is traced.

    Of what is computed from the inputs nobody may do so: their numbers will be others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[Tensor, int, Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            values = _looked_into(func, args, kwargs or {})
            if func in _TAKEN_OUT and any(type(value) is Repeated or stands_for_others(value) for value in values):
                refuse(f"Python code that takes values out of its tensors ({func.__name__})")
            self._seen += [(value, version_of(value), _few_numbers(value)) for value in values]
        return func(*args, **(kwargs or {}))

    def add_unread(self, model: nn.Module, graph: fx.GraphModule) -> None:
        """Small tensors of a user's modules that a graph does not hold: torch may have taken numbers out of them."""
        nodes = graph.graph.find_nodes(op="get_attr")
        read = {address(value) for node in nodes if isinstance(value := getattr(graph, node.target), Tensor)}
        for module in model.modules():
            if not is_torchs_own(module):
                _, own, attributes = contents_of(module)
                values = [value for value in (*own, *tensors(attributes)) if address(value) not in read]
                few = [(value, version_of(value), _few_numbers(value)) for value in values]
                self._seen += [entry for entry in few if entry[2] is not None]

    def still_hold(self) -> bool:
        """Whether none of these tensors was changed since."""
        return all(
            version_of(tensor) == version and (few is None or torch.equal(tensor, few))
            for tensor, version, few in self._seen
        )


def _looked_into(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of which a function takes the numbers."""
    if func is Tensor.new_tensor:
        return tensors((args[1:], kwargs))  # of the first it takes the kind
    kept = func in (torch.as_tensor, torch.asarray) and args and isinstance(args[0], Tensor)
    return [] if kept else tensors((args, kwargs))


def _few_numbers(value: Tensor) -> Tensor | None:
    """A copy of what can be compared in no time: torch does not count what is written through `data`."""
    plain = type(value) in (Tensor, nn.Parameter) and value.is_cpu and value.layout is torch.strided
    return value.detach().clone() if plain and value.numel() <= _LITTLE and not stands_for_others(value) else None


_LITTLE = 64


_NAMES = "item __bool__ __int__ __float__ __index__ __complex__ __contains__ equal allclose"
_TAKEN_OUT = {getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "new_tensor", "apply_")}
_TAKEN_OUT |= {torch.tensor, torch.as_tensor, torch.asarray}
_LOOKS = {*(getattr(Tensor, name) for name in _NAMES.split()), torch.equal, torch.allclose, *_TAKEN_OUT}


def _modules(model: nn.Module, known: _Known, depth: int) -> tuple[Any, ...]:
    found: list[Any] = []
    modules = list(model.modules())
    known.update({id(module): (module, id(module)) for module in modules})
    for module in modules:
        marks, tensors, attributes = contents_of(module)
        found += id(module), type(module), *marks, *map(_place, tensors)
        for name, value in attributes.items():
            found += name, _value(value, known, depth)
    found.append(_in_classes(_kinds(modules)))
    return tuple(found)


def _kinds(modules: Iterable[nn.Module]) -> list[type]:
    """The classes of modules, and their bases."""
    return list(dict.fromkeys(base for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__))


def _in_classes(kinds: Iterable[type]) -> _Same:
    """The methods and values that classes hold; of torch's own, `forward` alone."""
    found: list[Any] = []
    for kind in kinds:
        own = kind.__module__.startswith("torch.nn.")
        found += [vars(kind).get("forward")] if own else vars(kind).values() if kind is not object else ()
    return _Same(found)


class _Same:
    """Some objects, which are equal to those that are the very same; they are held."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values, self._hash = values, hash(tuple(map(id, values)))

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, _Same) and len(other._values) == len(self._values)
        return alike and all(map(is_, self._values, other._values))  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return self._hash


class _It:
    """One object, by identity; not held, where that can be helped: it may hold the model."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._get: Callable[[], Any] = ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _It) and self._get() is not None and self._get() is other._get()

    def __hash__(self) -> int:
        return self._hash


def _place(tensor: Tensor) -> tuple[Any, ...]:
    try:
        return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()
    except (NotImplementedError, RuntimeError):  # in a form without an address
        return (_It(tensor),)


def _value(value: Any, known: _Known, depth: int) -> Any:
    """Two that are equal stand for the same values."""
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if kind is float:
        return repr(value)  # 0.0 == -0.0
    if id(value) not in known:
        known[id(value)] = value, id(value)  # it may hold itself
        known[id(value)] = value, _inside(value, kind, known, depth)
    return known[id(value)][1]


def _inside(value: Any, kind: type, known: _Known, depth: int) -> Any:
    if isinstance(value, Tensor):
        return _It(value), *_place(value), version_of(value)
    if depth > _DEEP:
        return _It(value)
    numbers = _numbers(value)
    if numbers is not None and numbers.nbytes <= _FEW_BYTES:
        if not numbers.dtype.hasobject:
            return kind, numbers.shape, numbers.dtype.str, numbers.tobytes()
        if numbers.size <= _FEW:
            return kind, numbers.shape, *(_value(item, known, depth + 1) for item in numbers.ravel().tolist())
        return _It(value)
    if isinstance(value, nn.Module):  # that is none of the model's own
        return _modules(value, known, depth + 1)
    if isinstance(value, (list, tuple, set, frozenset, deque)) and len(value) <= _MANY:
        plain = len(value) > _FEW and all(type(item) in _ATOMS or type(item) is float for item in value)
        if plain or len(value) <= _FEW:
            items = value if plain else (_value(item, known, depth + 1) for item in value)
            return kind, *items, _beside(value, known, depth)
    if isinstance(value, (dict, MappingProxyType)) and len(value) <= _FEW:
        pairs = ((_value(key, known, depth + 1), _value(item, known, depth + 1)) for key, item in value.items())
        return kind, *pairs, _beside(value, known, depth)
    held = _held(value)  # a dict that nobody else has: it is no step deeper
    return _It(value), *((name, _value(item, known, depth + 1)) for name, item in held.items())


def _beside(value: Any, known: _Known, depth: int) -> Any:
    """What a list or dict of a class of one's own holds beside its items."""
    own = getattr(value, "__dict__", None)
    return _value(own, known, depth + 1) if own else None


def _numbers(value: Any) -> np.ndarray | None:
    """An array, also of a table or of bytes, as numpy sees it."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    try:
        if isinstance(value, (bytearray, array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)):
            return np.frombuffer(memoryview(value), np.uint8)
        return np.asarray(value) if is_table(value) and value.size <= _FEW else None
    except Exception:  # whatever a table of others raises
        return None


def _held(value: Any) -> dict[Any, Any]:
    """What an object of any other kind holds, by any names."""
    if isinstance(value, MethodType):
        return {0: value.__self__, 1: value.__func__}
    if isinstance(value, partial):
        return {0: value.func, 1: value.args, 2: value.keywords}
    if isinstance(value, FunctionType):
        used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        data = {name: item for name, item in used.items() if not isinstance(item, (type, ModuleType, FunctionType))}
        return {0: value.__code__, 1: value.__defaults__, 2: value.__kwdefaults__, 3: value.__closure__, **data}
    if isinstance(value, CellType):
        try:
            return {0: value.cell_contents}
        except ValueError:  # nothing yet
            return {}
    if isinstance(value, slice):
        return {0: value.start, 1: value.stop, 2: value.step}
    if isinstance(value, ref):
        return {0: value()}
    if isinstance(value, (type, ModuleType)):
        return {}
    own, found = getattr(value, "__dict__", None), dict(in_slots(value))
    return {**found, **own} if type(own) is dict else found
