"""Rules for convolutions and pooling, forward and backward.

The gradient of a convolution with respect to its input is a transposed convolution with the same weights, and the other
way round; of max pooling, what comes back is added where the maximum was; of average pooling it is spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from latedrop.onnx_files.emitting import Emitter, Value, rule
from latedrop.onnx_files.tracing import Affine, Size, refuse

__all__: list[str] = []


@rule("convolution")
def _convolution(
    e: Emitter,
    result: Value,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    options = _options(stride, padding, dilation, groups, weight)
    inputs = [x, weight] if bias is None else [x, weight, bias]
    if transposed:
        return e.op("ConvTranspose", *inputs, **options, output_padding=_each(output_padding, weight))
    return e.op("Conv", *inputs, **options)


@rule("convolution_backward")
def _back(
    e: Emitter,
    result: Sequence[Value | None],
    gradient: Value,
    x: Value,
    weight: Value,
    _: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    if mask[1] or mask[2]:
        refuse("that differentiates with respect to weights (convolution_backward)")
    options = _options(stride, padding, dilation, groups, weight)
    if transposed:
        return [e.op("Conv", gradient, weight, **options), None, None]
    stride, padding, dilation = (_each(part, weight) for part in (stride, padding, dilation))
    sizes = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    rest = [size - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for size, out, k, s, p, d in sizes]
    return [e.op("ConvTranspose", gradient, weight, **options, output_padding=rest), None, None]


def _each(values: Sequence[int], weight: Value) -> list[int]:
    """One number for each axis."""
    axes = len(weight.shape) - 2
    return list(values) * (axes if len(values) == 1 else 1)


def _options(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, weight: Value
) -> dict[str, Any]:
    pads = _each(padding, weight)
    return {
        "strides": _each(stride, weight),
        "pads": [*pads, *pads],
        "dilations": _each(dilation, weight),
        "group": groups,
        "kernel_shape": list(weight.shape[2:]),
    }


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(
    e: Emitter,
    result: Sequence[Value],
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    axes = 3 if len(result[0].shape) == 5 else 2
    kernel, stride, padding, dilation = (
        list(part) * (axes if len(part) == 1 else 1) for part in (kernel, stride or kernel, padding, dilation)
    )
    plane = _plane(x.shape, axes)
    options = {"strides": stride, "pads": [*padding, *padding], "dilations": dilation, "ceil_mode": int(ceil_mode)}
    found, places = e.op("MaxPool", x, outputs=2, kernel_shape=kernel, **options)
    return [found, e.op("Mod", places, e.constant(plane))]  # ONNX counts over the whole batch, torch in each plane


def _plane(shape: Sequence[Size], axes: int) -> int:
    sizes = shape[-axes:]
    if len(shape) != axes + 2 or any(isinstance(size, Affine) for size in sizes):
        refuse("that pools something else than images (max_pool2d_with_indices)")
    return prod(size for size in sizes if isinstance(size, int))


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_back(e: Emitter, result: Value, gradient: Value, x: Value, *rest: Any) -> Any:
    places: Value = rest[-1]
    axes = len(x.shape) - 2
    plane, flat = _plane(x.shape, axes), [*x.shape[:2], -1]
    parts = [e.op("Reshape", part, e.shape([0, 0, -1])) for part in (places, gradient)]
    zeros = e.op("Expand", e.number(0.0, x.dtype), e.shape([*flat[:2], plane]))
    summed = e.op("ScatterElements", zeros, *parts, axis=2, reduction="add")
    return e.reshape(summed, result.shape)


@rule("avg_pool2d", "avg_pool1d", "avg_pool3d")
def _avg_pool(
    e: Emitter,
    result: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernel, stride, padding = _pooled(x, kernel, stride, padding, ceil_mode, divisor_override)
    options: dict[str, Any] = {
        "strides": stride,
        "pads": [*padding, *padding],
        "count_include_pad": int(count_include_pad),
    }
    return e.op("AveragePool", x, kernel_shape=kernel, **options)


@rule("avg_pool2d_backward", "avg_pool3d_backward")
def _avg_pool_back(
    e: Emitter,
    result: Value,
    gradient: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    kernel, stride, padding = _pooled(x, kernel, stride, padding, ceil_mode, divisor_override)
    if any(padding) and not count_include_pad:
        refuse("with an average pooling that does not count its padding (avg_pool2d_backward)")
    return _spread(e, gradient, x.shape, kernel, stride, padding, 1 / prod(kernel))


def _pooled(
    x: Value, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool, divisor: Any
) -> Any:
    if ceil_mode or divisor is not None:
        refuse("with an average pooling that rounds sizes up or has a divisor of its own (avg_pool2d)")
    axes = len(x.shape) - 2
    return (list(part) * (axes if len(part) == 1 else 1) for part in (kernel, stride or kernel, padding))


def _spread(
    e: Emitter,
    gradient: Value,
    shape: Sequence[Size],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    each: float,
) -> str:
    """What comes back to every window's entries: a transposed convolution of each channel with a constant."""
    channels = shape[1]
    if isinstance(channels, Affine):
        refuse("whose channels are the rows of a batch")
    filled = np.full((channels, 1, *kernel), each, dtype=np.float64 if gradient.dtype == torch.float64 else np.float32)
    sizes = zip(shape[2:], gradient.shape[2:], kernel, stride, padding, strict=True)
    rest = [size - ((out - 1) * s - 2 * p + k) for size, out, k, s, p in sizes]  # type: ignore[operator]
    options: dict[str, Any] = {
        "strides": stride,
        "pads": [*padding, *padding],
        "group": channels,
        "output_padding": rest,
    }
    return e.op("ConvTranspose", gradient, e.constant(filled, None), kernel_shape=list(kernel), **options)  # type: ignore[no-any-return]


