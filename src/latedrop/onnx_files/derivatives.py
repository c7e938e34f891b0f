"""Operators that `torch.onnx` has no translation for, in terms of those that it has.

The gradient of a convolution with respect to its input is a transposed convolution with the same weights, and the other
way round. Max pooling adds each gradient where the maximum was. Average pooling and resizing are products with constant
matrices along each axis, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.torch_private import decompositions_of

__all__ = ["decompositions", "refuse"]

aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {}
_WITH_NUMBERS = (aten.elu, aten.hardtanh, aten.leaky_relu, aten.native_group_norm, aten.native_layer_norm)
"""Operators that ONNX has with plain numbers, which it holds in single precision."""


def refuse(reason: str, error: Exception | None = None) -> NoReturn:
    """Raise the error that says why a model cannot be written."""
    raise ArgumentError(
        f"expected a model that can be written as an ONNX file; found one {reason}. Deploy it with torch: save the "
        "calibration, and load both there."
    ) from error


@cache
def decompositions() -> dict[Any, Any]:
    """How torch writes most operators and all derivatives by simpler ones, with the rules of this file."""
    double = {name: _in_double(rule) for name, rule in decompositions_of(list(_WITH_NUMBERS)).items()}
    return {**torch.export.default_decompositions(), **double, **_RULES}


def _in_double(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule for tensors in double precision alone."""
    return lambda x, *args, **kwargs: rule(x, *args, **kwargs) if x.dtype == torch.float64 else NotImplemented


def _rule(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(operators, function))
        return function

    return register


@_rule(aten.convolution_backward.default)
def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    _: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor, None, None]:
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
def _avg_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    axes = x.dim() - 2
    kernel, stride, padding = (_each(sizes, axes) for sizes in (kernel, stride or kernel, padding))
    if ceil_mode or divisor is not None or (any(padding) and not count_include_pad):
        refuse("with an average pooling that rounds sizes up, has its own divisor or does not count its padding")
    channels = x.shape[1]
    even = x.new_full((channels, 1, *kernel), 1 / prod(kernel))
    shapes = zip(x.shape[2:], gradient.shape[2:], kernel, stride, padding, strict=True)
    missing = [size - ((out - 1) * s - 2 * p + k) for size, out, k, s, p in shapes]
    return aten.convolution(gradient, even, None, stride, padding, [1] * axes, True, missing, channels)  # type: ignore[no-any-return]


@_rule(aten._adaptive_avg_pool2d.default)
def _adaptive_pool(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return _along_axes(x, [_pooling(x, size, out).T for size, out in zip(x.shape[2:], sizes, strict=True)])


@_rule(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_pool_backward(gradient: Tensor, x: Tensor) -> Tensor:
    sizes = zip(x.shape[2:], gradient.shape[2:], strict=True)
    return _along_axes(gradient, [_pooling(x, size, out) for size, out in sizes])


def _pooling(like: Tensor, size: int, out: int) -> Tensor:
    """Return the matrix `(out, size)` of the means over the windows of adaptive pooling."""
    rows = []
    for i in range(out):
        start, end = i * size // out, -(-(i + 1) * size // out)
        rows.append([1 / (end - start) if start <= j < end else 0.0 for j in range(size)])
    return _constant(rows, like)


@_rule(aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default)
def _nearest_backward(gradient: Tensor, size: Any, shape: Sequence[int], *scales: Any) -> Tensor:
    times = [out // small for out, small in zip(gradient.shape[2:], shape[2:], strict=True)]
    if [small * factor for small, factor in zip(shape[2:], times, strict=True)] != list(gradient.shape[2:]):
        refuse("that is enlarged by other than whole numbers (upsample_nearest2d_backward)")
    windows = gradient.reshape(*shape[:2], shape[2], times[0], shape[3], times[1])
    return windows.sum((3, 5))


@_rule(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec)
def _bilinear(x: Tensor, size: Any, corners: bool, *scales: Any) -> Tensor:
    factors = scales[0] if len(scales) == 1 else scales
    sizes = [int(small * factor) for small, factor in zip(x.shape[2:], factors, strict=True)] if size is None else size
    _check_whole(x.shape[2:], sizes, factors)
    matrices = [_interpolation(x, small, out, corners).T for small, out in zip(x.shape[2:], sizes, strict=True)]
    return _along_axes(x, matrices)


@_rule(aten.upsample_bilinear2d_backward.default)
def _bilinear_backward(gradient: Tensor, size: Any, shape: Sequence[int], corners: bool, *scales: Any) -> Tensor:
    _check_whole(shape[2:], gradient.shape[2:], scales)
    sizes = zip(shape[2:], gradient.shape[2:], strict=True)
    return _along_axes(gradient, [_interpolation(gradient, small, out, corners) for small, out in sizes])


def _check_whole(small: Sequence[int], out: Sequence[int], factors: Any) -> None:
    for before, after, factor in zip(small, out, factors or (None, None), strict=True):
        if factor is not None and before * factor != after:
            refuse("that is enlarged by a factor that gives no whole size (upsample_bilinear2d)")


def _interpolation(like: Tensor, small: int, out: int, corners: bool) -> Tensor:
    """Return the matrix `(out, small)` that enlarges a line."""
    rows = []
    for i in range(out):
        scale = (small - 1) / max(out - 1, 1) if corners else small / out
        at = i * scale if corners else max((i + 0.5) * scale - 0.5, 0.0)
        low = min(int(at), small - 1)
        row = [0.0] * small
        row[low] += 1 - (at - low)
        row[min(low + 1, small - 1)] += at - low
        rows.append(row)
    return _constant(rows, like)


def _constant(rows: list[list[float]], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=like.dtype, device=like.device)


def _along_axes(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply the last two axes by matrices `(in, out)`."""
    return ((x @ matrices[1]).transpose(2, 3) @ matrices[0]).transpose(2, 3)


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
    """Compare in double precision, for whose bounds ONNX takes tensors that `onnxscript` mixes up."""
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


@_rule(aten.as_strided.default)
def _as_strided(x: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Tensor:
    _check_strides(sizes, strides, offset)
    return x.reshape(tuple(sizes))


@_rule(aten.as_strided_scatter.default)
def _as_strided_scatter(
    x: Tensor, part: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | None = None
) -> Tensor:
    _check_strides(sizes, strides, offset)
    return part.reshape(x.shape)


def _check_strides(sizes: Sequence[int], strides: Sequence[int], offset: int | None) -> None:
    """Allow another shape of the same numbers, as group norms and pools ask for."""
    row_major = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    if offset or any(a != b for a, b, size in zip(strides, row_major, sizes, strict=True) if size != 1):
        refuse("that looks at memory in an order of its own (as_strided)")
