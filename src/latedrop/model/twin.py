"""A private twin of the user's model: the same weights, and modules, flags, attributes and buffers of its own.

All work is done on a twin: it is in eval mode, its layers are rerouted, what its code writes into itself is thrown away
with it. So there is nothing to put back on the model, and whoever else calls it meanwhile notices nothing.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy as shallow
from copy import deepcopy
from functools import cache, partial
from itertools import chain
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import CallableProxyType, ProxyType, ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.lazy import lazy
from latedrop.model.by_model import ByModel
from latedrop.model.running import may_write, note_copy
from latedrop.model.wrappers import bare
from latedrop.torch_inside import being_traced, is_torchs_own, parts_of, shallow_copy, uncompiled, wrapped_attribute

__all__ = ["Around", "in_slots", "release", "reroute", "twin_of"]

_MOST_ITEMS = 10_000  # of a list or dict that is searched for modules
_DEEPEST = 4  # steps from a module to another one that it does not hold as a part
_ATOMS = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_FOREIGN = ("builtins", "torch", "numpy", "logging", "threading", "functools", "pathlib", "re", "abc")
"""Objects of these hold no modules of anybody's."""
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set)
_LIKE_CONTAINERS = (dict, MappingProxyType, list, tuple, set, frozenset, deque)
"""Of these and of their subclasses the modules inside are exchanged, where there are any."""
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""In eval mode these may call no submodule at all, but one fused kernel."""
_WRITING = re.compile(r"prim::SetAttr|aten::\w*[a-z0-9]_\(|aten::append")
_WRITES: ByModel[bool] = ByModel()
"""Whether the code of TorchScript modules writes."""


def twin_of(
    model: nn.Module,
    *,
    layers: bool = True,
    differentiable: bool = False,
    own_gradients: bool = False,
    own_buffers: bool = True,
) -> nn.Module:
    """A twin of `model`, without the wrappers of `torch.compile`, `DataParallel` and DDP.

    Without `layers` it runs as the model would in eval mode, by fused kernels and compiled code too; with, every layer
    runs by itself, so that it can be rerouted. With `differentiable` its weights ask for no gradient, so that none is
    computed for them, and recurrent layers run in a way that has a backward pass. With `own_gradients` its weights ask
    for gradients as the model's do, and what is computed for them is the twin's: for a model that differentiates
    itself. Without `own_buffers` it sees, and writes, the buffers of the model.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    >>> twin = twin_of(net)
    >>> twin[0].weight is net[0].weight, twin.training, net.training
    (True, False, True)
    """
    return _Copying(model, layers, differentiable, own_gradients, own_buffers).module(model)


Around: TypeAlias = Callable[..., Any]
"""`(forward, *args, **kwargs)` -> what the layer gives."""


def reroute(layer: nn.Module, around: Around, *, copies: bool = True) -> None:
    """The `forward` of a layer of a twin becomes `around(forward, ...)`; that of its copies too, unless told not."""
    vars(layer)["forward"] = _Route(layer.forward, around, copies)


def release(twin: nn.Module) -> None:
    """A twin that is no longer needed lets go of what its layers were rerouted to, and of what that holds."""
    if isinstance(twin, torch.jit.ScriptModule):  # may be the model's own
        return
    for part in parts_of(twin):
        release(part)
    vars(twin).pop("forward", None)


class _Route:
    def __init__(self, own: Callable[..., Any], around: Around, copies: bool) -> None:
        self.own, self.around, self.copies = own, around, copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.own, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = deepcopy(self.own, memo)
        return _Route(own, self.around, True) if self.copies else own


class _Copying:
    """One copy of every object that is met on the way through a model."""

    def __init__(
        self, model: nn.Module, layers: bool, differentiable: bool, own_gradients: bool, own_buffers: bool
    ) -> None:
        self._model, self._own_gradients = model, own_gradients
        self._layers, self._differentiable, self._own_buffers = layers, differentiable, own_buffers
        self._written = own_buffers and may_write(model)
        self._made: dict[int, Any] = {}
        self._apart: set[int] = set()
        self._storages: dict[int, Any] = {}

    @lazy
    def _inside(self) -> set[int]:
        return {id(module) for module in self._model.modules()}

    def module(self, module: nn.Module) -> nn.Module:
        made = self._made.get(id(module))
        if made is None:
            made = self._made[id(module)] = self._module(module)
        found: nn.Module = made
        return found

    def _module(self, module: nn.Module) -> nn.Module:
        if wrapped_attribute(module) is not None:
            evaluated = not any(inner.training for inner in module.modules())
            return module if evaluated and not self._layers else self.module(bare(module))
        if isinstance(module, torch.jit.ScriptModule):  # runs outside Python: there is nothing to reroute inside
            flags = [getattr(inner, "training", False) for inner in module.modules()]
            return _own_script(module) if any(flags) or self._own_gradients or _may_write(module) else module
        weight = self._weight if self._differentiable or self._own_gradients else None
        state = vars(module)
        whole = self._written and is_torchs_own(module)
        value = self._noted if whole else self._value
        copy: Any = shallow_copy(module, self.module, weight, value, self._made, whole=whole)
        for name, item in in_slots(module):
            object.__setattr__(copy, name, self._value(item))
        if "max_norm" in state and state["max_norm"] is not None and self._own_buffers and isinstance(module, _TABLES):
            copy.weight = nn.Parameter(copy.weight.detach().clone(), copy.weight.requires_grad)  # it is written
        if self._layers and isinstance(module, _FUSED):
            own = type(module).forward in [layer.forward for layer in _FUSED]
            reroute(copy, partial(_as_in_training, copy) if own else _seen)
        elif self._differentiable and isinstance(module, nn.RNNBase):
            reroute(copy, partial(_as_in_training, copy))  # cuDNN has no backward pass of what ran in eval mode
        elif self._layers and isinstance(module, nn.TransformerEncoder):
            copy.use_nested_tensor = False  # padded rows would go as nested tensors, which only fused kernels take
        twin: nn.Module = copy
        return twin

    def _weight(self, weight: Tensor) -> Tensor:
        if id(weight) not in self._made:
            asks = self._own_gradients and weight.requires_grad
            if type(weight) is nn.Parameter:
                made: Tensor = nn.Parameter(weight, asks)  # which shares its numbers
                vars(made).update(vars(weight))
            else:
                made = weight.detach().requires_grad_(asks)
            self._made[id(weight)] = made
        found: Tensor = self._made[id(weight)]
        return found

    def _value(self, value: Any) -> Any:
        """What stands for something that a module holds: a copy, with the modules in it exchanged."""
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, Tensor):
            made = self._tensor(value) if self._own_buffers and not isinstance(value, nn.Parameter) else value
        elif type(value) in _CONTAINERS:
            return self._container(value) if len(value) <= _MOST_ITEMS else value
        elif not self._reaches(value):
            return value
        elif uncompiled(value) is not None:
            made = self._value(uncompiled(value))
        elif issubclass(type(value), nn.Module):
            return self.module(value)
        else:
            made = self._holder(value)
        self._made[id(value)] = made
        return made

    def _noted(self, value: Any) -> Any:
        """The same of what a layer of torch's own holds."""
        made = self._value(value)
        if isinstance(value, Tensor) and made is not value:
            note_copy(value, made)
        return made

    def _tensor(self, value: Tensor) -> Tensor:
        """A copy; of tensors that are views of one another the copies are, too."""
        plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        odd = value.is_conj() or value.is_neg() or value.is_quantized
        if not plain or odd or being_traced():  # a graph has no storages
            return value.clone()
        storage = value.untyped_storage()
        copy = self._storages.setdefault(storage.data_ptr(), None) or storage.clone()
        self._storages[storage.data_ptr()] = copy
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            copy, value.storage_offset(), value.shape, value.stride()
        )

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            copy = self._made[id(value)] = value.copy()
            copy.clear()
            copy.update({self._key(key): self._value(item) for key, item in value.items()})
        else:
            copy = self._made[id(value)] = type(value)(self._value(item) for item in value)
        return copy

    def _like_container(self, value: Any) -> Any:
        """A subclass of a container, or one of a rarer kind."""
        if isinstance(value, (tuple, frozenset, MappingProxyType)):
            if isinstance(value, MappingProxyType):
                return MappingProxyType({self._key(key): self._value(item) for key, item in value.items()})
            items = [self._value(item) for item in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        copy: Any = shallow(value)
        self._made[id(value)] = copy
        if isinstance(value, dict):
            for key, item in value.items():
                dict.__delitem__(copy, key)
                dict.__setitem__(copy, self._key(key), self._value(item))
        else:
            items = [self._value(item) for item in value]
            copy.clear()
            (copy.update if isinstance(value, set) else copy.extend)(items)
        self._held_things(value, copy)
        return copy

    def _key(self, key: Any) -> Any:
        """A module of the model as a key is its twin."""
        return self.module(key) if isinstance(key, nn.Module) and id(key) in self._inside else key

    def _held_things(self, value: Any, copy: Any) -> None:
        """Exchange what an object holds as attributes."""
        for name, item in in_slots(value):
            object.__setattr__(copy, name, self._value(item))
        if hasattr(value, "__dict__"):
            vars(copy).update({name: self._value(item) for name, item in vars(value).items()})

    def _holder(self, value: Any) -> Any:
        """A function, a method or an object that holds modules of the model."""
        if isinstance(value, _Route):  # the model is a twin itself
            return _Route(self._value(value.own), value.around, value.copies)
        if isinstance(value, ReferenceType):
            return ref(self._value(value()))
        if isinstance(value, MethodType):
            owner = self._value(value.__self__)
            late = value.__func__ is getattr(type(owner), "forward", None) and "forward" not in vars(value.__self__)
            return partial(_forward_of, owner) if late else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            args, kwargs = self._container(value.args), self._container(value.keywords)
            return type(value)(self._value(value.func), *args, **kwargs)
        if isinstance(value, FunctionType):
            cells = tuple(CellType(self._value(_content(cell))) for cell in value.__closure__ or ())
            defaults = self._value(value.__defaults__)
            copy = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells or None)
            copy.__kwdefaults__ = self._value(value.__kwdefaults__)
            return copy
        if isinstance(value, _LIKE_CONTAINERS):
            return self._like_container(value)
        try:
            holder: Any = object.__new__(type(value))
        except TypeError:  # of a class that is not Python's
            holder = shallow(value)
        self._made[id(value)] = holder
        self._held_things(value, holder)
        return holder

    def _reaches(self, value: Any, depth: int = 0) -> bool:
        """Whether a module of the model can be reached from something, in a few steps."""
        if value is None or type(value) in _ATOMS or depth > _DEEPEST or id(value) in self._apart:
            return False
        if issubclass(type(value), nn.Module):  # a weak proxy of a module says that it is one, too
            return any(id(module) in self._inside for module in value.modules())
        found = any(self._reaches(item, depth + 1) for item in _held_by(value))
        if not found and depth == 0:
            self._apart.add(id(value))
        return found


