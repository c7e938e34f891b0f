"""How operators act on a mean and a variance: one rule for each aten operator that `propagate` can follow.

All units are taken as independent. With `X = (m, v)` and `w`, `c` constants,

    linear      w · X + c    mean w · m + c,    variance w^2 · v
    product     X · Y        mean m_x · m_y,    variance v_x · m_y^2 + m_x^2 · v_y + v_x · v_y
    nonlinear   f(X)         the moments of `f` under the Gaussian `N(m, v)`
    maximum     max(X, Y)    the moments of the larger Gaussian, two units at a time
    norms                    linear, with their statistics (those of `m` where none are stored) as constants

With `v = 0` every rule gives what the plain operator gives for `m`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latedrop.variance.gaussian import TwoMoments, bent, clamped, curved, larger
from latedrop.variance.pairs import HALF, NoRule, Pair, aten, each, mean_of, returns, rule, variance_of, widened_value

__all__ = ["NoRule", "Pair"]


@rule(
    *("_reshape_alias", "_unsafe_view", "alias", "cat", "channel_shuffle", "clone", "col2im", "cumsum", "detach"),
    *("diagonal", "expand", "flip", "gather", "im2col", "index", "index_select", "max_unpool2d", "max_unpool3d"),
    *("permute", "pixel_shuffle", "pixel_unshuffle", "repeat", "roll", "rot90", "select", "slice", "split"),
    *("split_with_sizes", "squeeze", "stack", "sum", "t", "transpose", "tril", "triu", "unbind", "unfold"),
    *("unsqueeze", "view", "where"),
    *(f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (1, 2, 3)),
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
)
def _moved(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Units are moved, copied or summed: variances go where the means go."""
    m = op(*each(args, mean_of), **kwargs)
    v = op(*each(args, variance_of), **kwargs)
    return Pair(m, v) if isinstance(m, Tensor) else [Pair(*both) for both in zip(m, v, strict=True)]


