"""How far work is: a bar on a terminal, else a line every few seconds.

    latedrop: calibrating: 1,200 of 3,000 rows, 240 rows/s, 8 s left

Nothing is shown of work that is over in two seconds on a terminal, in five elsewhere. Long trainings and studies, whose
bars show losses, have their own.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["progress", "shown_on"]

_T = TypeVar("_T")
_DELAY, _EVERY = 2.0, 5.0  # seconds
_log = logging.getLogger(__name__)


@contextmanager
def progress(
    what: str, total: float | None = None, unit: str = "rows", *, show: bool = True
) -> Iterator[Callable[[float], Any]]:
    """Gives what to call with the number of units that were done since; with `show=False` nothing is seen of it.

    `total` may be more than there are, where some are left out.
    """
    lines = _Lines(what, total, unit)
    if not show:
        yield lines.add
    elif sys.stderr is not None and sys.stderr.isatty():
        from tqdm import tqdm

        scaled: dict[str, Any] = {"unit": f" {unit}", "unit_scale": True}  # as parts of a row may be done
        with tqdm(desc=what, total=total, delay=_DELAY, leave=False, **scaled) as bar:

            def both(done: float) -> None:
                lines.add(done)
                bar.update(done)

            yield both
    else:

        def spoken(done: float) -> None:
            lines.add(done)
            if lines.is_due():
                print(f"latedrop: {lines}", file=sys.stderr, flush=True)

        yield spoken
    _log.debug("%s: %.0f %s in %.1f s", what, lines.done, unit, _now() - lines.begin)


def shown_on(
    items: Iterable[_T], what: str, total: float | None = None, unit: str = "rows", *, show: bool
) -> Iterator[_T]:
    """The items, with progress over them."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(what, total, unit, show=show) as tick:
        for item in items:
            yield item
            tick(1)


class _Lines:
    """What is done, as a line from time to time."""

    def __init__(self, what: str, total: float | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.begin = self.last = _now()
        self.done = 0.0

    def add(self, done: float) -> None:
        self.done += done

    def is_due(self) -> bool:
        if _now() - self.last < _EVERY:
            return False
        self.last = _now()
        return True

    def __str__(self) -> str:
        speed = self.done / (_now() - self.begin)
        of = f" of {self.total:,.0f}" if self.total is not None else ""
        left = ""
        if self.total is not None and speed > 0:
            left = f", {_spoken(max(self.total - self.done, 0.0) / speed)} left"
        rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        return f"{self.what}: {self.done:,.0f}{of} {self.unit}, {rate} {self.unit}/s{left}"


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _now() -> float:
    return time.monotonic()