def _own_script(script: nn.Module) -> nn.Module:
    """A copy of a TorchScript module, in eval mode, that shares its weights."""
    with torch.no_grad():
        copy = deepcopy(script).eval()
    for own, weight in zip(copy.parameters(), script.parameters(), strict=True):
        own.data = weight.data
        own.requires_grad_(weight.requires_grad)
    return copy


def _may_write(script: nn.Module) -> bool:
    """Whether the code of a TorchScript module has statements that write: they may write into the module."""
    found = _WRITES.get(script)
    if found is None:
        graph = getattr(script, "inlined_graph", None)
        found = _WRITES[script] = graph is None or _WRITING.search(str(graph)) is not None
    return found


def _held_by(value: Any) -> Iterable[Any]:
    """What something holds, one step away."""
    if isinstance(value, _Route):
        return (value.own,)
    if isinstance(value, ReferenceType):
        return (value(),)
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if isinstance(value, _LIKE_CONTAINERS):
        if len(value) > _MOST_ITEMS:
            return ()
        own = vars(value).values() if hasattr(value, "__dict__") else ()
        return (*(chain.from_iterable(value.items()) if isinstance(value, Mapping) else value), *own)
    if isinstance(value, (Tensor, type, ModuleType)) or type(value).__module__.partition(".")[0] in _FOREIGN:
        return ()
    if type(value) in (ProxyType, CallableProxyType):
        return ()
    slots = [item for _, item in in_slots(value)]
    return (*slots, *vars(value).values()) if hasattr(value, "__dict__") else slots


def in_slots(value: Any) -> list[tuple[str, Any]]:
    """What an object holds in the `__slots__` of its class, by name."""
    kind: Any = type(value)
    return [(name, getattr(value, name)) for name in _slots(kind) if hasattr(value, name)]


@cache
def _slots(kind: Any) -> list[str]:
    """The names that a class and its bases have in `__slots__`."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for own in found for name in ([own] if isinstance(own, str) else own)]
    return [name for name in names if not name.startswith("__")]


def _as_in_training(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """With its flag on, which keeps a layer from its fused kernel; inner layers have their own flags."""
    dropout = getattr(layer, "dropout", None)
    layer.training = True
    if isinstance(dropout, float):
        layer.dropout = 0.0
    try:
        return forward(*args, **kwargs)
    finally:
        layer.training = False
        if isinstance(dropout, float):
            layer.dropout = dropout


class _Seeing(TorchFunctionMode):
    """Does nothing; a fused kernel is not used where somebody watches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _seen(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Seeing():
        return forward(*args, **kwargs)


def _forward_of(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a layer's `forward` is when it is called: it may be rerouted by then."""
    return layer.forward(*args, **kwargs)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
