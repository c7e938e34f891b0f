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
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

__all__ = ["progress", "shown_on"]

_T = TypeVar("_T")
_DELAY, _EVERY = 2.0, 5.0  # seconds
_log = logging.getLogger(__name__)
_now = time.monotonic


@contextmanager
def progress(
    what: str, total: float | None = None, unit: str = "rows", *, show: bool = True
) -> Iterator[Callable[[float], Any]]:
    """Give a function to call with the number of units that were done since; with `show=False` nothing is seen of it.

    `total` may be more than there are, where some are left out.
    """
    begin = last = _now()
    done = 0.0
    with ExitStack() as stack:
        bar: Any = None
        if show and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            scaled: dict[str, Any] = {"unit": f" {unit}", "unit_scale": True}  # as parts of a row may be done
            bar = stack.enter_context(tqdm(desc=what, total=total, delay=_DELAY, leave=False, **scaled))

        def tick(more: float) -> None:
            nonlocal done, last
            done += more
            if bar is not None:
                bar.update(more)
            elif show and _now() - last >= _EVERY:
                last = _now()
                line = _line(done, total, unit, last - begin)
                print(f"latedrop: {what}: {line}", file=sys.stderr, flush=True)

        yield tick
    _log.debug("%s: %.0f %s in %.1f s", what, done, unit, _now() - begin)


def shown_on(
    items: Iterable[_T], what: str, total: float | None = None, unit: str = "rows", *, show: bool
) -> Iterator[_T]:
    """Yield the items, with progress over them."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(what, total, unit, show=show) as tick:
        for item in items:
            yield item
            tick(1)


def _line(done: float, total: float | None, unit: str, seconds: float) -> str:
    speed = done / seconds
    rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
    if total is None:
        return f"{done:,.0f} {unit}, {rate} {unit}/s"
    left = max(total - done, 0.0) / speed if speed > 0 else 0.0
    spoken = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min" if left < 5400 else f"{left / 3600:.1f} h"
    return f"{done:,.0f} of {total:,.0f} {unit}, {rate} {unit}/s, {spoken} left"
