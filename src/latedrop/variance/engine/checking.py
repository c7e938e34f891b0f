"""A program is compared with the steps that it stands for before it is used alone, on inputs like its first ones.

What Python code took out of a tensor, numbers of other generators than torch's, and what was read past torch stay as
they were when the program was traced. On other inputs, or simply the next time, such a program is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.model.arrays import map_values
from latedrop.model.rows import row_count
from latedrop.torch_inside import weights_of
from latedrop.variance.engine.refusing import refuse

__all__ = ["check_program"]

_EXACT, _SHARE, _OF_HALVES, _OF_RANGE = (1e-3, 1e-2), 3e-3, 0.05, 0.05
"""How far numbers may be apart, of the largest: means and variances of full precision on a CPU, others, halves.

But for the first two also so much of the range of all rows: TF32 has ten bits, and ranks are steps."""
_ROUNDINGS, _OF_SMALL = 8, 1e-30
"""Of outputs far from 0, in the variance of their small differences; what is smaller has lost its digits."""

Numbers = Sequence[Tensor] | None


def check_program(
    model: nn.Module, x: Any, program: Callable[[Any], Numbers], steps: Callable[[Any], Sequence[Tensor]]
) -> None:
    """Refuse a program that says something else than the steps, of other inputs, or of `x` where these take no others.

    A program may say nothing (None), where a check of values failed.
    """
    weights = weights_of(model)
    halves = any(weight.is_floating_point() and weight.itemsize < 4 for weight in weights)
    devices = {weight.device.type for weight in weights}
    halves |= any(torch.is_autocast_enabled(kind) for kind in devices)
    full = not halves and devices <= {"cpu"} and torch.get_float32_matmul_precision() == "highest"
    try:
        batch = _others(x)
        expected = steps(batch)
    except Exception:  # entries that share their place, or the model takes no such numbers
        batch, expected = x, steps(x)
    kinds = {torch.bfloat16} if halves else {w.dtype for w in weights if w.is_floating_point()} or {torch.float32}
    eps = max(torch.finfo(kind).eps for kind in kinds)
    _compare(program(batch), expected, _OF_HALVES if halves else _SHARE, eps, exact=full)


def _compare(found: Numbers, expected: Sequence[Tensor], share: float, eps: float, *, exact: bool) -> None:
    """Means first, then variances; of classes log-probabilities and logits."""
    means = expected[0] if expected else torch.zeros(0)
    offset = float(means[means.isfinite()].abs().max()) if bool(means.isfinite().any()) else 0.0
    rounding = _ROUNDINGS * eps * offset
    for place, (a, b) in enumerate(zip(found or (), expected, strict=False)):
        known = a.isfinite() & b.isfinite()
        if not b.is_floating_point() or not bool(known.any()):
            continue
        a, b = torch.where(known, a, 0.0).double(), torch.where(known, b, 0.0).double()
        apart, most = float(b.max() - b.min()) if len(b) > 1 else 0.0, float(b.abs().max())
        least = _EXACT[place] * most if exact and place < 2 else share * most + _OF_RANGE * apart
        least += rounding * most**0.5 + rounding**2 + _OF_SMALL if place else 0.0
        if float((a - b).abs().max()) > least:
            refuse(
                "other numbers in the program than step by step: noise of its own, or values that Python code takes "
                "out of its tensors"
            )


def _others(x: Any) -> Any:
    """Inputs of the same shape: the later half of the rows, last first and each of them twice, nine tenths as large."""
    rows = row_count(x)
    order = [rows - 1 - i // 2 for i in range(rows)]  # other counts and sums, of rows that there are

    def changed(value: Tensor) -> Tensor:
        moved = value[order] if value.dim() > 0 and len(value) == rows and rows > 1 else value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.copy_(moved * 0.9 if moved.is_floating_point() else moved)

    return map_values(x, changed)
