"""Weights without a module: the calls of torch in which an activation meets a parameter.

`F.linear(h, w)`, `h @ w`, a convolution, an einsum: each does what a weight layer does, wherever it is called. A mode
sees every torch function of a forward pass and follows what is computed from parameters and constants alone. Such a
tensor is *fixed*; a call in which a fixed tensor with a parameter in it meets one that is not fixed is a *weight call*,
named after the parameter:

    F.linear(h, model.w)            "w"
    h @ model.stack[3].T            "stack[3]", as it starts at that index
    F.linear(h, g * v / v.norm())   "g", the first of the parameters that the weight is made from
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.model.rows import tensors
from latedrop.model.storages import extent, storage_of
from latedrop.model.weight_rules import RULES, FunctionCall, Place
from latedrop.model.wrappers import plain_names
from latedrop.torch_inside import inmost, operator_of, transforms

__all__ = ["WeightCall", "WeightCalls", "operator_name", "weight_names"]

_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original\d*$")
_LIKE_ANOTHER = ("to", "type_as", "expand_as", "view_as", "reshape_as")  # of the second only shape or dtype count
_LOOKUPS = ("embedding", "embedding_bag")
_PICKS = ("__getitem__", "index", "index_select", "gather", "take", "take_along_dim")


@dataclass(frozen=True)
class WeightCall:
    """One call of a torch function that brings activations and a weight together.

    Attributes:
        name: of the weight: the parameter's, and where in it the weight starts.
        weight: the parameter's name.
        layer: the function's name.
        inputs: the activations, by place.
        channels: the axes of an activation, from the end, that are summed over.
    """

    name: str
    weight: str
    layer: str
    inputs: dict[Place, Tensor]
    channels: tuple[int, ...]


class WeightCalls(TorchFunctionMode):
    """Tells of every weight call between `begin` and `end`, but for those that weight layers make themselves.

    Args:
        model: whose parameters are the weights.
        before: takes a weight call, and gives new activations by place.
        after: takes what came out of a weight: the result of a weight call, or of a lookup in a table.

    Attributes:
        inside: how many weight layers are running now, one inside the other; what they call is not followed.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[WeightCall], Mapping[Place, Any]],
        after: Callable[[Any], None] = lambda result: None,
    ) -> None:
        super().__init__()
        self.before, self.after = before, after
        self._running, self.inside, self._level = False, 0, 0
        self._own = _own_tensors(model)
        self._fixed: dict[int | None, _Held] = {}

    def begin(self) -> None:
        """Start to follow a forward pass."""
        self._running, self.inside, self._fixed = True, 0, dict(self._own)
        self._level = transforms()

    def end(self) -> None:
        """Let go of all that was followed."""
        self._running, self.inside, self._fixed = False, 0, {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A weight layer runs inside: its own calls are none, as it is a site of its own."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._running or self.inside:
            return func(*args, **kwargs)
        operator = operator_name(func)
        found = self._weight_call(operator.removesuffix("_"), args, kwargs)
        if found is None:
            result = func(*args, **kwargs)
            self._follow(func, operator, args, kwargs, result)
        else:
            if transforms() == self._level:  # inputs have their own shape: no vmap of the model's own
                args, kwargs = _replaced(args, kwargs, self.before(found))
            result = func(*args, **kwargs)
            self.after(result)
            if _changes_an_argument(func, operator, kwargs):
                self._unfix(args, kwargs)
        return result

    def _weight_call(self, operator: str, args: Any, kwargs: Any) -> WeightCall | None:
        rule = RULES.get(operator)
        roles = rule(FunctionCall(operator, args, kwargs, self._is_fixed)) if rule is not None else None
        if roles is None:
            return None
        inputs = {place: v for place, v in roles.inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        parts = [part for part in map(self._part, roles.weights) if part is not None]
        if not parts or not inputs or not roles.channels:
            return None
        return WeightCall(parts[0].name, parts[0].weight, operator, inputs, roles.channels)

    def _is_fixed(self, value: Tensor) -> bool:
        return storage_of(value) in self._fixed

    def _part(self, value: Any) -> _Part | None:
        held = self._fixed.get(storage_of(value)) if isinstance(value, Tensor) else None
        return held.part(value) if held is not None else None

    def _follow(self, func: Any, operator: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what any other call makes of fixed tensors."""
        changes = _changes_an_argument(func, operator, kwargs)
        if not changes and not isinstance(result, (Tensor, tuple, list)):
            return
        sources = tensors((args, kwargs))
        fixed = all(map(self._is_fixed, sources[:1] if operator in _LIKE_ANOTHER else sources))
        if operator in _LOOKUPS or (operator in _PICKS and not fixed and self._part(sources[0]) is not None):
            self.after(result)
        elif fixed:
            parts = [part for part in map(self._part, sources) if part is not None]
            first = min(parts, key=lambda part: part.order, default=None)
            for tensor in (*tensors(result), *(sources[:1] if changes else ())):
                address = storage_of(tensor)
                held = self._fixed.get(address)
                if address is not None and (held is None or (changes and not held.parts)):
                    whole = inmost(tensor) if held is None else held.tensor
                    self._fixed[address] = _Held(whole, [_Part.of(whole, first)] if first else [])
        elif changes:
            self._unfix(args, kwargs)

    def _unfix(self, args: Any, kwargs: Any) -> None:
        """What a call has written into is fixed no more."""
        for tensor in (*tensors((args, kwargs))[:1], *tensors(kwargs.get("out"))):
            self._fixed.pop(storage_of(tensor), None)


def operator_name(func: Any) -> str:
    """The plain name of a torch function, of a tensor's method, or of an operator in an exported program.

    >>> import torch
    >>> operator_name(torch.matmul), operator_name(Tensor.matmul), operator_name(torch.ops.aten.matmul.default)
    ('matmul', 'matmul', 'matmul')
    """
    declared = operator_of(func)
    return getattr(func, "__name__", "") if declared is None else declared.name


def weight_names(model: nn.Module) -> set[str]:
    """The names that the model's parameters have as weights: less what wrappers and parametrizations add."""
    return {name for name, _ in _named_weights(model)}


@dataclass(frozen=True)
class _Part:
    """A stretch of a storage that belongs to one weight: `order` is that of the parameter in its model."""

    name: str
    weight: str
    order: int
    start: int
    end: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, source: _Part) -> _Part:
        """What was computed from another weight."""
        start = int(tensor.storage_offset())
        return cls(source.name, source.weight, source.order, start, start + extent(tensor), tensor.stride())

    def at(self, offset: int) -> _Part:
        """The weight that starts at an offset of the storage."""
        if offset == self.start:
            return self
        rest, index = offset - self.start, [0] * len(self.strides)
        for axis in sorted(range(len(index)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis]:
                index[axis], rest = divmod(rest, self.strides[axis])
        while index and index[-1] == 0:
            index.pop()
        return replace(self, name=f"{self.name}[{','.join(map(str, index))}]")


class _Held:
    """A fixed storage, kept so that its address is not used again, and the weights in it: none in a constant."""

    def __init__(self, tensor: Tensor, parts: Sequence[_Part]) -> None:
        self.tensor, self.parts = tensor.detach(), list(parts)

    def part(self, tensor: Tensor) -> _Part | None:
        """The weight that a view of the storage is, or is cut from."""
        offset = int(inmost(tensor).storage_offset())
        return next((part.at(offset) for part in self.parts if part.start <= offset < part.end), None)


def _named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    plain = plain_names(model)
    return [(_PARAMETRIZED.sub(r"\1\2", plain(name)), parameter) for name, parameter in model.named_parameters()]


def _own_tensors(model: nn.Module) -> dict[int | None, _Held]:
    found: dict[int | None, _Held] = {}
    for order, (name, parameter) in enumerate(_named_weights(model)):
        start = int(parameter.storage_offset())
        part = _Part(name, name, order, start, start + extent(parameter), parameter.stride())
        found.setdefault(storage_of(parameter), _Held(parameter, [])).parts.append(part)
    plain_tensors = (value for module in model.modules() for value in vars(module).values())
    for constant in (*model.buffers(), *(value for value in plain_tensors if isinstance(value, Tensor))):
        found.setdefault(storage_of(constant), _Held(constant, []))
    found.pop(None, None)
    return found


def _changes_an_argument(func: Any, operator: str, kwargs: Mapping[str, Any]) -> bool:
    declared = operator_of(func)
    if declared is not None:
        return bool(declared.written)
    named = operator == "__setitem__" or (operator.endswith("_") and not operator.endswith("__"))
    return named or kwargs.get("out") is not None


def _replaced(args: Any, kwargs: Any, new: Mapping[Place, Any]) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = list(args), dict(kwargs)
    for (key, *inner), value in new.items():
        where: Any = kwargs if isinstance(key, str) else args
        if inner:
            items = list(where[key])
            items[int(inner[0])] = value
            value = items
        where[key] = value
    return args, kwargs
