"""The state of a stream in a file: written whole or not at all, with a checksum, by one stream alone."""

from __future__ import annotations

from pathlib import Path

from latedrop.errors import FileError
from latedrop.records import naming
from latedrop.streams.state import STREAM, Settings, State

__all__ = ["StateFile"]


class StateFile:
    """A file that one stream writes; what another one has written there meanwhile is not written over.

    Args:
        path: of the file.
        made_with: tells one model from another; a state of another one is refused.
    """

    def __init__(self, path: Path, made_with: str) -> None:
        self.path, self.made_with = path, made_with
        self._seen: tuple[int, int] | None = None
        self._ours = False

    def read(self, settings: Settings) -> State | None:
        """The state; None where there is no file yet, `FileError` where it is damaged or of another stream."""
        self._seen, self._ours = self._found(), True
        if self._seen is None:
            return None
        stored = STREAM.read(self.path)
        if stored.level == settings.level and stored.made_with == self.made_with:
            with naming(self.path):
                return State.resumed(settings, stored)
        whose = "this model" if stored.made_with == self.made_with else "another model or calibration"
        raise FileError(
            f"expected the state of a stream at level {settings.level:g} of this model in {self.path}; found level "
            f"{stored.level:g}, of {whose}. {STREAM.again}"
        )

    def write(self, state: State) -> None:
        """Replace the file."""
        if self._ours and self._found() not in (None, self._seen):
            raise FileError(
                f"expected {self.path} as this stream left it; another one has written to it. Use one stream, or one "
                "file for each."
            )
        STREAM.write(self.path, state.recorded(self.made_with))
        self._seen, self._ours = self._found(), True

    def _found(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
