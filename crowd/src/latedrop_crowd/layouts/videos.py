"""Frames of a video by their number: quick in rising order, as sets are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy.typing as npt

from latedrop.errors import FileError
from latedrop_crowd.frames import video_frames

__all__ = ["VideoFrames"]

_KEPT = 64  # threads that read ahead ask for a few frames in any order


class VideoFrames:
    """The frames of a video file; asking for an earlier one starts again from the beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._kept: dict[int, npt.NDArray[Any]] = {}
        self._next = 0
        self._stream: Iterator[tuple[str, npt.NDArray[Any]]] = iter(())

    def read(self, number: int) -> npt.NDArray[Any]:
        """One frame, uint8 `(H, W, 3)`.

        Raises:
            FileError: the video ends before it.
        """
        with self._lock:
            if number in self._kept:
                return self._kept[number]
            if number < self._next or self._next == 0:
                self._next, self._stream = 0, video_frames(self.path, self.path.name, 1)
            for _, pixels in self._stream:
                self._kept[self._next] = pixels
                self._kept.pop(self._next - _KEPT, None)
                self._next += 1
                if self._next > number:
                    return pixels
            raise FileError(
                f"expected frame {number} in {self.path}; it has {self._next}, counted from 0. Check the names of the "
                "frames that are annotated."
            )
