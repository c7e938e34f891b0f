"""Pairs: tensors of a mean and a variance, which torch's operators take like any other, each by its rule.

Whoever imports the rules (`propagation_rules`) has them known; an operator without one raises `NoRule`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from latedrop.model.rows import tensors
from latedrop.torch_inside import Operator, operator_of, plain_function, wrapper_tensor

__all__ = ["HALF", "NoRule", "Pair", "aten", "each", "mean_of", "returns", "rule", "variance_of", "widened_value"]

Rule: TypeAlias = Callable[..., Any]
"""`(operator, *its arguments)` -> what the operator returns, with a `Pair` for each random tensor."""

aten: Any = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
_RULES: dict[str, Rule] = {}
_ELEMENTWISE: set[str] = set()


class NoRule(Exception):  # noqa: N818 - never leaves `propagate`, which adds where it was met
    """A pair met an operator that has no rule; the message says which."""


class Pair(Tensor):
    """A tensor of independent random units with means `m` and variances `v`.

    Both are float32 or float64, also where the pair's own dtype, which is what the model sees, is a half. Views of a
    pair hold views of its `m` and `v`, so that what is written through one is seen through the other. `units` is one
    object in all pairs that are functions, element by element, of the same units.
    """

    m: Tensor
    v: Tensor
    units: object

    __torch_function__ = plain_function

    @staticmethod
    def __new__(cls, m: Tensor, v: Any, dtype: torch.dtype | None = None) -> Pair:
        """Lay `v` out in memory as `m` is, so that what is a view of the one is a view of the other."""
        dtype = dtype or m.dtype
        pair: Pair = wrapper_tensor(cls, m, dtype)
        if v.shape != m.shape or v.stride() != m.stride() or v.dtype != m.dtype:
            v = torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=m.device).copy_(v)
        pair.m, pair.v, pair.units = m, v, object()
        return pair

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pair(m={self.m}, v={self.v})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Follow the rule of one operator."""
        dtype = _common_dtype(args, kwargs)
        args, kwargs = each((args, kwargs or {}), widened_value)
        operator = operator_of(func) or Operator(str(func))
        name = operator.name
        if name == "as_strided_":
            return _laid_out(func, *args)
        if operator.written:
            return _in_place(func, operator, args, kwargs)
        result = _rule_of(func, name)(func, *args, **kwargs)
        if dtype in HALF:
            result = each(result, lambda x: Pair(x.m, x.v, dtype) if isinstance(x, Pair) else x)
        pairs = [value for value in args if isinstance(value, Pair)]
        if name in _ELEMENTWISE and all(pair is pairs[0] for pair in pairs):
            result.units = pairs[0].units
        return result


def _common_dtype(args: Any, kwargs: Any) -> torch.dtype:
    """The dtype that the model would see."""
    if kwargs and kwargs.get("dtype") is not None:
        return kwargs["dtype"]  # type: ignore[no-any-return]
    found = [value.dtype for value in tensors(args) if value.is_floating_point()]
    return reduce(torch.promote_types, found)


def widened_value(value: Any) -> Any:
    """A constant in single precision where it is a half."""
    half = isinstance(value, Tensor) and value.dtype in HALF and not isinstance(value, Pair)
    return value.float() if half else value


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change what nested tuples, lists and dicts hold."""
    if type(value) in (tuple, list):
        return type(value)(each(item, change) for item in value)
    return {key: each(item, change) for key, item in value.items()} if type(value) is dict else change(value)


def returns(op: Any) -> int:
    """How many results an operator has."""
    declared = operator_of(op)
    return 1 if declared is None else declared.returns


def _rule_of(func: Any, name: str) -> Rule:
    if name not in _RULES:
        raise NoRule(f"the operator {func}")
    return _RULES[name]


def _in_place(func: Any, operator: Operator, args: Any, kwargs: Any) -> Pair:
    """Follow the rule of the operator that returns a new tensor, and write the result into the first argument."""
    target, plain, overload = args[0], operator.name.removesuffix("_"), operator.overload
    found = _rule_of(func, plain)
    if not isinstance(target, Pair):
        raise NoRule(f"the operator {func}, which writes random values into a constant tensor")
    result = found(getattr(getattr(aten, plain), overload), *args, **kwargs)
    target.m.copy_(result.m)
    target.v.copy_(result.v)
    if plain not in _ELEMENTWISE or any(isinstance(value, Pair) for value in args[1:]):
        target.units = object()
    return target


def _laid_out(func: Any, x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Pair:
    """Other strides along axes of one entry, which a pooling to one pixel sets for channels-last inputs: no change."""
    same = isinstance(x, Pair) and x.shape == tuple(size) and offset is None
    if not same or any(n > 1 and new != old for n, new, old in zip(size, stride, x.m.stride(), strict=True)):
        raise NoRule(f"the operator {func}")
    return x  # type: ignore[no-any-return]


def rule(*names: str, elementwise: bool = False) -> Callable[[Rule], Rule]:
    """Make a function the rule of some operators; `elementwise`: each unit of the result is a function of one unit."""

    def add(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        _ELEMENTWISE.update(names if elementwise else ())
        return function

    return add


def mean_of(value: Any) -> Any:
    """Mean of a pair; all else is its own."""
    return value.m if isinstance(value, Pair) else value


def variance_of(value: Any) -> Any:
    """Variance of a pair; a constant has none; indices and masks stay what they are."""
    if isinstance(value, Pair):
        return value.v
    return torch.zeros_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value
