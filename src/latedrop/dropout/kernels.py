"""Masks on a CUDA device in one kernel per site: the hash of `masks`, multiplied in at once.

By plain operators the hash would pass a dozen times over memory; here a mask is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["product"]

_BLOCK = 1024
_REPEATS = 4  # row blocks of one program: they share the hash
_FAR = 2**31 - 1
_MOST_DRAWS = 65535  # of a grid


@triton.jit  # type: ignore[untyped-decorator]
def _kept(keys, draw, unit, least, block: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.load(keys + 2 * draw).to(tl.uint32, bitcast=True)
    b = tl.load(keys + 2 * draw + 1).to(tl.uint32, bitcast=True)
    x = unit.to(tl.uint32) + a  # then the rounds of `masks.ROUNDS`: globals and arguments cost time in every launch
    x = (x ^ (x >> 17)) * tl.full((block,), 0xED5AD4BB, tl.uint32)
    x = x ^ b
    x = (x ^ (x >> 11)) * tl.full((block,), 0xAC4C1B51, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((block,), 0x31848BAB, tl.uint32)
    x = x ^ (x >> 14)
    return x >= least.to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    out, value, keys, least, scale, blocks, out_draw, value_draw,
    rows, value_row, out_row,
    n1, value1, out1, unit1, n2, value2, out2, unit2,
    two: tl.constexpr, wide: tl.constexpr, high: tl.constexpr, repeats: tl.constexpr, read: tl.constexpr,
):  # fmt: skip
    if read:  # threshold less 2^31, and scale, from memory: a CUDA graph serves all rates
        least = tl.load(least).to(tl.uint32, bitcast=True) ^ tl.full((), 0x80000000, tl.uint32)
        scale = tl.load(scale).to(tl.float32)
    draw = tl.program_id(1).to(tl.int64)
    place = (tl.program_id(0) % blocks) * wide + tl.arange(0, wide)
    if two:
        i1, i2 = place // n2, place % n2
        there = place < n1 * n2
        unit, to, at = i1 * unit1 + i2 * unit2, i1 * out1 + i2 * out2, i1 * value1 + i2 * value2
    else:
        there = place < n2
        unit, to, at = place * unit2, place * out2, place * value2
    keep = _kept(keys, draw, unit, least, wide)
    factor = tl.where(keep, scale, 0.0)
    row = (tl.program_id(0) // blocks).to(tl.int64) * (high * repeats) + tl.arange(0, high)
    for _ in range(repeats):
        inside = (row < rows)[:, None] & there[None, :]
        units = tl.load(value + draw * value_draw + (row * value_row)[:, None] + at[None, :], mask=inside)
        thinned = (units.to(tl.float32) * factor[None, :]).to(out.dtype.element_ty)
        tl.store(out + draw * out_draw + (row * out_row)[:, None] + to[None, :], thinned, mask=inside)
        row += high


def product(
    value: Tensor, keys: Tensor, shape: Sequence[int], least: int | Tensor, scale: float | Tensor
) -> Callable[[Tensor], Tensor] | None:
    """Return a function of values like this one, `(draws, ...)`: times the masks `(draws, *shape)` of these keys.

    In single precision, rounded to the dtype of the value, with the axes in memory as the value has them. None where
    they are too irregular for the kernel. `least` is the threshold of the hash; or a tensor of it less 2^31, as
    int32, with a tensor of the scale.
    """
    plan = _planned(value.shape, value.stride(), tuple(shape))
    if plan is None or len(keys) > _MOST_DRAWS:
        return None
    strides, programs, blocks, axes, constants = plan
    sizes, dtype, device, grid = value.shape, value.dtype, value.device, (programs, len(keys), 1)
    read = isinstance(least, Tensor)
    # A wide threshold makes one kernel serve all rates.
    limit = least if isinstance(least, Tensor) else least | (1 << 40)
    arguments = (keys, limit, scale, blocks, strides[0], value.stride(0), *axes, *constants, read)
    start: Any = None  # of the compiled kernel, without Triton's look at every argument

    def launch(value: Tensor) -> Tensor:
        nonlocal start
        out = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        # Triton starts kernels on the current device.
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            aligned = value.data_ptr() % 16 == 0  # as the compiled kernel takes for granted
            if start is not None and aligned:
                start(out, value, *arguments)
            else:
                kernel = _product[grid](out, value, *arguments)
                start = kernel[grid] if aligned else None
        return out

    return launch


@lru_cache(maxsize=1024)
def _planned(sizes: Sequence[int], steps: Sequence[int], shape: Sequence[int]) -> Any:
    """Plan how the kernel goes over values of these sizes and strides, draws first.

    Returns strides of the output, programs, blocks of one row, and what the kernel wants to know of axes and sizes.

    It takes an axis along which a mask does not change, and two others; None where there are more.
    """
    sizes, steps = sizes[1:], steps[1:]
    fits = len(shape) == len(sizes) and all(own in (1, size) for own, size in zip(shape, sizes, strict=True))
    if not fits or 0 in sizes:
        return None
    order = list(range(len(sizes)))
    if all(step > 0 for step in steps):
        order.sort(key=lambda i: -steps[i])
    units, count = [0] * len(sizes), 1
    for i in reversed(range(len(sizes))):
        units[i], count = (count if shape[i] > 1 else 0), count * shape[i]
    outs, total = [0] * len(sizes), 1
    for i in reversed(order):
        outs[i], total = total, total * sizes[i]
    axes: list[Any] = []  # size, and steps in the value, in the output and in the units of a mask
    for i in order:
        inner: Any = sizes[i], steps[i], outs[i], units[i]
        if sizes[i] == 1:
            continue
        if axes and all(outer == sizes[i] * step for outer, step in zip(axes[-1][1:], inner[1:], strict=True)):
            inner = (axes.pop()[0] * sizes[i], *inner[1:])
        axes.append(inner)
    one = (1, 0, 0, 0)
    rows = next((axis for axis in axes if axis[3] == 0), None)
    others = [axis for axis in axes if axis is not rows]
    if len(others) > 2 or any(size * max(at, to) > _FAR for size, at, to, _ in others):
        return None
    rows = rows or one
    padded: list[Any] = [*[one] * (2 - len(others)), *others]
    first, second = padded
    places = first[0] * second[0]
    wide = min(_BLOCK, 1 << (places - 1).bit_length())
    high = _BLOCK // wide
    blocks = -(-places // wide)
    programs = blocks * -(-rows[0] // (high * _REPEATS))
    return (total, *outs), programs, blocks, (*rows[:3], *first, *second), (first[0] > 1, wide, high, _REPEATS)
