"""Whole files or none: written under another name, then renamed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from latedrop.errors import FileError

__all__ = ["write_aside"]


def write_aside(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file under another name, then rename it, so that nobody finds half of it."""
    path = Path(path)
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise FileError(f"expected to write {path}; the system says: {error}. Pass another path.") from error
