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

_SHARE, _OF_HALVES, _OF_RANGE = 3e-3, 0.05, 0.05
"""How far numbers may be apart: of the largest, where anything is in half precision, and of the range of all rows."""

Numbers = Sequence[Tensor] | None


def check_program(
    model: nn.Module, x: Any, program: Callable[[Any], Numbers], steps: Callable[[Any], Sequence[Tensor]]
) -> None:
    """Refuse a program that says something else than the steps, of other inputs, or of `x` where these take no others.

    A program may say nothing (None), where a check of values failed.
    """
    weights = weights_of(model)
    halves = any(weight.is_floating_point() and weight.itemsize < 4 for weight in weights)
    halves |= any(torch.is_autocast_enabled(kind) for kind in {weight.device.type for weight in weights})
    share = _OF_HALVES if halves else _SHARE
    try:
        batch = _others(x)
        expected = steps(batch)
    except Exception:  # entries that share their place, or the model takes no such numbers
        batch, expected = x, steps(x)
    _compare(program(batch), expected, share)


def _compare(found: Numbers, expected: Sequence[Tensor], share: float) -> None:
    for a, b in zip(found or (), expected, strict=False):
        known = a.isfinite() & b.isfinite()
        if not b.is_floating_point() or not bool(known.any()):
            continue
        a, b = torch.where(known, a, 0.0).double(), torch.where(known, b, 0.0).double()
        apart = float(b.max() - b.min()) if len(b) > 1 else 0.0
        if float((a - b).abs().max()) > share * float(b.abs().max()) + _OF_RANGE * apart:
            refuse(
                "other numbers in the program than step by step: noise of its own, or values that Python code takes "
                "out of its tensors"
            )


def _others(x: Any) -> Any:
    """Inputs of the same shape: each row in the place of the next, numbers nine tenths as large."""
    rows = row_count(x)

    def changed(value: Tensor) -> Tensor:
        moved = value.roll(1, 0) if value.dim() > 0 and len(value) == rows and rows > 1 else value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.copy_(moved * 0.9 if moved.is_floating_point() else moved)

    return map_values(x, changed)
