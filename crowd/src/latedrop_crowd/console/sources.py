"""Where live frames come from: video files, folders, cameras, network streams, and scenes that move.

Each source gives frames at its own pace. A password in an address is never shown.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from latedrop.errors import ArgumentError, FileError
from latedrop.files import in_utf8
from latedrop.terminal import need
from latedrop_crowd.frames import images_in, is_video, read_pixels
from latedrop_crowd.walks import Walks

__all__ = ["Pixels", "Source", "demo_sources", "open_sources"]

Pixels = npt.NDArray[np.uint8]
"""A picture, `(H, W)` or `(H, W, 3)`."""
_SCHEMES = ("rtsp", "rtsps", "http", "https")
_SILENT = 10.0  # seconds without a byte after which a stream is taken for broken
_DEMO_RATE = 8.0


@dataclass(frozen=True)
class Source:
    """One source.

    Attributes:
        name: for people; without a password.
        live: whether it goes on by itself: a stream that ends is opened again, a file is not.
        frames: opens it; each call begins anew. It waits between frames as long as the source's own pace asks for.
    """

    name: str
    live: bool
    frames: Callable[[], Iterator[Pixels]]


def open_sources(words: Sequence[str], fps: float | None = None, *, loop: bool = False) -> list[Source]:
    """Open the sources that the command line names: files are looked at now, streams when they are read.

    Args:
        words: paths, numbers of cameras, and addresses.
        fps: frames per second of folders, and of files instead of their own; 5 for folders where None.
        loop: begin files and folders again when they end.
    """
    if fps is not None and not 0 < fps <= 1000:
        raise ArgumentError(f"expected frames per second above 0 and at most 1000; found {fps}.")
    sources: dict[str, Source] = {}
    places: list[str] = []
    for word in words:
        source = _source(word, fps, loop)
        places.append(os.path.realpath(word) if os.path.exists(word) else word)
        if places[-1] in places[:-1]:
            raise ArgumentError(f"expected each source once; found {source.name} twice.")
        plain = in_utf8(source.name)
        names = chain([plain], (f"{plain} ({number})" for number in count(2)))
        name = next(name for name in names if name not in sources)  # folders of one name, channels of one recorder
        sources[name] = replace(source, name=name)
    return list(sources.values())


def demo_sources(seed: int = 0) -> list[Source]:
    """Two squares with people who walk; nothing is read."""
    squares = {"Station square": Walks(seed), "Market square": Walks(seed + 1, 84.0, 5, 30)}
    return [Source(name, True, lambda walks=walks: _walking(walks)) for name, walks in squares.items()]  # type: ignore[misc]


def _source(word: str, fps: float | None, loop: bool) -> Source:
    if re.fullmatch(r"\d{1,3}", word):
        if sys.platform == "win32":
            raise ArgumentError(
                f"expected Linux or macOS for camera {word}; found Windows, where cameras have no numbers. Pass the "
                "address of the camera's stream: rtsp:// or http://."
            )
        need("video", "av", of="latedrop-crowd")
        return Source(f"Camera {int(word)}", True, lambda: _streamed(*_camera(int(word))))
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", word):
        parts = urlsplit(word)
        if parts.scheme.lower() not in _SCHEMES or not parts.hostname:
            raise ArgumentError(
                f"expected an address that begins with {', '.join(s + '://' for s in _SCHEMES)} and names a host; "
                f"found {parts.scheme}://{parts.hostname or ''}."
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
            f"expected a video, a folder of images, the number of a camera or an rtsp:// or http:// address; there is "
            f"no {word}."
        )
    if not is_video(path):
        raise FileError(f"expected a video by the ending of its name, or a folder of images; found {path.name}.")
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
    """Give so many frames a second; one that is late is not made up for."""
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
    """Frames as they come in; errors are ours, and name no address, which may hold a password."""
    with _opened(address, format=kind, options=options, timeout=_SILENT) as (frames, _):
        yield from frames


def _played(path: Path, fps: float | None) -> Iterator[Pixels]:
    """Frames of a file, as many a second as it says itself, or as asked for."""
    with _opened(os.fspath(path)) as (frames, rate):
        yield from _paced(frames, fps or rate)


@contextmanager
def _opened(address: str, **options: Any) -> Iterator[tuple[Iterator[Pixels], float]]:
    """Frames as fast as they can be decoded, and how many of them a second there are."""
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
