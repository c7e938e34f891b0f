"""Operators that `torch.onnx` has no translation for, in terms of those that it has.

The gradient of a convolution with respect to its input is a transposed convolution with the same weights, and the other
way round. Max pooling adds each gradient where the maximum was. Adaptive pooling and resizing are products with
constant matrices along each axis, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.torch_private import decompositions_of

__all__ = ["decompositions", "refuse"]

aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {}


def refuse(reason: str, error: Exception | None = None) -> NoReturn:
    """Raise the error that says why a model cannot be written."""
    raise ArgumentError(
        f"expected a model that can be written as an ONNX file; found one {reason}. Deploy it with torch: save the "
        "calibration, and load both there."
    ) from error


@cache
def decompositions() -> dict[Any, Any]:
    """How torch writes most operators and all derivatives by simpler ones, with the rules of this file."""
    double = decompositions_of([aten.hardtanh, aten.native_group_norm, aten.native_layer_norm])
    by_rules = {name: _in_double(rule) for name, rule in double.items()}
    return {**torch.export.default_decompositions(), **by_rules, **_RULES}


def _in_double(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule for tensors in double precision alone, for which onnxruntime lacks the operator."""
    return lambda x, *args, **kwargs: rule(x, *args, **kwargs) if x.dtype == torch.float64 else NotImplemented


def _rule(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(operators, function))
        return function

    return register


@_rule(aten.convolution_backward.default)
def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, None, None]:
    _, stride, padding, dilation, transposed, _, groups, mask = options
    if mask[1] or mask[2]:
        refuse("that differentiates with respect to weights (convolution_backward)")
    stride, padding, dilation = (_each(sizes, weight.dim() - 2) for sizes in (stride, padding, dilation))
    missing = [0] * len(stride)
    if not transposed:
        shapes = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        missing = [size - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for size, out, k, s, p, d in shapes]
    back = aten.convolution(gradient, weight, None, stride, padding, dilation, not transposed, missing, groups)
    return back, None, None


def _each(sizes: Sequence[int], axes: int) -> list[int]:
    """Return one number per axis; torch allows one for all."""
    return list(sizes) * (axes if len(sizes) == 1 else 1)


@_rule(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def _max_pool_backward(gradient: Tensor, x: Tensor, *options: Any) -> Tensor:
    places: Tensor = options[-1]
    flat = gradient.new_zeros(*x.shape[:2], prod(x.shape[2:]))
    return flat.scatter_add(2, places.flatten(2), gradient.flatten(2)).view(x.shape)


@_rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool_backward(gradient: Tensor, x: Tensor, kernel: Sequence[int], *options: Any) -> Tensor:
    stride, padding, ceil_mode, count_include_pad, divisor = options
    axes = x.dim() - 2
    kernel, stride, padding = (_each(sizes, axes) for sizes in (kernel, stride or kernel, padding))
    if ceil_mode or divisor is not None or (any(padding) and not count_include_pad):
        refuse("with an average pooling that rounds sizes up, has its own divisor or does not count its padding")
    channels = x.shape[1]
    even = x.new_full((channels, 1, *kernel), 1 / prod(kernel))
    shapes = zip(x.shape[2:], gradient.shape[2:], kernel, stride, padding, strict=True)
    missing = [size - ((out - 1) * s - 2 * p + k) for size, out, k, s, p in shapes]
    return aten.convolution(gradient, even, None, stride, padding, [1] * axes, True, missing, channels)  # type: ignore[no-any-return]


@_rule(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_pool_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return _transposed(gradient, x.shape, lambda x: aten._adaptive_avg_pool2d(x, gradient.shape[2:]))


def _resize_backward(resize: Any, gradient: Tensor, size: Any, shape: Sequence[int], *options: Any) -> Tensor:
    return _transposed(gradient, shape, lambda x: resize(x, size, *options))


for _name in ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"):
    _RULES[getattr(aten, f"{_name}_backward").default] = partial(_resize_backward, getattr(aten, _name))


def _transposed(gradient: Tensor, shape: Sequence[int], resize: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a resizing along both axes, `A x B'`: its matrices are what it makes of unit vectors."""
    height, width = (torch.eye(size, dtype=gradient.dtype, device=gradient.device) for size in shape[2:])
    rows = resize(height[None, :, :, None].expand(1, -1, -1, len(width)))[0, :, :, 0]
    columns = resize(width[None, :, None, :].expand(1, -1, len(height), -1))[0, :, 0]
    return rows @ gradient @ columns.T


@_rule(aten.unfold_backward.default)
def _unfold_backward(gradient: Tensor, shape: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    axis = dim % len(shape)
    places = [step * i + j for i in range(gradient.shape[axis]) for j in range(size)]
    windows = gradient.movedim(-1, axis + 1).flatten(axis, axis + 1)
    index = torch.tensor(places, device=gradient.device)
    return gradient.new_zeros(tuple(shape)).index_add(axis, index, windows)


@_rule(aten.embedding.default)
def _embedding(weight: Tensor, index: Tensor, *_: Any) -> Tensor:
    """Send an index below 0 beyond the end: an error, as in torch, where ONNX would count from the end."""
    beyond = torch.tensor(weight.shape[0], dtype=index.dtype, device=index.device)
    return weight[torch.where(index < 0, beyond, index)]


@_rule(aten.clamp.default)
def _clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Any:
    """Compare in double precision, for whose bounds `torch.onnx` writes a graph that is not sorted."""
    if x.dtype != torch.float64:
        return NotImplemented
    x = x if low is None else torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


@_rule(aten.log1p.default)
def _log1p(x: Tensor) -> Tensor:
    """Compute in double precision, as adding 1 leaves little of small numbers."""
    return (x.double() + 1).log().to(x.dtype)


@_rule(aten.expm1.default)
def _expm1(x: Tensor) -> Tensor:
    return (x.double().exp() - 1).to(x.dtype)
