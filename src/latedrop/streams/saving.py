"""The state of a stream in a file: written whole or not at all, with a checksum, by one stream alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latedrop.errors import DataError, FileError
from latedrop.files import write_aside
from latedrop.records import Fields, checksum_of, number, parsed, read_text, text, unsealed
from latedrop.streams.state import Settings, State

__all__ = ["StateFile"]

_NAME, _WHAT, _FORMAT = "latedrop stream", "a stream's state", 1
_REMEDY = "Pass another path, or delete the file to begin anew."


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
        try:
            document = parsed(read_text(self.path, _WHAT), _WHAT, _REMEDY, finite=True)
            fields = Fields(unsealed(document, _NAME, _WHAT, _FORMAT, _REMEDY, _REMEDY), "state")
            level, made_with = fields.take("level", number, least=0, most=1), fields.take("made_with", text)
            if level == settings.level and made_with == self.made_with:
                return State.from_fields(fields, settings)
        except DataError as error:
            raise FileError(f"{self.path}: {error}") from error
        whose = "this model" if made_with == self.made_with else "another model or calibration"
        raise FileError(
            f"expected the state of a stream at level {settings.level:g} of this model in {self.path}; found level "
            f"{level:g}, of {whose}. {_REMEDY}"
        )

    def write(self, state: State) -> None:
        """Replace the file."""
        if self._ours and self._found() not in (None, self._seen):
            raise FileError(
                f"expected {self.path} as this stream left it; another one has written to it. Use one stream, or one "
                "file for each."
            )
        about = {"format": _FORMAT, "level": state.settings.level, "made_with": self.made_with}
        record: dict[str, Any] = {**about, **state.to_dict()}
        write_aside(self.path, json.dumps({_NAME: record, "checksum": checksum_of(record)}).encode())
        self._seen, self._ours = self._found(), True

    def _found(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