@rule("_to_copy")
def _converted(op: Any, x: Pair, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Pair:
    if dtype is not None and not dtype.is_floating_point:
        raise NoRule(f"a conversion to {dtype}")
    dtype = torch.float32 if dtype in HALF else dtype
    return Pair(op(x.m, dtype=dtype, **kwargs), op(x.v, dtype=dtype, **kwargs))


@rule("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")
def _constant(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Tensor:
    """A pair without variance, since the model may go on to write random values into it."""
    new = widened_value(op(x.m, *args, **kwargs))
    return Pair(new, torch.zeros_like(new)) if new.is_floating_point() else new


@rule("copy")
def _copied(op: Any, x: Pair, source: Tensor, *_: Any) -> Pair:
    return Pair(op(x.m, mean_of(source)), op(x.v, variance_of(source)))


@rule("zero")
def _zeroed(op: Any, x: Pair) -> Pair:
    return Pair(op(x.m), op(x.v))


@rule("fill", "masked_fill", "constant_pad_nd")
def _filled(op: Any, x: Pair, *args: Any) -> Pair:
    if op is aten.constant_pad_nd.default and len(args) == 1:
        args = (*args, 0.0)
    *where, value = args
    if isinstance(value, Pair):
        raise NoRule(f"the operator {op} with a random value to fill in")
    return Pair(op(x.m, *where, value), op(x.v, *where, variance_of(value) if isinstance(value, Tensor) else 0.0))


@rule("index_add", "scatter_add")
def _added_at(op: Any, x: Any, axis: int, index: Tensor, source: Any, *, alpha: float = 1) -> Pair:
    """Messages that arrive at a node are summed."""
    if alpha != 1:
        raise NoRule(f"the operator {op} with a factor")
    return Pair(op(mean_of(x), axis, index, mean_of(source)), op(variance_of(x), axis, index, variance_of(source)))


@rule("add", elementwise=True)
def _add(op: Any, a: Any, b: Any, alpha: float = 1) -> Pair:
    return _combined(op, a, b, alpha, (1, alpha))


@rule("sub", elementwise=True)
def _sub(op: Any, a: Any, b: Any, alpha: float = 1) -> Pair:
    return _combined(op, a, b, alpha, (1, -alpha))


@rule("rsub", elementwise=True)
def _rsub(op: Any, a: Any, b: Any, alpha: float = 1) -> Pair:
    return _combined(op, a, b, alpha, (-alpha, 1))


def _combined(op: Any, a: Any, b: Any, alpha: float, factors: tuple[float, float]) -> Pair:
    m = op(mean_of(a), mean_of(b), alpha=alpha)
    if a is b:
        return Pair(m, a.v * sum(factors) ** 2)
    _check_apart(op, a, b)
    terms = [x.v * factor**2 for x, factor in zip((a, b), factors, strict=True) if isinstance(x, Pair)]
    return Pair(m, sum(terms))


@rule("neg", elementwise=True)
def _neg(op: Any, x: Pair) -> Pair:
    return Pair(op(x.m), x.v.clone())


@rule("div", elementwise=True)
def _div(op: Any, a: Any, b: Any, rounding_mode: str | None = None) -> Pair:
    if isinstance(b, Pair) or rounding_mode is not None:
        raise NoRule(
            "a division by a random value" if isinstance(b, Pair) else f"a division rounded by {rounding_mode}"
        )
    return Pair(op(a.m, b), a.v / b / b)


@rule("mul", elementwise=True)
def _mul(op: Any, a: Any, b: Any) -> Pair:
    if a is b:
        return Pair(*curved(torch.square, a.m, a.v))
    _check_apart(op, a, b)
    return Pair(op(mean_of(a), mean_of(b)), _product_variance(op, a, b))


@rule("mm", "bmm", "mv", "dot")
def _matmul(op: Any, a: Any, b: Any) -> Pair:
    return Pair(op(mean_of(a), mean_of(b)), _product_variance(op, a, b))


@rule("addmm", "baddbmm")
def _addmm(op: Any, c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Pair:
    v = _product_variance(aten.mm if op is aten.addmm.default else aten.bmm, a, b) * alpha**2
    return Pair(op(mean_of(c), mean_of(a), mean_of(b), beta=beta, alpha=alpha), v + variance_of(c) * beta**2)


@rule("convolution")
def _convolution(op: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Pair:
    v = _product_variance(lambda a, b: op(a, b, None, *rest), x, weight)
    return Pair(op(mean_of(x), mean_of(weight), bias, *rest), v.clamp_min(0))  # fast algorithms can dip below 0


def _product_variance(op: Any, a: Any, b: Any) -> Any:
    """Of an operator that sums products of a unit of `a` and a unit of `b`."""
    v: Any = 0
    if isinstance(a, Pair):
        v = op(a.v, b.m.square() + b.v if isinstance(b, Pair) else b * b)
    if isinstance(b, Pair):
        v = v + op(mean_of(a) * mean_of(a), b.v)
    return v


def _check_apart(op: Any, a: Any, b: Any) -> None:
    if isinstance(a, Pair) and isinstance(b, Pair) and a.units is b.units:
        raise NoRule(
            f"the operator {op} on two functions of the same units, such as x * sigmoid(x), which are far from "
            "independent (a built-in activation, such as nn.SiLU, has a rule of its own),"
        )


@rule("mean")
def _mean(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Pair:
    m = op(x.m, *args, **kwargs)
    return Pair(m, op(x.v, *args, **kwargs) * (m.numel() / x.m.numel()))


@rule("avg_pool2d", "avg_pool3d")
def _avg_pool(op: Any, x: Pair, *args: Any) -> Pair:
    args = (*args, *((), 0, False, True, None)[len(args) - 1 :])
    ones = x.m.new_ones((1,) * (x.dim() - len(args[0])) + x.shape[-len(args[0]) :])
    weight = op(ones, *args) / op(ones, *args[:-1], 1)
    return Pair(op(x.m, *args), op(x.v, *args) * weight)


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(op: Any, x: Pair, size: Sequence[int]) -> Pair:
    return _separable(op(x.m, size), x, len(size), lambda eye, i: F.adaptive_avg_pool1d(eye, size[i]))


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def _upsample(op: Any, x: Pair, size: Sequence[int], align: bool, *scales: Any) -> Pair:
    each = scales or (None,) * len(size)
    m = op(x.m, size, align, *each)
    return _separable(m, x, len(size), lambda eye, i: aten.upsample_linear1d(eye, [size[i]], align, each[i]))


@rule("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _upsample_plane(op: Any, x: Pair, size: Sequence[int], align: bool, *scales: Any) -> Pair:
    each = scales or (None,) * len(size)

    def line(eye: Tensor, i: int) -> Tensor:
        plane: Tensor = op(eye[None], [size[i], eye.shape[-1]], align, each[i], None)
        return plane[0].mT

    return _separable(op(x.m, size, align, *each), x, len(size), line)


def _separable(m: Tensor, x: Pair, axes: int, line: Callable[[Tensor, int], Tensor]) -> Pair:
    """A linear operator that works on the last axes one by one: the matrix of each is squared for the variance."""
    v = x.v
    for i in range(axes):
        axis = i - axes
        matrix = line(torch.eye(v.shape[axis], dtype=v.dtype, device=v.device)[None], i)[0]
        v = (v.movedim(axis, -1) @ matrix.square()).movedim(-1, axis)
    return Pair(m, v)


@rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
def _batch_norm(op: Any, x: Pair, w: Any, b: Any, mean: Any, var: Any, own: bool, _: float, eps: float) -> Any:
    """Without stored statistics (instance norm) `own` is True, and those of `m` are constants."""
    stored = (None, None) if own else (mean, var)
    m, _, rstd = aten.native_batch_norm(x.m, w, b, *stored, own, 0.0, eps)
    scale = (rstd if own else (var + eps).rsqrt()) * (1 if w is None else w)
    v = x.v * scale.square().reshape(-1, *[1] * (x.dim() - 2))
    return (Pair(m, v), *(x.m.new_empty(0) for _ in range(1, returns(op))))


@rule("native_layer_norm")
def _layer_norm(op: Any, x: Pair, shape: Sequence[int], w: Any, b: Any, eps: float) -> Any:
    m, mean, rstd = op(x.m, shape, w, b, eps)
    return Pair(m, x.v * (rstd * (1 if w is None else w)).square()), mean, rstd


@rule("native_group_norm")
def _group_norm(op: Any, x: Pair, w: Any, b: Any, n: int, c: int, size: int, groups: int, eps: float) -> Any:
    m, mean, rstd = op(x.m, w, b, n, c, size, groups, eps)
    scale = rstd.repeat_interleave(c // groups, 1) * (1 if w is None else w)
    return Pair(m, x.v * scale.square().reshape(n, c, *[1] * (x.dim() - 2))), mean, rstd


@rule("relu", elementwise=True)
def _relu(op: Any, x: Pair) -> Pair:
    return Pair(*bent(op, x.m, x.v, 0))


@rule("abs", elementwise=True)
def _abs(op: Any, x: Pair) -> Pair:
    return Pair(*bent(op, x.m, x.v, -1))


@rule("leaky_relu", "_prelu_kernel", elementwise=True)
def _leaky_relu(op: Any, x: Pair, slope: float | Tensor = 0.01) -> Pair:
    return Pair(*bent(lambda m: op(m, slope), x.m, x.v, slope))


@rule("clamp", elementwise=True)
def _clamp(op: Any, x: Pair, low: float | None = None, high: float | None = None) -> Pair:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise NoRule(f"the operator {op}")
    return Pair(*clamped(x.m, x.v, None if low == -inf else low, None if high == inf else high))


@rule("clamp_min", elementwise=True)
def _clamp_min(op: Any, x: Pair, low: float) -> Pair:
    return _clamp(op, x, low)  # type: ignore[no-any-return]


@rule("clamp_max", elementwise=True)
def _clamp_max(op: Any, x: Pair, high: float) -> Pair:
    return _clamp(op, x, None, high)  # type: ignore[no-any-return]


@rule("hardtanh", elementwise=True)
def _hardtanh(op: Any, x: Pair, low: float = -1, high: float = 1) -> Pair:
    return _clamp(op, x, low, high)  # type: ignore[no-any-return]


@rule("hardsigmoid", elementwise=True)
def _hardsigmoid(op: Any, x: Pair) -> Pair:
    return Pair(*clamped(x.m / 6 + 0.5, x.v / 36, 0.0, 1.0))


@rule(
    *("sigmoid", "tanh", "gelu", "silu", "softplus", "elu", "celu", "mish", "hardswish", "exp", "erf", "sin", "cos"),
    elementwise=True,
)
def _curved(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Pair:
    return Pair(*curved(lambda m: op(m, *args, **kwargs), x.m, x.v))


@rule("log_sigmoid_forward")
def _log_sigmoid(op: Any, x: Pair) -> tuple[Pair, Tensor]:
    return Pair(*curved(F.logsigmoid, x.m, x.v)), x.m.new_empty(0)


@rule("pow", elementwise=True)
def _pow(op: Any, x: Any, exponent: Any) -> Pair:
    if isinstance(exponent, Tensor) or exponent not in (1, 2, 3):
        raise NoRule(f"the operator {op} with an exponent other than 1, 2 and 3")
    return Pair(*curved(lambda m: op(m, exponent), x.m, x.v))


@rule("glu")
def _glu(op: Any, x: Pair, axis: int = -1) -> Pair:
    (m, gate), (v, gate_v) = x.m.chunk(2, axis), x.v.chunk(2, axis)
    open_, open_v = curved(torch.sigmoid, gate, gate_v)
    return _matmul(aten.mul, Pair(m, v), Pair(open_, open_v))  # type: ignore[no-any-return]


@rule("maximum")
def _maximum(op: Any, a: Any, b: Any) -> Pair:
    _check_apart(op, a, b)
    return Pair(*larger((mean_of(a), variance_of(a)), (mean_of(b), variance_of(b))))


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(op: Any, x: Pair, *args: Any) -> tuple[Pair, Tensor]:
    """One axis after the other; the indices are those of the means."""
    kernel, stride, padding, dilation = (*args[:4], *((), [0], [1])[len(args) - 1 :])[:4]
    plain, indices = op(x.m, *args)
    axes = len(kernel)
    settings = [values if len(values) == axes else [*values] * axes for values in (stride or kernel, padding, dilation)]
    both: TwoMoments = (x.m, x.v)
    for axis, *window in zip(range(-axes, 0), kernel, *settings, strict=True):
        both = _largest(both, axis, plain.shape[axis], *window)
    return Pair(*both), indices


def _largest(both: TwoMoments, axis: int, out: int, size: int, stride: int, padding: int, dilation: int) -> TwoMoments:
    """The largest unit of each window along one axis, by a knockout."""
    span = (out - 1) * stride + 1
    short = span + dilation * (size - 1) - padding - both[0].shape[axis]
    pad = [0, 0] * (-axis - 1) + [padding, max(short, 0)]
    lowest = torch.finfo(both[0].dtype).min / 4  # not -inf, whose differences are NaN
    m, v = F.pad(both[0], pad, value=lowest), F.pad(both[1], pad)
    steps = [aten.slice(m, axis, i * dilation, i * dilation + span, stride) for i in range(size)]
    spread = [aten.slice(v, axis, i * dilation, i * dilation + span, stride) for i in range(size)]
    rivals = list(zip(steps, spread, strict=True))
    while len(rivals) > 1:
        bye = rivals[-1:] if len(rivals) % 2 else []
        rivals = [larger(a, b) for a, b in zip(rivals[::2], rivals[1::2], strict=False)] + bye
    return rivals[0]
