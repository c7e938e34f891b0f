"""Which arguments of a torch function are activations, which are weights, and along which axes they are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from latedrop.model.rows import tensors

__all__ = ["RECURRENT", "RULES", "FunctionCall", "Place", "Roles"]

Place: TypeAlias = "tuple[int | str, ...]"
"""Where an argument is: its position or keyword, then its index where it is in a list."""

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Roles:
    """What the arguments of a call are: activations, weights, and the axes of the activations that are summed over."""

    inputs: dict[Place, Any]
    weights: Sequence[Any]
    channels: tuple[int, ...]


@dataclass(frozen=True)
class FunctionCall:
    """A call of a torch function; `is_fixed` tells tensors that were made from parameters and constants alone."""

    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_fixed: Callable[[Tensor], bool]

    def place(self, position: int, keyword: str) -> Place:
        """Where an argument stands."""
        return (position,) if position < len(self.args) else (keyword,)

    def get(self, position: int, keyword: str) -> Any:
        """An argument."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(keyword)

    def inputs(self, *names: tuple[int, str]) -> dict[Place, Any]:
        """Some arguments by place."""
        return {self.place(*name): self.get(*name) for name in names}


_Rule: TypeAlias = Callable[[FunctionCall], "Roles | None"]
RULES: dict[str, _Rule] = {}
"""By the plain name of the function."""


def _rule(*operators: str) -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(operators, rule))
        return rule

    return add


@_rule("linear")
def _linear(call: FunctionCall) -> Roles:
    return Roles(call.inputs((0, "input")), [call.get(1, "weight")], (-1,))


@_rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def _convolution(call: FunctionCall) -> Roles | None:
    weight = call.get(1, "weight")
    return Roles(call.inputs((0, "input")), [weight], (1 - weight.dim(),)) if isinstance(weight, Tensor) else None


@_rule("bilinear")
def _bilinear(call: FunctionCall) -> Roles:
    return Roles(call.inputs((0, "input1"), (1, "input2")), [call.get(2, "weight")], (-1,))


@_rule("multi_head_attention_forward")
def _attention(call: FunctionCall) -> Roles:
    """One site where the projections begin, as `nn.MultiheadAttention` is."""
    weights = [call.get(5, "in_proj_weight"), call.get(18, "q_proj_weight")]
    return Roles(call.inputs((0, "query"), (1, "key"), (2, "value")), weights, (-1,))


@_rule(*RECURRENT)
def _recurrent(call: FunctionCall) -> Roles | None:
    """Padded sequences; packed ones, which have their batch sizes second, are not followed."""
    second, weights = call.get(1, "hx"), call.get(2, "params")
    if isinstance(second, Tensor) and not second.is_floating_point():
        return None
    return Roles(call.inputs((0, "input")), tensors(weights), (-1,))


@_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(call: FunctionCall) -> Roles:
    return Roles(call.inputs((0, "input")), [call.get(2, "w_ih")], (-1,))


_FACTORS = {
    "matmul": ((0, "input"), (1, "other")),
    "linalg_matmul": ((0, "input"), (1, "other")),
    "linalg_vecdot": ((0, "x"), (1, "y")),
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
def _product(call: FunctionCall) -> Roles | None:
    factors = call.inputs(*_FACTORS[call.operator])
    which = _only_activation(call, factors)
    if which is None:
        return None
    place, other = list(factors)[which], list(factors.values())[1 - which]
    down = which == 1 and call.operator != "inner" and factors[place].dim() > 1
    return Roles({place: factors[place]}, [other], (-2 if down else -1,))


@_rule("tensordot")
def _tensordot(call: FunctionCall) -> Roles | None:
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
    return Roles({place: factors[place]}, [other], tuple(axis % size - size for axis in axes))


@_rule("chain_matmul", "linalg_multi_dot")
def _chain(call: FunctionCall) -> Roles | None:
    """A row of matrices, of which one is no weight: it is multiplied from the right, or where it is last, the left."""
    listed = bool(call.args) and not isinstance(call.args[0], Tensor)
    operands = list(call.args[0]) if listed else list(call.args) or list(call.kwargs.get("tensors", ()))
    factors: dict[Place, Any] = {(0, i) if listed else (i,): value for i, value in enumerate(operands)}
    which = _only_activation(call, factors)
    if which is None or not call.args:
        return None
    last = which == len(operands) - 1 and operands[which].dim() > 1
    weights = operands[:which] + operands[which + 1 :]
    return Roles({list(factors)[which]: operands[which]}, weights, (-2 if last else -1,))


@_rule("einsum")
def _einsum(call: FunctionCall) -> Roles | None:
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
    return Roles({place: value}, weights, tuple(axis for letter, axis in axes.items() if letter in others))


def _only_activation(call: FunctionCall, factors: Mapping[Place, Any]) -> int | None:
    """Which of the factors is not fixed; None where not exactly one is, as in attention's scores and merged weights."""
    values = list(factors.values())
    if not all(isinstance(value, Tensor) for value in values):
        return None
    moving = [i for i, value in enumerate(values) if not call.is_fixed(value)]
    return moving[0] if len(moving) == 1 else None
