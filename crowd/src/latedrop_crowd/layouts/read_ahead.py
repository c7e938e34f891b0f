"""Frames read ahead by a few threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_order"]

_Item = TypeVar("_Item")


def in_order(read: Callable[[int], _Item], indices: Sequence[int], *, ahead: int = 32) -> Iterator[_Item]:
    """Results in the order of the indices, read by a few threads, as decoding leaves the interpreter alone.

    Only so many are read ahead: a set of frames may be larger than the memory.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        waiting = deque(pool.submit(read, index) for index in indices[:ahead])
        for index in indices[ahead:]:
            first = waiting.popleft()
            yield first.result()
            waiting.append(pool.submit(read, index))
        while waiting:
            yield waiting.popleft().result()
