"""Masks on a CUDA device in one kernel per site: the hash of `masks`, written down as 0 or the scale.

By plain operators the hash would pass a dozen times over memory; here a mask is written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["launch"]

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _masks(  # type: ignore[no-untyped-def]
    out, keys, units, least, scale,
    s0: tl.constexpr, f0: tl.constexpr, s1: tl.constexpr, f1: tl.constexpr,
    s2: tl.constexpr, f2: tl.constexpr, s3: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    draw = tl.program_id(1).to(tl.int64)
    a = tl.load(keys + 2 * draw).to(tl.uint32, bitcast=True)
    b = tl.load(keys + 2 * draw + 1).to(tl.uint32, bitcast=True)
    unit = tl.program_id(0) * block + tl.arange(0, block)
    x = unit.to(tl.uint32) + a
    x = (x ^ (x >> s0)) * tl.full((block,), f0, tl.uint32)
    x = x ^ b
    x = (x ^ (x >> s1)) * tl.full((block,), f1, tl.uint32)
    x = (x ^ (x >> s2)) * tl.full((block,), f2, tl.uint32)
    x = x ^ (x >> s3)
    keep = x >= least.to(tl.uint32)
    tl.store(out + draw * units + unit, tl.where(keep, scale, 0.0).to(out.dtype.element_ty), mask=unit < units)


def launch(
    keys: Tensor, units: int, least: int, scale: float, dtype: torch.dtype, rounds: Sequence[tuple[int, int]]
) -> Tensor | None:
    """Masks `(draws, units)` of draws with these keys, by the rounds of the hash; None where the grid is too large."""
    draws = len(keys)
    if draws > 65535 or not dtype.is_floating_point:
        return None
    out = torch.empty((draws, units), dtype=dtype, device=keys.device)
    (s0, f0), (s1, f1), (s2, f2), (s3, _) = rounds
    grid, wide = (triton.cdiv(units, _BLOCK), draws), least | (1 << 40)  # wide: one kernel for all rates
    with torch.cuda.device(keys.device):
        _masks[grid](out, keys, units, wide, scale, s0, f0, s1, f1, s2, f2, s3, _BLOCK)
    return out
