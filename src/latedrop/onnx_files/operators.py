"""Rules for arithmetic, comparisons, sums and products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from latedrop.onnx_files.emitting import RULES, Emitter, Value, rule
from latedrop.onnx_files.tracing import refuse

__all__: list[str] = []

_UNARY = {
    "abs": "Abs",
    "atan": "Atan",
    "ceil": "Ceil",
    "cos": "Cos",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "log": "Log",
    "neg": "Neg",
    "reciprocal": "Reciprocal",
    "relu": "Relu",
    "round": "Round",
    "sigmoid": "Sigmoid",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "tanh": "Tanh",
}
_TESTS = {"isinf": "IsInf", "isnan": "IsNaN", "logical_not": "Not"}
_BINARY = {"mul": "Mul", "maximum": "Max", "minimum": "Min"}
_COMPARED = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
_REDUCED = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd"}


def _unary(kind: str) -> Any:
    return lambda e, result, x: e.op(kind, e.cast(x, result.dtype))


def _test(kind: str) -> Any:
    return lambda e, result, x: e.op(kind, e.cast(x, torch.bool) if kind == "Not" else x)


def _binary(kind: str) -> Any:
    return lambda e, result, a, b: e.op(kind, e.operand(a, result.dtype), e.operand(b, result.dtype))


def _linear(kind: str) -> Any:
    def combined(e: Emitter, result: Value, a: Any, b: Any, *, alpha: Any = 1) -> Any:
        second = e.operand(b, result.dtype)
        second = second if alpha == 1 else e.times(second, e.number(alpha, result.dtype))
        return e.op(kind, e.operand(a, result.dtype), second)

    return combined


def _compared(kind: str) -> Any:
    def compared(e: Emitter, result: Value, a: Any, b: Any) -> Any:
        dtype = _promoted(a, b)
        dtype = torch.int64 if dtype == torch.bool and kind != "Equal" else dtype
        return e.op(kind, e.operand(a, dtype), e.operand(b, dtype))

    return compared


def _logical(kind: str) -> Any:
    return lambda e, result, a, b: e.op(kind, e.operand(a, torch.bool), e.operand(b, torch.bool))


def _bitwise(kind: str) -> Any:
    def combined(e: Emitter, result: Value, a: Any, b: Any) -> Any:
        if result.dtype != torch.bool:
            refuse(f"with bits of whole numbers ({kind})")
        return e.op(kind, e.operand(a, torch.bool), e.operand(b, torch.bool))

    return combined


def _reduced(kind: str) -> Any:
    def reduced(e: Emitter, result: Value, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
        axes = [dim] if isinstance(dim, int) else list(dim or range(len(x.shape)))
        if not axes:
            return e.cast(x, result.dtype)
        return e.op(kind, e.cast(x, result.dtype), e.constant(axes), keepdims=int(keepdim))

    return reduced


RULES.update({name: _unary(kind) for name, kind in _UNARY.items()})
RULES.update({name: _test(kind) for name, kind in _TESTS.items()})
RULES.update({name: _binary(kind) for name, kind in _BINARY.items()})
RULES.update({"add": _linear("Add"), "sub": _linear("Sub")})
RULES.update({name: _compared(kind) for name, kind in _COMPARED.items()})
RULES.update({name: _logical(kind) for name, kind in _LOGICAL.items()})
RULES.update({"bitwise_and": _bitwise("And"), "bitwise_or": _bitwise("Or")})
RULES.update({name: _reduced(kind) for name, kind in _REDUCED.items()})


def _promoted(a: Any, b: Any) -> torch.dtype:
    """The type in which two are compared."""
    empty = [torch.empty((1,) * len(v.shape), dtype=v.dtype) if isinstance(v, Value) else v for v in (a, b)]
    return torch.result_type(*empty)


@rule("ne")
def _unequal(e: Emitter, result: Value, a: Any, b: Any) -> Any:
    return e.op("Not", RULES["eq"](e, result, a, b))


@rule("bitwise_not")
def _inverse(e: Emitter, result: Value, x: Value) -> Any:
    return e.op("Not", x) if x.dtype == torch.bool else refuse("with bits of whole numbers (Not)")


@rule("div")
def _divided(e: Emitter, result: Value, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    found = e.op("Div", e.operand(a, result.dtype), e.operand(b, result.dtype))
    if rounding_mode is None or (rounding_mode == "trunc" and not result.dtype.is_floating_point):
        return found
    if rounding_mode == "floor" and result.dtype.is_floating_point:
        return e.op("Floor", found)
    return refuse(f"with a division rounded by {rounding_mode!r}")


@rule("fmod")
def _rest(e: Emitter, result: Value, a: Any, b: Any) -> Any:
    return e.op("Mod", e.operand(a, result.dtype), e.operand(b, result.dtype), fmod=1)


@rule("remainder")
def _remainder(e: Emitter, result: Value, a: Any, b: Any) -> Any:
    """Of the sign of the divisor, which ONNX has for whole numbers alone."""
    first, second = e.operand(a, result.dtype), e.operand(b, result.dtype)
    if not result.dtype.is_floating_point:
        return e.op("Mod", first, second)
    rest = e.op("Mod", first, second, fmod=1)
    other = e.op("Less", e.op("Mul", e.op("Sign", rest), e.op("Sign", second)), e.number(0, result.dtype))
    return e.op("Where", other, e.op("Add", rest, second), rest)


@rule("pow")
def _power(e: Emitter, result: Value, a: Any, b: Any) -> Any:
    if b == 2:
        name = e.operand(a, result.dtype)
        return e.times(name, name)
    return e.op("Pow", e.operand(a, result.dtype), e.operand(b, result.dtype))


@rule("rsqrt")
def _inverse_root(e: Emitter, result: Value, x: Value) -> Any:
    return e.op("Reciprocal", e.op("Sqrt", x))


@rule("log1p")
def _log1p(e: Emitter, result: Value, x: Value) -> Any:
    """In double precision, as little is left of small numbers when 1 is added."""
    wide = e.op("Add", e.cast(x, torch.float64), e.number(1.0, torch.float64))
    return e.cast(Value(e.op("Log", wide), (), torch.float64), result.dtype)


@rule("expm1")
def _expm1(e: Emitter, result: Value, x: Value) -> Any:
    wide = e.op("Sub", e.op("Exp", e.cast(x, torch.float64)), e.number(1.0, torch.float64))
    return e.cast(Value(wide, (), torch.float64), result.dtype)


@rule("where")
def _where(e: Emitter, result: Value, condition: Value, a: Any, b: Any) -> Any:
    return e.op("Where", e.cast(condition, torch.bool), e.operand(a, result.dtype), e.operand(b, result.dtype))


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamped(e: Emitter, result: Value, x: Value, low: Any = None, high: Any = None, **named: Any) -> Any:
    low, high = named.get("min", low), named.get("max", high)
    found = e.cast(x, result.dtype)
    if low is not None:
        found = e.op("Max", found, e.operand(low, result.dtype))
    return found if high is None else e.op("Min", found, e.operand(high, result.dtype))


RULES["clamp_max"] = lambda e, result, x, high: RULES["clamp"](e, result, x, None, high)


def _over_booleans(kind: str) -> Any:
    def reduced(e: Emitter, result: Value, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
        whole = e.cast(Value(e.cast(x, torch.bool), x.shape, torch.bool), torch.int64)
        axes = [dim] if isinstance(dim, int) else list(dim or range(len(x.shape)))
        found = e.op(kind, whole, e.constant(axes), keepdims=int(keepdim)) if axes else whole
        return e.cast(Value(found, result.shape, torch.int64), torch.bool)

    return reduced


RULES.update({"any": _over_booleans("ReduceMax"), "all": _over_booleans("ReduceMin")})


def _place_of(kind: str) -> Any:
    def found(e: Emitter, result: Value, x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return refuse(f"with the place of the largest of all numbers ({kind})")
        return e.op(kind, x, axis=dim, keepdims=int(keepdim))

    return found


RULES.update({"argmax": _place_of("ArgMax"), "argmin": _place_of("ArgMin")})


def _extreme(kind: str) -> Any:
    def found(e: Emitter, result: Sequence[Value], x: Value, dim: int, keepdim: bool = False) -> Any:
        value = e.op(f"Reduce{kind}", x, e.constant([dim]), keepdims=int(keepdim))
        return [value, e.op(f"Arg{kind}", x, axis=dim, keepdims=int(keepdim))]

    return found


RULES.update({"max.dim": _extreme("Max"), "min.dim": _extreme("Min")})


@rule("mm", "bmm")
def _product(e: Emitter, result: Value, a: Value, b: Value) -> Any:
    return e.op("MatMul", a, b)


@rule("addmm")
def _affine(e: Emitter, result: Value, c: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return e.op("Gemm", a, b, c, alpha=float(alpha), beta=float(beta))


@rule("cumsum")
def _running_sum(e: Emitter, result: Value, x: Value, dim: int, **_: Any) -> Any:
    return e.op("CumSum", e.cast(x, result.dtype), e.constant(dim))


@rule("var_mean.correction")
def _variance_and_mean(e: Emitter, result: Sequence[Value], x: Value, dim: Any = None, **named: Any) -> Any:
    mean = RULES["mean"](e, result[1], x, dim, named.get("keepdim", False))
    return [_variance(e, result[0], x, dim, **named), mean]


@rule("var.dim")
def _variance_of(e: Emitter, result: Value, x: Value, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _variance(e, result, x, dim, correction=int(unbiased), keepdim=keepdim)


@rule("var.correction")
def _variance(
    e: Emitter, result: Value, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Any:
    axes = list(dim or range(len(x.shape)))
    sizes = [x.shape[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        refuse("with a variance over the rows of a batch")
    count = prod(size for size in sizes if isinstance(size, int))
    off = e.op("Sub", x, e.op("ReduceMean", x, e.constant(axes), keepdims=1))
    squares = e.op("ReduceSum", e.times(off, off), e.constant(axes), keepdims=int(keepdim))
    return e.op("Div", squares, e.number(float(max(count - correction, 0)), x.dtype))
