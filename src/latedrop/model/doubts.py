"""Checks of values, while a function is traced: none can be looked at then, so they become part of what is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["doubted", "noting_doubts"]

_NOTED: ContextVar[list[Tensor] | None] = ContextVar("_NOTED", default=None)


def doubted(flags: Tensor) -> None:
    """Where one of these is True, what is being traced must not be trusted for these inputs."""
    noted = _NOTED.get()
    if noted is not None:
        noted.append(flags.any())


@contextmanager
def noting_doubts() -> Iterator[list[Tensor]]:
    """What is doubted inside; elsewhere nobody asks."""
    noted: list[Tensor] = []
    before = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(before)
