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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.model.forward import plain_names, tensors

__all__ = ["RECURRENT", "Place", "WeightCall", "WeightCalls", "operator_name", "storage_of", "weight_names"]

Place: TypeAlias = "tuple[int | str, ...]"
"""Where an argument is: its position or keyword, then its index where it is in a list."""

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

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
        self._level = _level()

    def end(self) -> None:
        """Let go of all that was followed."""
        self._running, self.inside, self._fixed = False, 0, {}

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
            if _level() == self._level:  # not in the model's own vmap or grad, where inputs have not their own shape
                args, kwargs = _replaced(args, kwargs, self.before(found))
            result = func(*args, **kwargs)
            self.after(result)
        return result

    def _weight_call(self, operator: str, args: Any, kwargs: Any) -> WeightCall | None:
        rule = _RULES.get(operator)
        roles = rule(_Call(operator, args, kwargs, self._is_fixed)) if rule is not None else None
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
        sources = list(tensors((args, kwargs)))
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
                    whole = tensor if held is None else held.tensor
                    self._fixed[address] = _Held(whole, [_Part.of(whole, first)] if first else [])
        elif changes:
            for tensor in (*sources[:1], *tensors(kwargs.get("out"))):
                self._fixed.pop(storage_of(tensor), None)


def operator_name(func: Any) -> str:
    """The plain name of a torch function, of a tensor's method, or of an operator in an exported program.

    >>> operator_name(torch.matmul), operator_name(Tensor.matmul), operator_name(torch.ops.aten.matmul.default)
    ('matmul', 'matmul', 'matmul')
    """
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.partition("::")[2]
    return getattr(func, "__name__", "")


