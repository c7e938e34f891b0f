"""Which axis of a layer's input counts the examples, and how they lie along it: from the inputs of two passes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from latedrop.data.rows import reordering
from latedrop.errors import SiteError
from latedrop.network.probe import Run

__all__ = ["common_layout", "follows", "in_order"]


def common_layout(name: str, small: list[Run], large: list[Run] | None) -> tuple[int | None, bool]:
    """The batch axis of all calls of a layer, and whether folded examples alternate along it."""
    if large is None:
        return 0, False
    if len(large) != len(small):
        raise SiteError(
            f"expected layer {name!r} to run equally often for every batch size; it ran {len(small)} times for two "
            f"examples and {len(large)} times for three. Use kind='channel', or leave it out with select=."
        )
    layouts = {_layout(name, a, b) for a, b in zip(small, large, strict=True)}
    if len(layouts) > 1:
        raise SiteError(
            f"expected the examples along one axis in every call of layer {name!r}; found axes "
            f"{sorted(str(axis) for axis, _ in layouts)}. Use kind='channel', or leave it out with select=."
        )
    return layouts.pop()


def _layout(name: str, small: Run, large: Run) -> tuple[int | None, bool]:
    """The batch axis, and whether folded examples alternate along it."""
    a, b = small.value, large.value
    if small.rows == large.rows:
        return _turned_layout(a, b, small.rows)
    axes = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
    if not axes:
        return None, False
    axis = axes[0]
    if len(axes) > 1 or a.shape[axis] * large.rows != b.shape[axis] * small.rows:
        raise SiteError(
            f"expected the input of layer {name!r} to grow along one axis with the number of examples; found shape "
            f"{tuple(a.shape)} for two examples and {tuple(b.shape)} for three. Use kind='channel', or leave the layer "
            "out with select=."
        )
    inner = a.shape[axis] // small.rows
    if inner == 1:
        return axis, False
    a, b = a.movedim(axis, 0).float(), b.movedim(axis, 0).float()
    close = partial(torch.allclose, rtol=1e-2, atol=_rounding(a))
    if close(a, b[: len(a)]):
        return axis, False
    if close(a.unflatten(0, (inner, small.rows)), b.unflatten(0, (inner, large.rows))[:, : small.rows]):
        return axis, True
    raise SiteError(
        f"expected the examples to be folded in order into axis {axis} of the input of layer {name!r}, of shape "
        f"{tuple(small.value.shape)}; found another order. Use kind='channel', or leave it out with select=."
    )


def follows(there: Run, back: Run, axis: int, interleaved: bool) -> bool:
    """Return True if rows that go in in another order lie in that order."""
    a, b, rows = there.value.float(), back.value.float(), there.rows
    if a.shape != b.shape or a.shape[axis] % rows:
        return False
    order = torch.tensor(reordering(rows), device=a.device)
    expected = _split(a, rows, axis, interleaved).index_select(axis + interleaved, order).flatten(axis, axis + 1)
    return torch.allclose(expected, b, rtol=1e-2, atol=_rounding(a))


def in_order(small: Run, large: Run, axis: int, interleaved: bool) -> bool:
    """Whether the first rows lie in the same order, with and without others behind them."""
    a, b = small.value.float(), large.value.float()
    if small.rows >= large.rows or a.shape[axis] % small.rows or b.shape[axis] % large.rows:
        return True  # not to be told from these
    split = (partial(_split, rows=run.rows, axis=axis, interleaved=interleaved) for run in (small, large))
    first, second = (cut(value) for cut, value in zip(split, (a, b), strict=True))
    second = second.narrow(axis + interleaved, 0, small.rows)
    return first.shape != second.shape or torch.allclose(first, second, rtol=1e-2, atol=_rounding(a))


def _split(value: Tensor, rows: int, axis: int, interleaved: bool) -> Tensor:
    found: Tensor = value.unflatten(axis, (-1, rows) if interleaved else (rows, -1))
    return found


def _rounding(value: Tensor) -> float:
    return 1e-3 * float(value.abs().max()) + 1e-12 if value.numel() else 0.0


def _turned_layout(value: Tensor, turned: Tensor, rows: int) -> tuple[int | None, bool]:
    """The same from two passes of one size, the second with its rows moved on by one."""
    if torch.equal(value, turned):
        return None, False
    a, b = value.float(), turned.float()
    close = partial(torch.allclose, rtol=1e-3, atol=1e-4 * float(a.abs().max()))
    for axis in (axis for axis, size in enumerate(a.shape) if size % rows == 0):
        inner = a.shape[axis] // rows
        if close(a.unflatten(axis, (rows, inner)).roll(1, axis), b.unflatten(axis, (rows, inner))):
            return axis, False
        if close(a.unflatten(axis, (inner, rows)).roll(1, axis + 1), b.unflatten(axis, (inner, rows))):
            return axis, True
    return 0, False  # rows that act on each other, such as the nodes of a graph
