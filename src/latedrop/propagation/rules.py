"""How operators act on a mean and a variance: one rule for each aten operator that `propagate` can follow.

All units are taken as independent. With `X = (m, v)` and `w`, `c` constants,

    linear      w · X + c    mean w · m + c,    variance w^2 · v
    product     X · Y        mean m_x · m_y,    variance v_x · m_y^2 + m_x^2 · v_y + v_x · v_y
    nonlinear   f(X)         the moments of `f` under the Gaussian `N(m, v)`
    maximum     max(X, Y)    the moments of the larger Gaussian, two units at a time
    norms                    linear, with their statistics (those of `m` where none are stored) as constants

With `v = 0` every rule gives what the plain operator gives for `m`. A `Pair` is a tensor of a mean and a variance,
which torch's operators take like any other tensor, each by its rule; an operator without one raises `NoRule`.

Functions of one unit follow from those of `Z ~ N(a, 1)`, with `phi` and `Phi` the density and distribution function of
the standard Gaussian,

    E max(Z, 0) = a · Phi(a) + phi(a),     E max(Z, 0)^2 = (a^2 + 1) · Phi(a) + a · phi(a),

where they have one kink or two, as the maximum of two units does (Clark 1961); others are integrated by Gauss-Hermite
quadrature. Each mean is the function of the mean plus a correction that vanishes with the variance, so that a
variance of 0 gives the function's own value; no variance comes out negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from math import inf, pi, sqrt
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from latedrop.data.arrays import map_values
from latedrop.data.rows import tensors
from latedrop.network.functional import operator_name
from latedrop.torch_private import operator_of, plain_function, wrapper_tensor

__all__ = ["NoRule", "Pair"]

TwoMoments: TypeAlias = tuple[Tensor, Tensor]
"""Mean and variance, of the same shape."""
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
        args, kwargs = map_values((args, kwargs), _widened)
        operator = operator_of(func)
        name = "" if operator is None else operator.name.removesuffix("_" if operator.written else "")
        if operator is None or name not in _RULES:
            raise NoRule(f"the operator {func}")
        if operator.written:
            return _in_place(func, name, operator.overload, args, kwargs)
        result = _RULES[name](func, *args, **kwargs)
        if dtype in _HALF:
            result = map_values(result, lambda x: Pair(x.m, x.v, dtype) if isinstance(x, Pair) else x)
        pairs = [value for value in args if isinstance(value, Pair)]
        if name in _ELEMENTWISE and all(pair is pairs[0] for pair in pairs):
            result.units = pairs[0].units
        return result


def _rule(*names: str, elementwise: bool = False) -> Callable[[_Function], _Function]:
    """Make a function the rule of some operators; `elementwise`: each unit of the result is a function of one unit."""

    def add(function: _Function) -> _Function:
        _RULES.update(dict.fromkeys(names, function))
        _ELEMENTWISE.update(names if elementwise else ())
        return function

    return add


def _mean_of(value: Any) -> Any:
    """Return the mean of a pair, and anything else as it is."""
    return value.m if isinstance(value, Pair) else value


def _variance_of(value: Any) -> Any:
    """Return the variance of a pair, and 0 for a constant tensor; anything else stays as it is."""
    return value.v if isinstance(value, Pair) else torch.zeros_like(value) if isinstance(value, Tensor) else value


def _widened(value: Any) -> Any:
    """Return a constant tensor in single precision where it is a half, and anything else as it is."""
    half = isinstance(value, Tensor) and value.dtype in _HALF and not isinstance(value, Pair)
    return value.float() if half else value


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


@_rule(
    *("_reshape_alias", "_unsafe_view", "alias", "channel_shuffle", "clone", "col2im", "cumsum", "detach", "diagonal"),
    *("expand", "flip", "gather", "im2col", "index", "index_select", "max_unpool2d", "max_unpool3d", "permute"),
    *("pixel_shuffle", "pixel_unshuffle", "repeat", "roll", "rot90", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "sum", "t", "transpose", "tril", "triu", "unbind", "unfold", "unsqueeze", "view", "zero"),
    *(f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (1, 2, 3)),
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
)
def _moved(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Any:
    """Move, copy or sum units: variances go where the means go."""
    m, v = op(x.m, *args, **kwargs), op(x.v, *args, **kwargs)
    return Pair(m, v) if isinstance(m, Tensor) else [Pair(*both) for both in zip(m, v, strict=True)]


@_rule("cat", "stack", "copy", "where", "index_add", "scatter_add")
def _joined(op: Any, *args: Any, **kwargs: Any) -> Pair:
    """Put pairs and constants, which have no variance, side by side; or sum the messages that arrive at a node."""
    if kwargs.get("alpha", 1) != 1:
        raise NoRule(f"the operator {op} with a factor")
    index = {"where": 0, "index_add": 2, "scatter_add": 2}.get(operator_name(op))
    variances = [value if i == index else map_values(value, _variance_of) for i, value in enumerate(args)]
    return Pair(op(*map_values(args, _mean_of), **kwargs), op(*variances, **kwargs))


@_rule("as_strided")
def _laid_out(op: Any, x: Pair, size: Sequence[int], stride: Sequence[int], *offset: Any) -> Pair:
    """Return `x` where only axes of one entry get other strides, as pooling to one pixel does for channels-last."""
    changes = (n > 1 and new != old for n, new, old in zip(size, stride, x.m.stride(), strict=False))
    if x.shape != tuple(size) or offset or any(changes):
        raise NoRule(f"the operator {op}")
    return x


@_rule("_to_copy")
def _converted(op: Any, x: Pair, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Pair:
    if dtype is not None and not dtype.is_floating_point:
        raise NoRule(f"a conversion to {dtype}")
    wide = dtype and torch.promote_types(dtype, torch.float32)  # the pair gets its half dtype afterwards
    return Pair(op(x.m, dtype=wide, **kwargs), op(x.v, dtype=wide, **kwargs))


@_rule("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")
def _constant(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Tensor:
    """Return a pair without variance, since the model may write random values into it."""
    new: Tensor = _widened(op(x.m, *args, **kwargs))
    return Pair(new, torch.zeros_like(new)) if new.is_floating_point() else new


@_rule("fill", "masked_fill", "constant_pad_nd")
def _filled(op: Any, x: Pair, *args: Any) -> Pair:
    if op is aten.constant_pad_nd.default and len(args) == 1:
        args = (*args, 0.0)
    *place, value = args
    if isinstance(value, Pair):
        raise NoRule(f"the operator {op} with a random value to fill in")
    return Pair(op(x.m, *place, value), op(x.v, *place, torch.zeros_like(value) if isinstance(value, Tensor) else 0.0))


@_rule("add", "sub", "rsub", elementwise=True)
def _add(op: Any, a: Any, b: Any, alpha: float = 1) -> Pair:
    factors = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[operator_name(op)]
    m = op(_mean_of(a), _mean_of(b), alpha=alpha)
    if a is b:
        return Pair(m, a.v * sum(factors) ** 2)
    _check_apart(op, a, b)
    return Pair(m, sum(x.v * factor**2 for x, factor in zip((a, b), factors, strict=True) if isinstance(x, Pair)))


@_rule("neg", elementwise=True)
def _neg(op: Any, x: Pair) -> Pair:
    return Pair(op(x.m), x.v.clone())


@_rule("div", elementwise=True)
def _div(op: Any, a: Any, b: Any, rounding_mode: str | None = None) -> Pair:
    if isinstance(b, Pair):
        raise NoRule("a division by a random value")
    if rounding_mode is not None:
        raise NoRule(f"a division rounded by {rounding_mode}")
    return Pair(op(a.m, b), a.v / b / b)


@_rule("mul", elementwise=True)
def _mul(op: Any, a: Any, b: Any) -> Pair:
    if a is b:
        return Pair(*smooth(torch.square, a.m, a.v))
    _check_apart(op, a, b)
    return _matmul(op, a, b)


@_rule("mm", "bmm", "mv", "dot")
def _matmul(op: Any, a: Any, b: Any) -> Pair:
    return Pair(op(_mean_of(a), _mean_of(b)), _product_variance(op, a, b))


@_rule("addmm", "baddbmm")
def _addmm(op: Any, c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Pair:
    v = _product_variance(aten.mm if op is aten.addmm.default else aten.bmm, a, b) * alpha**2
    return Pair(op(_mean_of(c), _mean_of(a), _mean_of(b), beta=beta, alpha=alpha), v + _variance_of(c) * beta**2)


@_rule("convolution")
def _convolution(op: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Pair:
    v = _product_variance(lambda a, b: op(a, b, None, *rest), x, weight)
    return Pair(op(_mean_of(x), _mean_of(weight), bias, *rest), v.clamp_min(0))  # fast algorithms can dip below 0


def _product_variance(op: Any, a: Any, b: Any) -> Any:
    """Return the variance of an operator that sums products of a unit of `a` and a unit of `b`."""
    v: Any = 0
    if isinstance(a, Pair):
        v = op(a.v, b.m.square() + b.v if isinstance(b, Pair) else b * b)
    if isinstance(b, Pair):
        v = v + op(_mean_of(a) * _mean_of(a), b.v)
    return v


def _check_apart(op: Any, a: Any, b: Any) -> None:
    if isinstance(a, Pair) and isinstance(b, Pair) and a.units is b.units:
        raise NoRule(
            f"the operator {op} on two functions of the same units, such as x * sigmoid(x), which are far from "
            "independent (a built-in activation, such as nn.SiLU, has a rule of its own),"
        )


@_rule("mean")
def _mean(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Pair:
    m = op(x.m, *args, **kwargs)
    return Pair(m, op(x.v, *args, **kwargs) * (m.numel() / x.m.numel()))


@_rule("avg_pool2d", "avg_pool3d")
def _avg_pool(op: Any, x: Pair, *args: Any) -> Pair:
    args = (*args, *((), 0, False, True, None)[len(args) - 1 :])
    ones = x.m.new_ones((1,) * (x.dim() - len(args[0])) + x.shape[-len(args[0]) :])
    weight = op(ones, *args) / op(ones, *args[:-1], 1)
    return Pair(op(x.m, *args), op(x.v, *args) * weight)


@_rule(
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
def _separable(op: Any, x: Pair, size: Sequence[int], *settings: Any) -> Pair:
    """Follow a linear operator that works on the last axes one by one: the variance takes the square of each matrix."""
    v, axes = x.v, len(size)
    for i in range(axes):
        n, before, after = v.shape[i - axes], [2] * i, [2] * (axes - 1 - i)  # antialiasing is wrong for a width of 1
        scales = [scale if j == i else None for j, scale in enumerate(settings[1:])]
        eye = torch.eye(n, dtype=v.dtype, device=v.device).reshape(1, n, *[1] * i, n, *[1] * len(after))
        lines = op(eye.expand(1, n, *before, n, *after), [*before, size[i], *after], *settings[:1], *scales)
        matrix = lines.reshape(n, 2**i, size[i], -1)[:, 0, :, 0]
        v = (v.movedim(i - axes, -1) @ matrix.square()).movedim(-1, i - axes)
    return Pair(op(x.m, size, *settings), v)


@_rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
def _batch_norm(op: Any, x: Pair, w: Any, b: Any, mean: Any, var: Any, measured: bool, _: float, eps: float) -> Any:
    """Scale by the stored statistics; where none are stored (instance norm), those of `m` are `measured`."""
    m, _, rstd = aten.native_batch_norm(x.m, w, b, *((None, None) if measured else (mean, var)), measured, 0.0, eps)
    scale = (rstd if measured else (var + eps).rsqrt()) * (1 if w is None else w)
    v = x.v * scale.square().reshape(-1, *[1] * (x.dim() - 2))
    others = 3 if op is aten.cudnn_batch_norm.default else 2
    return (Pair(m, v), *(x.m.new_empty(0) for _ in range(others)))


@_rule("native_layer_norm")
def _layer_norm(op: Any, x: Pair, shape: Sequence[int], w: Any, b: Any, eps: float) -> Any:
    m, mean, rstd = op(x.m, shape, w, b, eps)
    return Pair(m, x.v * (rstd * (1 if w is None else w)).square()), mean, rstd


@_rule("native_group_norm")
def _group_norm(op: Any, x: Pair, w: Any, b: Any, n: int, c: int, size: int, groups: int, eps: float) -> Any:
    m, mean, rstd = op(x.m, w, b, n, c, size, groups, eps)
    scale = rstd.repeat_interleave(c // groups, 1) * (1 if w is None else w)
    return Pair(m, x.v * scale.square().reshape(n, c, *[1] * (x.dim() - 2))), mean, rstd


@_rule("relu", "abs", "leaky_relu", "_prelu_kernel", elementwise=True)
def _piecewise_linear(op: Any, x: Pair, *slopes: Any) -> Pair:
    (slope,) = slopes or ({"relu": 0, "abs": -1}.get(operator_name(op), 0.01),)
    return Pair(*piecewise_linear(lambda m: op(m, *slopes), x.m, x.v, slope))


@_rule("clamp", "clamp_min", "clamp_max", "hardtanh", "hardsigmoid", elementwise=True)
def _clamp(op: Any, x: Pair, *limits: Any) -> Pair:
    if op is aten.hardsigmoid.default:
        return Pair(*clamped(x.m / 6 + 0.5, x.v / 36, 0.0, 1.0))
    if any(isinstance(limit, Tensor) for limit in limits):
        raise NoRule(f"the operator {op}")
    if op is aten.hardtanh.default:
        limits = (*limits, *(-1, 1)[len(limits) :])
    low, high = (None, *limits) if op is aten.clamp_max.default else (*limits, None)[:2]
    return Pair(*clamped(x.m, x.v, None if low == -inf else low, None if high == inf else high))


@_rule(
    *("sigmoid", "tanh", "gelu", "silu", "softplus", "elu", "celu", "mish", "hardswish", "exp", "erf", "sin", "cos"),
    "pow",
    elementwise=True,
)
def _smooth(op: Any, x: Any, *args: Any, **kwargs: Any) -> Pair:
    if operator_name(op) == "pow" and (isinstance(args[0], Tensor) or args[0] not in (1, 2, 3)):
        raise NoRule(f"the operator {op} with an exponent other than 1, 2 and 3")
    return Pair(*smooth(lambda m: op(m, *args, **kwargs), x.m, x.v))


@_rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(op: Any, x: Pair, *args: Any) -> tuple[Pair, Tensor]:
    """Pool one axis after the other; the indices are those of the means."""
    kernel, stride, padding, dilation = (*args[:4], *((), [0], [1])[len(args) - 1 :])[:4]
    plain, indices = op(x.m, *args)
    axes = len(kernel)
    settings = [values if len(values) == axes else [*values] * axes for values in (stride or kernel, padding, dilation)]
    both: TwoMoments = (x.m, x.v)
    for axis, *window in zip(range(-axes, 0), kernel, *settings, strict=True):
        both = _largest(both, axis, plain.shape[axis], *window)
    return Pair(*both), indices


def _largest(both: TwoMoments, axis: int, out: int, size: int, stride: int, padding: int, dilation: int) -> TwoMoments:
    """Return the moments of the largest unit of each window along one axis, comparing two at a time."""
    span = (out - 1) * stride + 1
    short = span + dilation * (size - 1) - padding - both[0].shape[axis]
    pad = [0, 0] * (-axis - 1) + [padding, max(short, 0)]
    lowest = torch.finfo(both[0].dtype).min / 4  # not -inf, whose differences are NaN
    padded = F.pad(both[0], pad, value=lowest), F.pad(both[1], pad)
    m, v = ([aten.slice(t, axis, i * dilation, i * dilation + span, stride) for i in range(size)] for t in padded)
    rivals = list(zip(m, v, strict=True))
    while len(rivals) > 1:
        unpaired = rivals[-1:] if len(rivals) % 2 else []
        rivals = [larger(a, b) for a, b in zip(rivals[::2], rivals[1::2], strict=False)] + unpaired
    return rivals[0]


def piecewise_linear(f: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, slope: float | Tensor) -> TwoMoments:
    """Return the moments of an `f` with slope 1 above 0 and `slope` below: ReLU (0), leaky ReLU, absolute value (-1).

    `f(X) = slope · X + (1 - slope) · max(X, 0)`, and the covariance of the two terms is that of `X` times `P(X > 0)`.
    """
    s = v.sqrt()
    above, variance, excess = _rectified(_in_stds(m, s))
    bend = 1 - slope
    factor = slope * slope + bend * bend * variance + 2 * slope * bend * above
    return f(m) + bend * s * excess, (v * factor).clamp_min(0)


def clamped(m: Tensor, v: Tensor, low: float | None, high: float | None) -> TwoMoments:
    """Return the moments of `X` limited to `low` and `high`; None leaves a side open.

    With `R_b = max(X - b, 0)`, `Var = Var R_low - Var R_high - 2 · E R_high · (high - E)`.
    """
    s, limited = v.sqrt(), m.clamp(low, high) if low is not None or high is not None else m
    variance, shift = v, torch.zeros_like(m)
    if low is not None:
        _, factor, excess = _rectified(_in_stds(m - low, s))
        variance, shift = v * factor, s * excess
    if high is not None:
        _, factor, excess = _rectified(_in_stds(m - high, s))
        shift = shift - s * excess
        above = (m - high).relu() + s * excess
        variance = variance - v * factor - 2 * above * (high - limited - shift)
    return limited + shift, variance.clamp_min(0)


def larger(a: TwoMoments, b: TwoMoments) -> TwoMoments:
    """Return the moments of the larger of two units."""
    total = a[1] + b[1]
    s = total.sqrt()
    above, variance, excess = _rectified(_in_stds(a[0] - b[0], s))
    v = a[1] * above + b[1] * (1 - above) - total * (above - variance)
    return torch.maximum(a[0], b[0]) + s * excess, v.clamp_min(0)


def smooth(f: Callable[[Tensor], Tensor], m: Tensor, v: Tensor) -> TwoMoments:
    """Return the moments of any `f` by quadrature with seven nodes, which is exact for polynomials of degree 6."""
    s, centre = v.sqrt(), f(m)
    first, second = torch.zeros_like(m), torch.zeros_like(m)
    for node, weight in _quadrature():
        step = f(m + node * s) - centre
        first += weight * step
        second += weight * step.square()
    return centre + first, (second - first.square()).clamp_min(0)


@cache
def _quadrature() -> list[tuple[float, float]]:
    """Return nodes and weights of a standard Gaussian, without the node at 0, which adds nothing."""
    nodes, weights = hermegauss(7)
    return [(z, w) for z, w in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True) if abs(z) > 1e-9]


def _rectified(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for `Z ~ N(a, 1)`, `P(Z > 0)`, the variance of `max(Z, 0)`, and `E max(Z, 0) - max(a, 0)`."""
    above, below = torch.special.ndtr(a), torch.special.ndtr(-a)
    density = (-0.5 * a.square()).exp() / sqrt(2 * pi)
    variance = above + a.square() * above * below - a * density * (above - below) - density.square()
    excess = density - a.abs() * torch.minimum(above, below)
    return above, variance.clamp_min(0), excess.clamp_min(0)


def _in_stds(m: Tensor, s: Tensor) -> Tensor:
    """Return `m / s`, finite where `s` is 0: beyond 20 standard deviations nothing changes."""
    return (m / s.clamp_min(torch.finfo(s.dtype).tiny)).clamp(-20, 20)