def storage_of(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None for those without, such as a batched tensor inside `vmap`."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


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
        return cls(source.name, source.weight, source.order, start, start + _extent(tensor), tensor.stride())

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
        offset = int(tensor.storage_offset())
        return next((part.at(offset) for part in self.parts if part.start <= offset < part.end), None)


def _named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    plain = plain_names(model)
    return [(_PARAMETRIZED.sub(r"\1\2", plain(name)), parameter) for name, parameter in model.named_parameters()]


def _own_tensors(model: nn.Module) -> dict[int | None, _Held]:
    found: dict[int | None, _Held] = {}
    for order, (name, parameter) in enumerate(_named_weights(model)):
        start = int(parameter.storage_offset())
        part = _Part(name, name, order, start, start + _extent(parameter), parameter.stride())
        found.setdefault(storage_of(parameter), _Held(parameter, [])).parts.append(part)
    plain_tensors = (value for module in model.modules() for value in vars(module).values())
    for constant in (*model.buffers(), *(value for value in plain_tensors if isinstance(value, Tensor))):
        found.setdefault(storage_of(constant), _Held(constant, []))
    found.pop(None, None)
    return found


def _level() -> int:
    """How many transforms of `torch.func` are on, one inside the other."""
    top = torch._C._functorch.peek_interpreter_stack()
    return 0 if top is None else int(top.level())


def _extent(tensor: Tensor) -> int:
    """How far a tensor reaches in its storage."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _changes_an_argument(func: Any, operator: str, kwargs: Mapping[str, Any]) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return bool(func._schema.is_mutable)
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


@dataclass(frozen=True)
class _Roles:
    """What the arguments of a call are: activations, weights, and the axes of the activations that are summed over."""

    inputs: dict[Place, Any]
    weights: Sequence[Any]
    channels: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_fixed: Callable[[Tensor], bool]

    def place(self, position: int, keyword: str) -> Place:
        return (position,) if position < len(self.args) else (keyword,)

    def get(self, position: int, keyword: str) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(keyword)

    def inputs(self, *names: tuple[int, str]) -> dict[Place, Any]:
        return {self.place(*name): self.get(*name) for name in names}


_Rule: TypeAlias = Callable[[_Call], "_Roles | None"]
_RULES: dict[str, _Rule] = {}


def _rule(*operators: str) -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(operators, rule))
        return rule

    return add


@_rule("linear")
def _linear(call: _Call) -> _Roles:
    return _Roles(call.inputs((0, "input")), [call.get(1, "weight")], (-1,))


@_rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def _convolution(call: _Call) -> _Roles | None:
    weight = call.get(1, "weight")
    return _Roles(call.inputs((0, "input")), [weight], (1 - weight.dim(),)) if isinstance(weight, Tensor) else None


@_rule("bilinear")
def _bilinear(call: _Call) -> _Roles:
    return _Roles(call.inputs((0, "input1"), (1, "input2")), [call.get(2, "weight")], (-1,))


@_rule("multi_head_attention_forward")
def _attention(call: _Call) -> _Roles:
    """One site where the projections begin, as `nn.MultiheadAttention` is."""
    weights = [call.get(5, "in_proj_weight"), call.get(18, "q_proj_weight")]
    return _Roles(call.inputs((0, "query"), (1, "key"), (2, "value")), weights, (-1,))


@_rule(*RECURRENT)
def _recurrent(call: _Call) -> _Roles | None:
    """Padded sequences; packed ones, which have their batch sizes second, are not followed."""
    second, weights = call.get(1, "hx"), call.get(2, "params")
    if isinstance(second, Tensor) and not second.is_floating_point():
        return None
    return _Roles(call.inputs((0, "input")), list(tensors(weights)), (-1,))


@_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(call: _Call) -> _Roles:
    return _Roles(call.inputs((0, "input")), [call.get(2, "w_ih")], (-1,))


_FACTORS = {
    "matmul": ((0, "input"), (1, "other")),
    "mm": ((0, "input"), (1, "mat2")),
    "bmm": ((0, "input"), (1, "mat2")),
    "mv": ((0, "input"), (1, "vec")),
    "dot": ((0, "input"), (1, "tensor")),
    "inner": ((0, "input"), (1, "other")),
    "tensordot": ((0, "a"), (1, "b")),
    "addmm": ((1, "mat1"), (2, "mat2")),
    "addmv": ((1, "mat"), (2, "vec")),
    "addbmm": ((1, "batch1"), (2, "batch2")),
    "baddbmm": ((1, "batch1"), (2, "batch2")),
}


@_rule(*(name for name in _FACTORS if name != "tensordot"))
def _product(call: _Call) -> _Roles | None:
    factors = call.inputs(*_FACTORS[call.operator])
    which = _only_activation(call, factors)
    if which is None:
        return None
    place, other = list(factors)[which], list(factors.values())[1 - which]
    down = which == 1 and call.operator != "inner" and factors[place].dim() > 1
    return _Roles({place: factors[place]}, [other], (-2 if down else -1,))


@_rule("tensordot")
def _tensordot(call: _Call) -> _Roles | None:
    factors = call.inputs(*_FACTORS["tensordot"])
    which = _only_activation(call, factors)
    if which is None:
        return None
    place, other = list(factors)[which], list(factors.values())[1 - which]
    dims: Any = call.args[2:4] if len(call.args) > 3 else call.get(2, "dims")
    dims = 2 if dims is None else dims.tolist() if isinstance(dims, Tensor) else dims
    size = factors[place].dim()
    if isinstance(dims, int):
        dims = range(size - dims, size), range(dims)
    axes = [dims[which]] if isinstance(dims[which], int) else dims[which]
    return _Roles({place: factors[place]}, [other], tuple(axis % size - size for axis in axes))


@_rule("einsum")
def _einsum(call: _Call) -> _Roles | None:
    equation, listed = call.get(0, "equation"), not isinstance(call.get(1, "tensors"), Tensor)
    operands = list(call.args[1]) if listed and len(call.args) > 1 else list(call.args[1:])
    factors: dict[Place, Any] = {(1, i) if listed else (1 + i,): value for i, value in enumerate(operands)}
    which = _only_activation(call, factors)
    if which is None or not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(letter for letter in set(left) if left.count(letter) == 1)
    others = set("".join(terms[:which] + terms[which + 1 :])) - set(right)
    before, _, after = terms[which].partition("...")
    place, value = list(factors)[which], operands[which]
    axes = {letter: i - value.dim() for i, letter in enumerate(before)}
    axes.update({letter: i - len(after) for i, letter in enumerate(after)})
    weights = operands[:which] + operands[which + 1 :]
    return _Roles({place: value}, weights, tuple(axis for letter, axis in axes.items() if letter in others))


def _only_activation(call: _Call, factors: Mapping[Place, Any]) -> int | None:
    """Which of the factors is not fixed; None where not exactly one is, as in attention's scores and merged weights."""
    values = list(factors.values())
    if not all(isinstance(value, Tensor) for value in values):
        return None
    moving = [i for i, value in enumerate(values) if not call.is_fixed(value)]
    return moving[0] if len(moving) == 1 else None