@rule("_adaptive_avg_pool2d")
def _adaptive(e: Emitter, result: Value, x: Value, *_: Any) -> Any:
    matrices = [_windows(x.shape[axis], result.shape[axis]).T for axis in (2, 3)]
    return _by_axis(e, x, matrices)


@rule("_adaptive_avg_pool2d_backward")
def _adaptive_back(e: Emitter, result: Value, gradient: Value, x: Value) -> Any:
    return _by_axis(e, gradient, [_windows(x.shape[axis], gradient.shape[axis]) for axis in (2, 3)])


def _by_axis(e: Emitter, gradient: Value, matrices: Sequence[np.ndarray]) -> str:
    """What comes back of a product with a matrix `(out, in)` along each of the last two axes."""
    found = gradient.name
    for matrix in reversed(matrices):
        typed = matrix.astype(np.float64 if gradient.dtype == torch.float64 else np.float32)
        found = e.op("MatMul", found, e.constant(typed, None))
        found = e.op("Transpose", found, perm=[0, 1, 3, 2])
    return found


def _windows(size: Any, out: Any) -> np.ndarray:
    """`(out, size)`: what each entry adds to the mean of every window, as adaptive pooling cuts them."""
    found = np.zeros((out, size))
    for i in range(out):
        start, end = i * size // out, -(-(i + 1) * size // out)
        found[i, start:end] = 1 / (end - start)
    return found


@rule("upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward")
def _nearest_back(e: Emitter, result: Value, gradient: Value, size: Any, shape: Sequence[Size], *_: Any) -> Any:
    times = [out // small for out, small in zip(gradient.shape[2:], shape[2:], strict=True)]  # type: ignore[operator]
    exact = [small * t for small, t in zip(shape[2:], times, strict=True)]
    if list(gradient.shape[2:]) != exact:
        refuse("that is enlarged by other than whole numbers (upsample_nearest2d_backward)")
    parts = [part for small, t in zip(shape[2:], times, strict=True) for part in (small, t)]
    split = e.reshape(gradient, [*gradient.shape[:2], *parts])
    return e.op("ReduceSum", split, e.constant([3, 5]), keepdims=0)


@rule("upsample_bilinear2d")
def _bilinear(e: Emitter, result: Value, x: Value, size: Any, corners: bool, *scales: Any) -> Any:
    sizes = list(zip(x.shape[2:], result.shape[2:], strict=True))
    _check_whole(sizes, scales)
    return _by_axis(e, x, [_interpolation(small, out, corners).T for small, out in sizes])


@rule("upsample_bilinear2d_backward")
def _bilinear_back(
    e: Emitter, result: Value, gradient: Value, size: Any, shape: Sequence[Any], corners: bool, *scales: float | None
) -> Any:
    sizes = list(zip(shape[2:], gradient.shape[2:], strict=True))
    _check_whole(sizes, scales)
    return _by_axis(e, gradient, [_interpolation(small, out, corners) for small, out in sizes])


def _check_whole(sizes: Sequence[Any], scales: Sequence[Any]) -> None:
    factors = scales[0] if len(scales) == 1 else scales
    if any(f is not None and small * f != out for (small, out), f in zip(sizes, factors or (), strict=False)):
        refuse("that is enlarged by a factor that gives no whole size (upsample_bilinear2d)")


def _interpolation(small: Any, out: Any, corners: bool) -> np.ndarray:
    """`(out, small)`: enlarging a line is a product with it."""
    lines = torch.eye(small, dtype=torch.float64)[None, :, :, None]  # each channel has one entry that is 1
    found = torch.nn.functional.interpolate(lines, size=(out, 1), mode="bilinear", align_corners=corners)
    matrix: np.ndarray = found[0, :, :, 0].T.contiguous().numpy()
    return matrix
