"""Read live frames from video files, folders, cameras, network streams, and synthetic scenes.

Each source yields frames at its own rate. A password in an address is never shown.

A `Camera` reads a source in its own thread, keeps only the latest frame, and reopens a broken stream.
"""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from latedrop import LatedropError
from latedrop.errors import ArgumentError, FileError
from latedrop.files import in_utf8
from latedrop.terminal import need
from latedrop_crowd.frames import images_in, is_video, read_pixels
from latedrop_crowd.scenes import Walks

__all__ = ["Camera", "Pixels", "Shot", "Source", "demo_sources", "open_sources"]

Pixels = npt.NDArray[np.uint8]
"""Pixels of a picture, `(H, W)` or `(H, W, 3)`."""
_SCHEMES = ("rtsp", "rtsps", "http", "https")
_SILENT = 10.0  # seconds without data after which a stream counts as broken
_DEMO_RATE = 8.0
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_RATES_OVER = 5.0  # seconds over which frame rates are averaged


@dataclass(frozen=True)
class Source:
    """Describe one source of frames."""

    name: str  # shown to users, without a password
    live: bool  # True for a stream, which is reopened when it ends; False for files
    # Opens the source from the start, and yields frames at its own rate.
    frames: Callable[[], Iterator[Pixels]]


def open_sources(words: Sequence[str], fps: float | None = None, *, loop: bool = False) -> list[Source]:
    """Make sources from paths, camera numbers and addresses; check files now, and open streams when they are read.

    `fps` is the frame rate of folders (None: 5 per second) and of videos (None: their own).
    """
    if fps is not None and not 0 < fps <= 1000:
        raise ArgumentError(
            f"expected --fps above 0 and at most 1000 frames per second; found {fps}. The default is 5 for folders."
        )
    sources: dict[str, Source] = {}
    places: list[str] = []
    for word in words:
        source = _source(word, fps, loop)
        places.append(os.path.realpath(word) if os.path.exists(word) else word)
        if places[-1] in places[:-1]:
            raise ArgumentError(f"expected each source once; found {source.name} twice. Remove one of them.")
        plain = in_utf8(source.name)
        names = chain([plain], (f"{plain} ({number})" for number in count(2)))
        name = next(name for name in names if name not in sources)  # folders of the same name, channels of one recorder
        sources[name] = replace(source, name=name)
    return list(sources.values())


def demo_sources(seed: int = 0) -> list[Source]:
    """Make two synthetic scenes of squares with walking people; no data are read."""
    squares = {"Station square": Walks(seed), "Market square": Walks(seed + 1, 84.0, 5, 30)}
    return [Source(name, True, lambda walks=walks: _walking(walks)) for name, walks in squares.items()]  # type: ignore[misc]


def _source(word: str, fps: float | None, loop: bool) -> Source:
    if re.fullmatch(r"\d{1,3}", word):
        if sys.platform == "win32":
            raise ArgumentError(
                f"expected Linux or macOS for camera {word}; found Windows, where numbers are not supported. Pass the "
                "address of the camera's stream: rtsp:// or http://."
            )
        need("video", "av", of="latedrop-crowd")
        return Source(f"Camera {int(word)}", True, lambda: _streamed(*_camera(int(word))))
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", word):
        parts = urlsplit(word)
        if parts.scheme.lower() not in _SCHEMES or not parts.hostname:
            raise ArgumentError(
                f"expected an address that begins with {', '.join(s + '://' for s in _SCHEMES)} and names a host; "
                f"found {parts.scheme}://{parts.hostname or ''}. Correct the address."
            )
        need("video", "av", of="latedrop-crowd")
        name = f"{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
        return Source(name, True, lambda: _streamed(word, None, _stream_options(parts.scheme)))
    path = Path(word)
    if path.is_dir():
        images = images_in(path)
        return Source(
            path.name or str(path), False, lambda: _again(lambda: _paced(map(read_pixels, images), fps or 5.0), loop)
        )
    if not path.is_file():
        raise FileError(
            f"expected a video, a folder of images, the number of a camera or an rtsp:// or http:// address; found "
            f"no file {word}. Check the path."
        )
    if not is_video(path):
        raise FileError(
            f"expected a video file such as .mp4, or a folder of images; found {path.name}. Rename it or convert it."
        )
    need("video", "av", of="latedrop-crowd")
    return Source(path.name, False, lambda: _again(lambda: _played(path, fps), loop))


