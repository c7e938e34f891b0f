"""Switches that torch has for all threads: on from the first who wants one until the last has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch

__all__ = ["held", "plain_kernels", "without_cudnn"]


@contextmanager
def held(switch: Callable[[], AbstractContextManager[Any]], key: str) -> Iterator[None]:
    """A switch is on inside; nobody waits."""
    taken = False
    try:
        with _HOLDING:
            count, state = _HELD.get(key, (0, None))
            if state is None:
                state = switch()
                state.__enter__()
            _HELD[key], taken = (count + 1, state), True  # somebody may interrupt from here on
        yield
    finally:
        if taken:
            with _HOLDING:
                count, state = _HELD.pop(key)
                if count > 1:
                    _HELD[key] = count - 1, state
                elif state is not None:
                    state.__exit__(None, None, None)


def without_cudnn() -> AbstractContextManager[None]:
    """No cuDNN inside: its recurrent functions have no backward pass in eval mode, and cannot be traced."""
    return held(lambda: torch.backends.cudnn.flags(enabled=False), "cudnn")


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Recurrent layers by plain operators, whose derivatives are plain too."""
    with catch_warnings():
        filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # nobody asks for it
        with held(lambda: torch.backends.mkldnn.flags(enabled=False), "mkldnn"), without_cudnn():
            yield


_HOLDING = Lock()
_HELD: dict[str, tuple[int, AbstractContextManager[Any] | None]] = {}
