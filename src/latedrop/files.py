"""Whole files or none: written under another name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from latedrop.errors import FileError

__all__ = ["aside", "write_aside"]


@contextmanager
def aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Another name to write under; it becomes `path` at the end, and goes where anything comes in between."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise FileError(f"expected to write {path}; the system says: {error}. Pass another path.") from error
    finally:
        with suppress(OSError):
            part.unlink()


def write_aside(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file under another name, then rename it, so that nobody finds half of it."""
    with aside(path) as part:
        part.write_bytes(content)
