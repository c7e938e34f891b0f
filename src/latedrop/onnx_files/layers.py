"""Rules for what torch computes in one operator and ONNX too: norms, softmax, activations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from latedrop.onnx_files.emitting import RULES, Emitter, Value, rule
from latedrop.onnx_files.tracing import Affine, Size, refuse

__all__: list[str] = []


@rule("native_layer_norm")
def _layer_norm(
    e: Emitter, result: Sequence[Value], x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    inputs = [x, *_affine(e, x.dtype, list(shape), weight, bias)]
    return e.op("LayerNormalization", *inputs, outputs=3, axis=-len(shape), epsilon=eps)


@rule("native_batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(
    e: Emitter,
    result: Sequence[Value | None],
    x: Value,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    *rest: Any,
) -> Any:
    training = rest[0] if len(rest) == 3 else False
    if training or mean is None or variance is None:
        return _own_statistics(e, x, weight, bias, float(rest[-1]))
    channels = [x.shape[1]]
    found = e.op(
        "BatchNormalization", x, *_affine(e, x.dtype, channels, weight, bias), mean, variance, epsilon=float(rest[-1])
    )
    return [found, *[None] * (len(result) - 1)]


def _own_statistics(e: Emitter, x: Value, weight: Any, bias: Any, eps: float) -> list[str]:
    """Of each channel: instance norms have those of every row as channels of one."""
    axes = [axis for axis in range(len(x.shape)) if axis != 1]
    if x.shape[0] != 1 or any(isinstance(x.shape[axis], Affine) for axis in axes) or weight is not None:
        refuse("that takes statistics of the rows of a batch (native_batch_norm)")
    mean = e.op("ReduceMean", x, e.constant(axes), keepdims=1)
    off = e.op("Sub", x, mean)
    variance = e.op("ReduceMean", e.times(off, off), e.constant(axes), keepdims=1)
    inverse = e.op("Reciprocal", e.op("Sqrt", e.op("Add", variance, e.number(eps, x.dtype))))
    return [e.times(off, inverse), e.reshape(mean, [x.shape[1]]), e.reshape(inverse, [x.shape[1]])]


@rule("native_group_norm")
def _group_norm(
    e: Emitter,
    result: Sequence[Value],
    x: Value,
    weight: Any,
    bias: Any,
    rows: Size,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> Any:
    if any(isinstance(size, Affine) for size in x.shape[1:]):
        refuse("whose channels are the rows of a batch (native_group_norm)")
    each = prod(size for size in x.shape[1:] if isinstance(size, int)) // groups
    flat = e.reshape(x, [x.shape[0], groups, each])
    unit = _affine(e, x.dtype, [each], None, None)
    found, mean, inverse = e.op("LayerNormalization", flat, *unit, outputs=3, axis=-1, epsilon=eps)
    whole = e.reshape(found, x.shape)
    along = [channels, *[1] * (len(x.shape) - 2)]
    if weight is not None:
        whole = e.times(whole, e.reshape(weight, along))
    if bias is not None:
        whole = e.op("Add", whole, e.reshape(bias, along))
    return [whole, *(e.reshape(part, [x.shape[0], groups]) for part in (mean, inverse))]


def _affine(e: Emitter, dtype: torch.dtype, shape: Sequence[Size], weight: Any, bias: Any) -> list[Any]:
    """Scale and shift, 1 and 0 where there are none."""
    if any(isinstance(size, Affine) for size in shape):
        refuse("that normalises over the rows of a batch")
    sizes = [size for size in shape if isinstance(size, int)]
    plain = [torch.full(sizes, value, dtype=dtype).numpy() for value in (1.0, 0.0)]
    given = zip((weight, bias), plain, strict=True)
    return [e.constant(other, None) if part is None else part for part, other in given]


def _softmax(kind: str) -> Any:
    return lambda e, result, x, dim, half: e.op(kind, e.cast(x, result.dtype), axis=dim)


RULES.update({"_softmax": _softmax("Softmax"), "_log_softmax": _softmax("LogSoftmax")})


@rule("gelu")
def _gelu(e: Emitter, result: Value, x: Value, *, approximate: str = "none") -> Any:
    half, one = e.number(0.5, x.dtype), e.number(1.0, x.dtype)
    if approximate == "tanh":
        cube = e.times(e.times(x, x), x)
        inner = e.op("Add", x, e.times(cube, e.number(0.044715, x.dtype)))
        bent = e.op("Tanh", e.times(inner, e.number((2 / torch.pi) ** 0.5, x.dtype)))
    else:
        bent = e.op("Erf", e.times(x, e.number(0.5**0.5, x.dtype)))
    return e.times(e.times(x, half), e.op("Add", bent, one))


@rule("elu")
def _elu(e: Emitter, result: Value, x: Value, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Any:
    if input_scale != 1:
        refuse("with an elu of scaled inputs")
    found = e.op("Elu", x, alpha=float(alpha))
    return found if scale == 1 else e.times(found, e.number(scale, x.dtype))


@rule("leaky_relu")
def _leaky_relu(e: Emitter, result: Value, x: Value, slope: Any = 0.01) -> Any:
    return e.op("LeakyRelu", x, alpha=float(slope))


@rule("linalg_vector_norm")
def _norm(e: Emitter, result: Value, x: Value, order: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    if order != 2:
        refuse(f"with a norm of order {order} (linalg_vector_norm)")
    axes = [dim] if isinstance(dim, int) else list(dim or range(len(x.shape)))
    return e.op("Sqrt", e.op("ReduceSum", e.times(x, x), e.constant(axes), keepdims=int(keepdim)))
