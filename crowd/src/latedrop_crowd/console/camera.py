"""A source that is read in a thread of its own: the latest frame wins, and a stream that breaks is opened again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Event, Thread
from typing import Any

from latedrop import LatedropError
from latedrop_crowd.console.sources import Pixels, Source

__all__ = ["Camera", "Shot"]

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_RATES_OVER = 5.0  # seconds


@dataclass(frozen=True)
class Shot:
    """A frame as it came in.

    Attributes:
        number: of the frame since the camera was switched on.
        time: seconds since 1970.
        pixels: of the frame.
        steady: seconds by a clock that nobody sets: what lasts is counted in them.
    """

    number: int
    time: float
    pixels: Pixels
    steady: float


class Camera:
    """Reads a source until it is closed.

    Args:
        source: to read.
        arrived: shared by all cameras; notified when a frame or a change of state is there.
        wait: seconds before a broken stream is opened again the first time; doubled each time, up to a minute.
        on_change: called with a sentence when the state changes: `connected`, `lost`, `ended`.
    """

    def __init__(
        self,
        source: Source,
        arrived: Condition,
        wait: float = _FIRST_WAIT,
        on_change: Callable[[str, str], object] = lambda kind, text: None,
    ) -> None:
        self.source, self.state, self.words = source, "connecting", "connecting"
        self.skipped = self.taken = self.number = 0
        self._arrived, self._wait, self._on_change = arrived, wait, on_change
        self._latest: Shot | None = None
        self._times: dict[str, deque[float]] = {"in": deque(maxlen=400), "out": deque(maxlen=400)}
        self._stop = Event()
        self._thread = Thread(target=self._run, name=f"camera {source.name}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading; a decoder that waits for a byte is left behind, as its thread ends with the process."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def take(self) -> Shot | None:
        """The latest frame that was not taken yet; those before it are skipped."""
        with self._arrived:
            shot, self._latest = self._latest, None
            if shot is not None:
                self.skipped += shot.number - self.taken - 1
                self.taken = shot.number
                self._times["out"].append(time.monotonic())
            return shot

    def rates(self) -> dict[str, float]:
        """Frames per second that come in, and that are taken, over the last seconds."""
        now = time.monotonic()
        return {kind: _rate(list(times), now) for kind, times in self._times.items()}

    def about(self) -> dict[str, Any]:
        """State and rates, as plain data."""
        rates = self.rates()
        return {
            "state": self.state,
            "words": self.words,
            "arriving": round(rates["in"], 3),
            "counted": round(rates["out"], 3),
            "skipped": self.skipped,
        }

    def _run(self) -> None:
        wait = self._wait
        while not self._stop.is_set():
            why = "the stream ended"
            try:
                for pixels in self.source.frames():
                    if self.state != "live":
                        self._change("live", "connected")
                        wait = self._wait
                    self._show(pixels)
                    if self._stop.is_set():
                        return
                if not self.source.live:
                    self._change("ended", "the file has ended")
                    return
            except LatedropError as error:
                why = str(error)
            except Exception as error:  # decoders raise many kinds of errors
                why = type(error).__name__
            self._change("lost", f"no picture: {why} Trying again in {wait:.0f} s")
            self._stop.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _show(self, pixels: Pixels) -> None:
        with self._arrived:
            self.number += 1
            self._latest = Shot(self.number, time.time(), pixels, time.monotonic())
            self._times["in"].append(time.monotonic())
            self._arrived.notify_all()

    def _change(self, state: str, words: str) -> None:
        changed, self.state, self.words = state != self.state, state, words
        if changed:
            self._on_change(state, words)
        with self._arrived:
            self._arrived.notify_all()


def _rate(times: list[float], now: float) -> float:
    """Frames per second over the last seconds; where fewer than two came in these, since the last but one."""
    recent = max(2, sum(now - t < _RATES_OVER for t in times))
    used = times[-recent:]
    return (len(used) - 1) / (now - used[0]) if len(used) > 1 and now > used[0] else 0.0
