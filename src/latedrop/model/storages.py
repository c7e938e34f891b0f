"""Where tensors lie: addresses of their storages, and stretches of these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from latedrop.model.rows import tensors
from latedrop.torch_inside import inmost

__all__ = ["address", "extent", "is_covered", "placed", "storage_of", "stretch"]


def storage_of(tensor: Tensor) -> int | None:
    """The address of a tensor's storage, or of what a transform has wrapped; None where that is none, or empty."""
    where = _pointer(tensor)
    return (_pointer(inmost(tensor)) if where is None else where) or None


def address(tensor: Tensor) -> int:
    """The same of what a transform has wrapped; below 0 one of the tensor itself, where numbers lie elsewhere."""
    inner = inmost(tensor)
    where = _pointer(inner)
    return -id(inner) if where is None else where


def placed(value: Any) -> list[tuple[int, Tensor]]:
    """The tensors inside something, each with its address; an address below 0 is good as long as its tensor is held."""
    return [(address(tensor), tensor) for tensor in tensors(value)]


def extent(tensor: Tensor) -> int:
    """How far a tensor reaches in its storage."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def stretch(tensor: Tensor) -> tuple[int, int, int]:
    """Where a tensor lies: the address of its storage, and the first and last place in it."""
    inner = inmost(tensor)
    start = int(inner.storage_offset())
    return address(inner), start, start + extent(inner)


def is_covered(tensor: Tensor, stretches: Iterable[tuple[int, int, int]]) -> bool:
    """Whether some stretches of storages hold all of a tensor.

    >>> import torch
    >>> whole = torch.zeros(4, 2)
    >>> is_covered(whole, [stretch(whole[:2])]), is_covered(whole, [stretch(whole[2:]), stretch(whole[:2])])
    (False, True)
    """
    home, done, end = stretch(tensor)
    for start, stop in sorted((start, stop) for where, start, stop in stretches if where == home):
        if start <= done:
            done = max(done, stop)
    return done >= end


def _pointer(tensor: Tensor) -> int | None:
    """None where torch keeps the numbers of a tensor elsewhere (`vmap`, oneDNN)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return None
