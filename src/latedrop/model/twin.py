"""A private twin of the user's model: the same weights, and modules, flags, attributes and buffers of its own.

All work is done on a twin: it is in eval mode, its layers are rerouted, what its code writes into itself is thrown away
with it. So there is nothing to put back on the model, and whoever else calls it meanwhile notices nothing.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import cached_property, partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.model.wrappers import bare
from latedrop.torch_inside import shallow_copy, wrapped_attribute

__all__ = ["Around", "release", "reroute", "twin_of"]

_MOST_ITEMS = 10_000  # of a list or dict that is searched for modules
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set)
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""In eval mode these may call no submodule at all, but one fused kernel."""


def twin_of(
    model: nn.Module, *, layers: bool = True, differentiable: bool = False, own_buffers: bool = True
) -> nn.Module:
    """A twin of `model`, without the wrappers of `torch.compile`, `DataParallel` and DDP.

    Without `layers` it runs as the model would in eval mode, by fused kernels and compiled code too; with, every layer
    runs by itself, so that it can be rerouted. With `differentiable` its weights ask for no gradient, so that none is
    computed for them, and recurrent layers run in a way that has a backward pass. Without `own_buffers` it sees, and
    writes, the buffers of the model.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    >>> twin = twin_of(net)
    >>> twin[0].weight is net[0].weight, twin.training, net.training
    (True, False, True)
    """
    return _Copying(model, layers, differentiable, own_buffers).module(model)


Around: TypeAlias = Callable[..., Any]
"""`(forward, *args, **kwargs)` -> what the layer gives."""


def reroute(layer: nn.Module, around: Around, *, copies: bool = True) -> None:
    """The `forward` of a layer of a twin becomes `around(forward, ...)`; that of its copies too, unless told not."""
    vars(layer)["forward"] = _Route(layer.forward, around, copies)


def release(twin: nn.Module) -> None:
    """A twin that is no longer needed lets go of what its layers were rerouted to, and of what that holds."""
    for part in twin.children():
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

    def __init__(self, model: nn.Module, layers: bool, differentiable: bool, own_buffers: bool) -> None:
        self._model = model
        self._layers, self._differentiable, self._own_buffers = layers, differentiable, own_buffers
        self._made: dict[int, Any] = {}

    @cached_property
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
            return deepcopy(module).eval() if any(flags) else module
        copy: Any = shallow_copy(module, self.module, self._weight, self._value, self._made)
        if self._layers and isinstance(module, _FUSED):
            own = type(module).forward in [layer.forward for layer in _FUSED]
            reroute(copy, partial(_as_in_training, copy) if own else _seen)
        elif self._differentiable and isinstance(module, nn.RNNBase):
            reroute(copy, partial(_as_in_training, copy))  # cuDNN has no backward pass of what ran in eval mode
        twin: nn.Module = copy
        return twin

    def _weight(self, weight: Tensor) -> Tensor:
        if not self._differentiable:
            return weight
        found: Tensor = self._made.setdefault(id(weight), weight.detach())
        return found

    def _value(self, value: Any) -> Any:
        """What stands for something that a module holds: a copy, with the modules in it exchanged."""
        if isinstance(value, nn.Module):
            return self.module(value) if id(value) in self._inside else value
        if isinstance(value, Tensor):
            made = self._made.get(id(value))
            if made is None:
                made = value.clone() if self._own_buffers and not isinstance(value, nn.Parameter) else value
                self._made[id(value)] = made
            return made
        if isinstance(value, ReferenceType):
            made = self._made.get(id(value()))
            return value if made is None else ref(made)
        return self._function(value) if callable(value) else self._container(value)

    def _function(self, value: Any) -> Any:
        if isinstance(value, _Route):  # the model is a twin itself
            return _Route(self._function(value.own), value.around, value.copies)
        if isinstance(value, MethodType):
            owner = self._value(value.__self__)
            if owner is value.__self__:
                return value
            late = value.__func__ is getattr(type(owner), "forward", None) and "forward" not in vars(value.__self__)
            return partial(_forward_of, owner) if late else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            args, kwargs = self._container(value.args), self._container(value.keywords)
            return type(value)(value.func, *args, **kwargs) if (args, kwargs) != (value.args, value.keywords) else value
        if isinstance(value, FunctionType) and value.__closure__:
            held = [_content(cell) for cell in value.__closure__]
            if any(isinstance(item, nn.Module) and id(item) in self._inside for item in held):
                cells = tuple(
                    CellType(self.module(item)) if isinstance(item, nn.Module) and id(item) in self._inside else cell
                    for item, cell in zip(held, value.__closure__, strict=True)
                )
                copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
                copy.__kwdefaults__ = value.__kwdefaults__
                return copy
        return value

    def _container(self, value: Any) -> Any:
        if type(value) not in _CONTAINERS or len(value) > _MOST_ITEMS:
            return value
        if id(value) not in self._made:
            if isinstance(value, dict):
                copy = self._made[id(value)] = value.copy()
                copy.update({key: self._value(item) for key, item in value.items()})
            else:
                self._made[id(value)] = type(value)(self._value(item) for item in value)
        return self._made[id(value)]


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