def _again(frames: Callable[[], Iterator[Pixels]], loop: bool) -> Iterator[Pixels]:
    yield from frames()
    while loop:
        yield from frames()


def _walking(walks: Walks) -> Iterator[Pixels]:
    begun = time.monotonic()
    return _paced((walks.picture(time.monotonic() - begun + 2.0) for _ in count()), _DEMO_RATE)


def _paced(frames: Iterable[Pixels], fps: float) -> Iterator[Pixels]:
    """Yield `fps` frames per second; a late frame does not speed up the next ones."""
    due = time.monotonic()
    for pixels in frames:
        yield pixels
        due = max(due + 1 / fps, time.monotonic() - 1 / fps)
        time.sleep(max(0.0, due - time.monotonic()))


def _camera(number: int) -> tuple[str, str | None, dict[str, str]]:
    if sys.platform == "darwin":
        return str(number), "avfoundation", {"framerate": "30"}
    return f"/dev/video{number}", "v4l2", {}


def _stream_options(scheme: str) -> dict[str, str]:
    micro = str(int(_SILENT * 1e6))
    return {"rtsp_transport": "tcp", "timeout": micro} if scheme.startswith("rtsp") else {"rw_timeout": micro}


def _streamed(address: str, kind: str | None, options: dict[str, str]) -> Iterator[Pixels]:
    """Yield the frames of a stream; errors do not quote the address, which may contain a password."""
    with _opened(address, format=kind, options=options, timeout=_SILENT) as (frames, _):
        yield from frames


def _played(path: Path, fps: float | None) -> Iterator[Pixels]:
    """Yield the frames of a file at its own rate, or at `fps`."""
    with _opened(os.fspath(path)) as (frames, rate):
        yield from _paced(frames, fps or rate)


@contextmanager
def _opened(address: str, **options: Any) -> Iterator[tuple[Iterator[Pixels], float]]:
    """Open a video; give an iterator of frames without waiting, and its frame rate."""
    import av

    try:
        with av.open(address, **options) as container:
            if not container.streams.video:
                raise FileError("expected a video track; found none.")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            frames = (frame.to_ndarray(format="rgb24") for frame in container.decode(stream))
            first = next(frames, None)
            if first is None:
                raise FileError("expected frames; found a video without any.")
            yield chain((first,), frames), float(stream.average_rate or 25)
    except (av.FFmpegError, OSError) as error:
        raise FileError(f"expected frames; {getattr(error, 'strerror', None) or type(error).__name__}.") from None


@dataclass(frozen=True)
class Shot:
    """Hold a frame with its number and time."""

    number: int  # counted since the camera was started
    time: float  # seconds since 1970
    pixels: Pixels
    steady: float  # seconds of a monotonic clock, for durations


class Camera:
    """Read a source in a thread until closed; notify `arrived`, shared by cameras, of frames and changes of state.

    A broken stream is reopened after `wait` seconds, then after twice as long, up to a minute.
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
        """Start the reading thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading; a decoder that is waiting for data is not joined, and ends with the process."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def take(self) -> Shot | None:
        """Return the latest frame if it was not taken yet, else None; earlier ones are skipped."""
        with self._arrived:
            shot, self._latest = self._latest, None
            if shot is not None:
                self.skipped += shot.number - self.taken - 1
                self.taken = shot.number
                self._times["out"].append(time.monotonic())
            return shot

    def about(self) -> dict[str, Any]:
        """Return the state, and recent rates of arriving and counted frames per second, as a dict for JSON."""
        now = time.monotonic()
        arriving, taken = (_rate(list(self._times[way]), now) for way in ("in", "out"))
        rates = {
            "arriving": round(arriving, 3),
            "counted": round(min(arriving, taken), 3),
        }  # the two rates are measured over different times
        return {"state": self.state, "words": self.words, **rates, "skipped": self.skipped}

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
    """Return frames per second over the last seconds, but over at least the last two frames."""
    recent = max(2, sum(now - t < _RATES_OVER for t in times))
    used = times[-recent:]
    return (len(used) - 1) / (now - used[0]) if len(used) > 1 and now > used[0] else 0.0
