"""Whole files or none: written under another name, then renamed. JSON that tells whether it was edited."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from latedrop.errors import FileError

__all__ = ["aside", "checksum_of", "digest_of", "readable", "sealed", "tuples_in", "write_aside"]


@contextmanager
def readable(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """What the system says while a file is read, as `FileError`; `what` is what should be there."""
    try:
        yield
    except OSError as error:
        raise FileError(f"expected {what} at {path}; the system says: {error.strerror or error}.") from error


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


def sealed(name: str, record: Mapping[str, Any]) -> str:
    """Readable JSON of a record under its name, with a checksum over its content."""
    return json.dumps({name: record, "checksum": checksum_of(record)}, indent=1)


def checksum_of(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record's JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def tuples_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as it was before JSON made lists of its tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def digest_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
