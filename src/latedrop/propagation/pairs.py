"""Pairs: tensors of a mean and a variance, which torch's operators take like any other tensor, each by its rule.

The rules register themselves when `rules` is imported; an operator without one raises `NoRule`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from latedrop.data.rows import tensors
from latedrop.torch_private import Operator, operator_of, plain_function, wrapper_tensor

__all__ = ["NoRule", "Pair", "aten", "declared", "each", "has_pair", "mean_of", "rule", "variance_of", "widened"]

Rule: TypeAlias = Callable[..., Any]
"""`(operator, *its arguments)` -> what the operator returns, with a `Pair` for each random tensor."""

aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_RULES: dict[str, Rule] = {}
_ELEMENTWISE: set[str] = set()
_Function = TypeVar("_Function", bound=Rule)


class NoRule(Exception):  # noqa: N818 - never leaves `propagate`, which adds where it was met
    """A pair met an operator that has no rule; the message says which."""


class Pair(Tensor):
    """A tensor of independent random units with means `m` and variances `v`.

    Both are float32 or float64, also where the dtype of the pair, which is what the model sees, is a half. Views of a
    pair hold views of its `m` and `v`, so that what is written through one is seen through the other. `units` is one
    object in all pairs that are functions, element by element, of the same units.
    """

    m: Tensor
    v: Tensor
    units: object

    __torch_function__ = plain_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, m: Tensor, v: Any, dtype: torch.dtype | None = None) -> Pair:
        """Lay `v` out in memory as `m` is, so that what is a view of the one is a view of the other."""
        pair: Pair = wrapper_tensor(cls, m, dtype or m.dtype)
        if v.shape != m.shape or v.stride() != m.stride() or v.dtype != m.dtype:
            v = torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=m.device).copy_(v)
        pair.m, pair.v, pair.units = m, v, object()
        return pair

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pair(m={self.m}, v={self.v})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Follow the rule of one operator."""
        kwargs = kwargs or {}
        dtypes = [value.dtype for value in tensors(args) if value.is_floating_point()]
        dtype = kwargs.get("dtype") or reduce(torch.promote_types, dtypes)  # what the model would see
        args, kwargs = each((args, kwargs), widened)
        operator = declared(func)
        name = operator.name.removesuffix("_") if operator.written else operator.name
        if name not in _RULES:
            raise NoRule(f"the operator {func}")
        if operator.written:
            return _in_place(func, name, operator.overload, args, kwargs)
        result = _RULES[name](func, *args, **kwargs)
        if dtype in _HALF:
            result = each(result, lambda x: Pair(x.m, x.v, dtype) if isinstance(x, Pair) else x)
        pairs = [value for value in args if isinstance(value, Pair)]
        if name in _ELEMENTWISE and all(pair is pairs[0] for pair in pairs):
            result.units = pairs[0].units
        return result


def rule(*names: str, elementwise: bool = False) -> Callable[[_Function], _Function]:
    """Make a function the rule of some operators; `elementwise`: each unit of the result is a function of one unit."""

    def add(function: _Function) -> _Function:
        _RULES.update(dict.fromkeys(names, function))
        _ELEMENTWISE.update(names if elementwise else ())
        return function

    return add


def mean_of(value: Any) -> Any:
    """Return the mean of a pair, and anything else as it is."""
    return value.m if isinstance(value, Pair) else value


def variance_of(value: Any) -> Any:
    """Return the variance of a pair, and 0 for a constant tensor; anything else stays as it is."""
    return value.v if isinstance(value, Pair) else torch.zeros_like(value) if isinstance(value, Tensor) else value


def widened(value: Any) -> Any:
    """Return a constant tensor in single precision where it is a half, and anything else as it is."""
    half = isinstance(value, Tensor) and value.dtype in _HALF and not isinstance(value, Pair)
    return value.float() if half else value


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every entry of nested tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return type(value)(each(item, change) for item in value)
    return {key: each(item, change) for key, item in value.items()} if type(value) is dict else change(value)


def has_pair(*values: Any) -> bool:
    """Return True if a pair is among some values or inside them."""
    return any(isinstance(tensor, Pair) for tensor in tensors(values))


def declared(func: Any) -> Operator:
    """Return the declaration of an operator."""
    operator = operator_of(func)
    if operator is None:
        raise NoRule(f"the operator {func}")
    return operator


def _in_place(func: Any, name: str, overload: str, args: Any, kwargs: Any) -> Pair:
    """Follow the rule of the operator that returns a new tensor, and write the result into the first argument."""
    target = args[0]
    if not isinstance(target, Pair):
        raise NoRule(f"the operator {func}, which writes random values into a constant tensor")
    result = _RULES[name](getattr(getattr(aten, name), overload), *args, **kwargs)
    target.m.copy_(result.m)
    target.v.copy_(result.v)
    if name not in _ELEMENTWISE or any(isinstance(value, Pair) for value in args[1:]):
        target.units = object()
    return target
