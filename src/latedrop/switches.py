"""Switches that torch has for all threads: on from the first who wants one until the last has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

__all__ = ["held"]


@contextmanager
def held(switch: Callable[[], AbstractContextManager[Any]], key: str) -> Iterator[None]:
    """A switch is on inside; nobody waits."""
    with _HOLDING:
        count, state = _HELD.get(key, (0, None))
        if state is None:
            state = switch()
            state.__enter__()
        _HELD[key] = count + 1, state
    try:
        yield
    finally:
        with _HOLDING:
            count, state = _HELD.pop(key)
            if count > 1:
                _HELD[key] = count - 1, state
            elif state is not None:
                state.__exit__(None, None, None)


_HOLDING = Lock()
_HELD: dict[str, tuple[int, AbstractContextManager[Any] | None]] = {}
