"""How operators act on a mean and a variance: the rules that `propagate` follows, one per aten operator.

Units are taken as independent. With `X = (m, v)` a pair and `w`, `c` constants,

    linear       w · X + c     m: w · m + c       v: w^2 · v
    product      X · Y         m: m_x · m_y       v: v_x · m_y^2 + m_x^2 · v_y + v_x · v_y
    nonlinear    f(X)          moments of `f` under the Gaussian `N(m, v)`: closed form where `f` has one kink or
                               two, Gauss-Hermite quadrature elsewhere
    maximum      max(X, Y)     Clark's formulae (1961), two units at a time
    norms        their statistics are those of `m`, as constants

At `v = 0` every rule gives the plain operator's result for `m`, and no rule gives a negative variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

__all__ = ["Pair", "Unsupported"]

aten = torch.ops.aten
Rule: TypeAlias = Callable[..., Any]
Two: TypeAlias = "tuple[Tensor, Tensor]"

_NODES = 7
_RULES: dict[str, Rule] = {}
_ELEMENTWISE: set[str] = set()  # of one pair: the result is a function of the same units


class Unsupported(Exception):  # noqa: N818 - it never leaves `propagate`, which says where it came from
    """An operator that has no rule met a pair; the message says what was found."""


class Pair(Tensor):
    """A tensor of independent random units, known by their mean `m` and variance `v`, in float32 or float64.

    Views of a pair hold views of its `m` and `v`, so that writing through one is seen through the other. `units` is the
    same object in pairs that are functions of the same units.
    """

    m: Tensor
    v: Tensor
    units: object

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, m: Tensor, v: Tensor) -> Pair:
        """Lay `v` out in memory as `m`, so that what is a view of one is a view of the other."""
        pair: Pair = Tensor._make_wrapper_subclass(cls, m.shape, strides=m.stride(), dtype=m.dtype, device=m.device)
        if v.stride() != m.stride() or v.shape != m.shape or v.dtype != m.dtype:
            v = torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=m.device).copy_(v)
        pair.m, pair.v, pair.units = m, v, object()
        return pair

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Pair(m={self.m}, v={self.v})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look up and follow the rule of one operator."""
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable:
            return _in_place(func, name, args, kwargs)
        if name not in _RULES:
            raise Unsupported(f"the operator {func}")
        result = _RULES[name](func, *args, **kwargs)
        if name in _ELEMENTWISE and isinstance(result, Pair):
            result.units = next(a.units for a in args if isinstance(a, Pair))
        return result


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _in_place(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Follow the rule of the operator that is not in place, and write the result into the first argument."""
    target = args[0] if args else None
    if not isinstance(target, Pair) or not name.endswith("_"):
        raise Unsupported(f"the operator {func}, which writes a random value into a constant tensor")
    plain = name[:-1]
    if plain not in _RULES:
        raise Unsupported(f"the operator {func}")
    result = _RULES[plain](getattr(getattr(aten, plain), func._overloadname), *args, **kwargs)
    target.m.copy_(_m(result))
    target.v.copy_(_v(result))
    if plain not in _ELEMENTWISE:
        target.units = object()
    return target


def _rule(*names: str, elementwise: bool = False) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        _ELEMENTWISE.update(names if elementwise else ())
        return rule

    return add


def _m(value: Any) -> Any:
    return value.m if isinstance(value, Pair) else value


def _v(value: Any) -> Any:
    """Variance of a pair; a constant has none, and indices and masks stay what they are."""
    if isinstance(value, Pair):
        return value.v
    return torch.zeros_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value


@_rule(
    *("_unsafe_view", "_reshape_alias", "alias", "cat", "channel_shuffle", "clone", "col2im", "cumsum", "detach"),
    *("diagonal", "expand", "flip", "gather", "im2col", "index", "index_select", "max_unpool2d", "max_unpool3d"),
    *("permute", "pixel_shuffle", "pixel_unshuffle", "repeat", "roll", "rot90", "select", "slice", "split"),
    *("split_with_sizes", "squeeze", "stack", "sum", "t", "take", "transpose", "tril", "triu", "unbind", "unfold"),
    *("unsqueeze", "view", "where"),
    *(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)),
    *(f"{kind}{d}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3)),
)
def _moved(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Moves, copies or sums units: the variance goes where the mean goes."""
    m = op(*tree_map(_m, args), **tree_map(_m, kwargs))
    v = op(*tree_map(_v, args), **tree_map(_v, kwargs))
    return Pair(m, v) if isinstance(m, Tensor) else [Pair(*both) for both in zip(m, v, strict=True)]


@_rule("constant_pad_nd", "masked_fill", "fill")
def _filled(op: Any, x: Pair, *args: Any) -> Pair:
    if any(isinstance(a, Pair) for a in args):
        raise Unsupported(f"the operator {op} with a random value to fill in")
    *where, value = args if op is not aten.constant_pad_nd.default or len(args) > 1 else (*args, 0.0)
    return Pair(op(x.m, *where, value), op(x.v, *where, value * 0))


@_rule("zero")
def _zeroed(op: Any, x: Pair) -> Pair:
    return Pair(torch.zeros_like(x.m), torch.zeros_like(x.m))


@_rule("copy")
def _copied(op: Any, x: Pair, source: Tensor, non_blocking: bool = False) -> Pair:
    return Pair(op(x.m, _m(source)), op(x.v, _v(source)))


@_rule("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")
def _constant(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Tensor:
    """A new tensor, with no variance yet: the model may write random values into it."""
    new: Tensor = op(x.m, *args, **kwargs)
    return Pair(new, torch.zeros_like(new)) if new.is_floating_point() else new


@_rule("_to_copy")
def _converted(op: Any, x: Pair, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Pair:
    if dtype is not None and not dtype.is_floating_point:
        raise Unsupported(f"a conversion to {dtype}")
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return Pair(op(x.m, dtype=dtype, **kwargs), op(x.v, dtype=dtype, **kwargs))


def _combined(op: Any, a: Any, b: Any, by: tuple[float, float], **kwargs: Any) -> Pair:
    """A linear combination, `by[0] · a + by[1] · b`; a unit and itself are not independent, so their factors add."""
    m = op(_m(a), _m(b), **kwargs)
    if a is b:
        return Pair(m, a.v * (by[0] + by[1]) ** 2)
    _check_units(op, a, b)
    v = sum(x.v * factor**2 for x, factor in zip((a, b), by, strict=True) if isinstance(x, Pair))
    return Pair(m, v)


@_rule("add", elementwise=True)
def _add(op: Any, a: Any, b: Any, *, alpha: float = 1) -> Pair:
    return _combined(op, a, b, (1, alpha), alpha=alpha)


@_rule("sub", elementwise=True)
def _sub(op: Any, a: Any, b: Any, *, alpha: float = 1) -> Pair:
    return _combined(op, a, b, (1, -alpha), alpha=alpha)


@_rule("rsub", elementwise=True)
def _rsub(op: Any, a: Any, b: Any, alpha: float = 1) -> Pair:
    return _combined(op, a, b, (-alpha, 1), alpha=alpha)


@_rule("neg", elementwise=True)
def _neg(op: Any, x: Pair) -> Pair:
    return Pair(-x.m, x.v.clone())


@_rule("div", elementwise=True)
def _div(op: Any, a: Any, b: Any, **kwargs: Any) -> Pair:
    if isinstance(b, Pair) or kwargs.get("rounding_mode"):
        raise Unsupported("a division by a random value")
    return Pair(op(a.m, b), a.v / b / b)


@_rule("mm", "bmm", "mv", "dot")
def _product(op: Any, a: Any, b: Any) -> Pair:
    return Pair(op(_m(a), _m(b)), _product_variance(op, a, b))


@_rule("mul", elementwise=True)
def _mul(op: Any, a: Any, b: Any) -> Pair:
    if a is b:
        return Pair(*_quadrature(torch.square, a.m, a.v))
    _check_units(op, a, b)
    return _product(op, a, b)


@_rule("addmm", "baddbmm")
def _addmm(op: Any, c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Pair:
    product = aten.mm if op is aten.addmm.default else aten.bmm
    v = _product_variance(product, a, b) * alpha**2 if isinstance(a, Pair) or isinstance(b, Pair) else 0
    return Pair(op(_m(c), _m(a), _m(b), beta=beta, alpha=alpha), v + _v(c) * beta**2)


@_rule("convolution")
def _convolution(op: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Pair:
    v = _product_variance(lambda a, b: op(a, b, None, *rest), x, weight).clamp_min(0)  # fast algorithms dip below 0
    if isinstance(bias, Pair):
        raise Unsupported(f"the operator {op} with a random bias")
    return Pair(op(_m(x), _m(weight), bias, *rest), v)


def _product_variance(op: Any, a: Any, b: Any) -> Tensor:
    """Of an operator that is linear in `a` and in `b`, and sums over products of their units."""
    v: Any = 0
    if isinstance(a, Pair):
        v = op(a.v, _m(b) ** 2 + _v(b) if isinstance(b, Pair) else b * b)
    if isinstance(b, Pair):
        v = v + op(_m(a) ** 2, b.v)
    return v  # type: ignore[no-any-return]


def _check_units(op: Any, a: Any, b: Any) -> None:
    if isinstance(a, Pair) and isinstance(b, Pair) and a.units is b.units:
        raise Unsupported(
            f"the operator {op} on two functions of the same units, such as x * sigmoid(x), which are not independent "
            "(a built-in activation, such as nn.SiLU, has its own rule)"
        )


@_rule("mean")
def _mean(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Pair:
    m = op(x.m, *args, **kwargs)
    return Pair(m, op(x.v, *args, **kwargs) * (m.numel() / x.m.numel()))


@_rule("avg_pool2d", "avg_pool3d")
def _avg_pool(op: Any, x: Pair, kernel: Any, stride: Any = (), padding: Any = 0, *rest: Any) -> Pair:
    ceil_mode, include, divisor = (*rest, *(False, True, None)[len(rest) :])
    spatial = 2 if op is aten.avg_pool2d.default else 3
    ones = x.m.new_ones((1,) * (x.m.dim() - spatial) + x.m.shape[-spatial:])
    pool = partial(
        op, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=include
    )
    weight = pool(ones, divisor_override=divisor) / pool(ones, divisor_override=1)
    return Pair(pool(x.m, divisor_override=divisor), pool(x.v, divisor_override=divisor) * weight)


@_rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(op: Any, x: Pair, size: Sequence[int]) -> Pair:
    return _separable(op(x.m, size), x, [partial(F.adaptive_avg_pool1d, output_size=n) for n in size])


@_rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def _upsample(op: Any, x: Pair, size: Sequence[int], align: bool, *scales: Any) -> Pair:
    scales = scales or (None,) * len(size)
    line = [partial(_line, aten.upsample_linear1d, [n], align, s) for n, s in zip(size, scales, strict=True)]
    return _separable(op(x.m, size, align, *scales), x, line)


@_rule("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _upsample_plane(op: Any, x: Pair, size: Sequence[int], align: bool, *scales: Any) -> Pair:
    scales = scales or (None,) * len(size)
    line = [partial(_column, op, [n, 1], align, s, None) for n, s in zip(size, scales, strict=True)]
    return _separable(op(x.m, size, align, *scales), x, line)


def _line(op: Any, *args: Any) -> Any:
    *args, x = args
    return op(x, *args)


def _column(op: Any, *args: Any) -> Any:
    *args, x = args
    return op(x[..., None], *args)[..., 0]


def _separable(m: Tensor, x: Pair, lines: Sequence[Callable[[Tensor], Tensor]]) -> Pair:
    """A linear operator that works on each of the last axes in turn: its matrices are squared for the variance."""
    v = x.v
    for axis, line in zip(range(-len(lines), 0), lines, strict=True):
        matrix = line(torch.eye(v.shape[axis], dtype=v.dtype, device=v.device)[None])[0]
        v = (v.movedim(axis, -1) @ matrix.square()).movedim(-1, axis)
    return Pair(m, v)


@_rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
def _batch_norm(
    op: Any, x: Pair, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Exactly linear with running statistics; without (instance norm), the statistics of `m` are constants."""
    if training:
        mean = var = None
    m, _, rstd = aten.native_batch_norm(x.m, w, b, mean, var, training, 0.0, eps)
    scale = (rstd if training else (var + eps).rsqrt()) * (1 if w is None else w)
    v = x.v * scale.square().reshape(-1, *[1] * (x.dim() - 2))
    return (Pair(m, v), *(x.m.new_empty(0) for _ in op._schema.returns[1:]))


@_rule("native_layer_norm")
def _layer_norm(op: Any, x: Pair, shape: Sequence[int], w: Any, b: Any, eps: float) -> Any:
    m, mean, rstd = op(x.m, shape, w, b, eps)
    return Pair(m, x.v * (rstd * (1 if w is None else w)).square()), mean, rstd


@_rule("native_group_norm")
def _group_norm(op: Any, x: Pair, w: Any, b: Any, n: int, c: int, size: int, groups: int, eps: float) -> Any:
    m, mean, rstd = op(x.m, w, b, n, c, size, groups, eps)
    scale = rstd.repeat_interleave(c // groups, 1) * (1 if w is None else w)
    return Pair(m, x.v * scale.square().reshape(n, c, *[1] * (x.dim() - 2))), mean, rstd


def _kink(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of `Z ~ N(a, 1)`: P(Z > 0), the variance of `max(Z, 0)`, and `E max(Z, 0) - max(a, 0)`."""
    above, below = torch.special.ndtr(a), torch.special.ndtr(-a)
    density = (-0.5 * a.square()).exp() * 0.3989422804014327
    variance = above + a.square() * above * below - a * density * (above - below) - density.square()
    excess = density - a.abs() * torch.minimum(above, below)
    return above, variance.clamp_min(0), excess.clamp_min(0)


def _in_stds(m: Tensor, s: Tensor) -> Tensor:
    """`m / s`, finite where `s` is 0; beyond 20 standard deviations nothing changes."""
    return (m / s.clamp_min(torch.finfo(s.dtype).tiny)).clamp(-20, 20)


def _bent(op: Any, x: Pair, slope: Any) -> Pair:
    """Slope 1 above 0 and `slope` below: `slope · X + (1 - slope) · max(X, 0)`, whose covariance is `v · P(X > 0)`."""
    s = x.v.sqrt()
    above, variance, excess = _kink(_in_stds(x.m, s))
    bend = 1 - slope
    v = x.v * (slope * slope + bend * bend * variance + 2 * slope * bend * above)
    return Pair(op(x.m) + bend * s * excess, v.clamp_min(0))


@_rule("relu", elementwise=True)
def _relu(op: Any, x: Pair) -> Pair:
    return _bent(op, x, 0)


@_rule("leaky_relu", elementwise=True)
def _leaky_relu(op: Any, x: Pair, slope: float = 0.01) -> Pair:
    return _bent(lambda m: op(m, slope), x, slope)


@_rule("_prelu_kernel")
def _prelu(op: Any, x: Pair, slope: Tensor) -> Pair:
    return _bent(lambda m: op(m, slope), x, slope)


@_rule("abs", elementwise=True)
def _abs(op: Any, x: Pair) -> Pair:
    return _bent(op, x, -1)


@_rule("clamp", "hardtanh", elementwise=True)
def _clamp(op: Any, x: Pair, low: float | None = None, high: float | None = None) -> Pair:
    """With `R = max(X - bound, 0)`: the variance is `Var R_low - Var R_high - 2 E R_high · (high - E)`."""
    if op is aten.hardtanh.default:
        low, high = -1.0 if low is None else low, 1.0 if high is None else high
    s, m = x.v.sqrt(), x.m
    v, shift = x.v, torch.zeros_like(m)
    if low is not None and low != -inf:
        _, variance, shift = _kink(_in_stds(m - low, s))
        v = v * variance
    if high is not None and high != inf:
        _, variance, excess = _kink(_in_stds(m - high, s))
        shift = shift - excess
        inside = high - m.clamp(low, high) - s * shift
        v = v - x.v * variance - 2 * ((m - high).relu() + s * excess) * inside
    return Pair(op(m, low, high) + s * shift, v.clamp_min(0))


@_rule("clamp_min", elementwise=True)
def _clamp_min(op: Any, x: Pair, low: float) -> Pair:
    return _clamp(aten.clamp, x, low)


@_rule("clamp_max", elementwise=True)
def _clamp_max(op: Any, x: Pair, high: float) -> Pair:
    return _clamp(aten.clamp, x, None, high)


@_rule("hardsigmoid", elementwise=True)
def _hardsigmoid(op: Any, x: Pair) -> Pair:
    return _clamp(aten.clamp, Pair(x.m / 6 + 0.5, x.v / 36), 0.0, 1.0)


@_rule(
    *("sigmoid", "tanh", "gelu", "silu", "softplus", "elu", "celu", "mish", "hardswish", "exp", "erf", "sin", "cos"),
    elementwise=True,
)
def _curved(op: Any, x: Pair, *args: Any, **kwargs: Any) -> Pair:
    return Pair(*_quadrature(lambda m: op(m, *args, **kwargs), x.m, x.v))


@_rule("log_sigmoid_forward")
def _log_sigmoid(op: Any, x: Pair) -> Any:
    return Pair(*_quadrature(F.logsigmoid, x.m, x.v)), x.m.new_empty(0)


@_rule("pow", elementwise=True)
def _pow(op: Any, x: Any, exponent: Any) -> Pair:
    if not isinstance(x, Pair) or isinstance(exponent, Tensor) or exponent not in (1, 2, 3):
        raise Unsupported(f"the operator {op} with the exponent {exponent}")
    return _curved(op, x, exponent)  # type: ignore[no-any-return]


@_rule("glu")
def _glu(op: Any, x: Pair, axis: int = -1) -> Pair:
    (value, gate), (v, gate_v) = x.m.chunk(2, axis), x.v.chunk(2, axis)
    return _product(aten.mul, Pair(value, v), Pair(*_quadrature(torch.sigmoid, gate, gate_v)))  # type: ignore[no-any-return]


def _quadrature(f: Callable[[Tensor], Tensor], m: Tensor, v: Tensor) -> Two:
    """Gauss-Hermite: moments of the differences from `f(m)`, so that no variance gives exactly `f(m)`."""
    nodes, weights = hermegauss(_NODES)
    s, centre = v.sqrt(), f(m)
    first, second = torch.zeros_like(m), torch.zeros_like(m)
    for node, weight in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True):
        if abs(node) > 1e-9:
            step = f(m + node * s) - centre
            first += weight * step
            second += weight * step.square()
    return centre + first, (second - first.square()).clamp_min(0)


@_rule("maximum", elementwise=False)
def _maximum(op: Any, a: Any, b: Any) -> Pair:
    return Pair(*_clark((_m(a), _v(a)), (_m(b), _v(b))))


@_rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(
    op: Any, x: Pair, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Pair, Tensor]:
    """One axis after the other; indices, where they are used, are those of the means."""
    spatial = 2 if op is aten.max_pool2d_with_indices.default else 3
    plain, indices = op(x.m, kernel, stride, padding, dilation, ceil_mode)
    both = (x.m, x.v)
    settings = [_per_axis(value, spatial) for value in (kernel, stride or kernel, padding, dilation)]
    for axis, *window in zip(range(-spatial, 0), *settings, strict=True):
        both = _axis_maximum(both, axis, plain.shape[axis], *window)
    return Pair(*both), indices


def _per_axis(value: Any, spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def _axis_maximum(both: Two, axis: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> Two:
    short = (out - 1) * stride + dilation * (kernel - 1) + 1 - padding - both[0].shape[axis]
    pad = [0] * (-2 * axis - 2) + [padding, max(short, 0)]
    lowest = torch.finfo(both[0].dtype).min / 4
    m, v = F.pad(both[0], pad, value=lowest), F.pad(both[1], pad)
    pick = [torch.arange(i * dilation, i * dilation + (out - 1) * stride + 1, stride) for i in range(kernel)]
    rivals = [(m.index_select(axis, i.to(m.device)), v.index_select(axis, i.to(m.device))) for i in pick]
    while len(rivals) > 1:
        rest = rivals[len(rivals) // 2 * 2 :]
        rivals = [_clark(a, b) for a, b in zip(rivals[::2], rivals[1::2], strict=False)] + rest
    return rivals[0]


def _clark(a: Two, b: Two) -> Two:
    """Moments of the larger of two independent Gaussians."""
    s2 = a[1] + b[1]
    s = s2.sqrt()
    above, variance, excess = _kink(_in_stds(a[0] - b[0], s))
    v = a[1] * above + b[1] * (1 - above) - s2 * (above - variance)
    return torch.maximum(a[0], b[0]) + s * excess, v.clamp_min(0)
