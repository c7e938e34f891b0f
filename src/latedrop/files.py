"""Whole files or none: written under a name of their own, then renamed; no output takes the place of an input."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from latedrop.errors import ArgumentError, DataError, FileError

__all__ = [
    "FORMULA",
    "aside",
    "check_apart",
    "digest_of",
    "locked",
    "npy_head",
    "plain_cell",
    "readable",
    "safe_cell",
    "write_aside",
]

_log = logging.getLogger(__name__)
FORMULA = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"
"""What a formula starts with, also in full width, or a cell that becomes one when its edges are cut."""
_LEFT_AFTER = 60.0  # seconds without a change: a writer locks its file within these


@contextmanager
def readable(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """What the system says while a file is read, as `FileError`; `what` is what should be there."""
    try:
        yield
    except OSError as error:
        raise FileError(f"expected {what} at {path}; the system says: {error.strerror or error}.") from error


@contextmanager
def aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name of one's own to write under; it becomes `path` at the end, and goes where anything comes in between.

    Of several writers each has its own name, and the last to finish leaves the whole of what it wrote. While a name is
    in use its file is locked; the system drops the lock with the process, however that ends. A file of such a name that
    is not locked, and that nobody wrote to for a minute, was left behind: the next writer of `path` removes it. A link
    keeps leading where it did; a device or a pipe gets the content and stays what it is.
    """
    end = Path(os.path.realpath(path))
    special = end.exists() and not end.is_file() and not end.is_dir()
    part = (Path(tempfile.gettempdir()) if special else end.parent) / f"{end.name}.{secrets.token_hex(8)}.part"
    try:
        _remove_left_behind(part.parent, end.name)
        with part.open("xb") as mine:
            locked(mine)
            yield part
        if special:
            with part.open("rb") as made, end.open("wb") as file:
                shutil.copyfileobj(made, file)
        else:
            part.replace(end)
        _log.info("written: %s", path)
    except OSError as error:
        raise FileError(f"expected to write {path}; the system says: {error}. Pass another path.") from error
    finally:
        with suppress(OSError):
            part.unlink()


def locked(file: IO[Any]) -> bool | None:
    """Lock an open file until it is closed; False where another process has it, None where the system has no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def check_apart(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raise where an output is one of the inputs, or another output; both by the name of their option.

    Paths and open streams are compared by the file that they lead to, so that links and other spellings do not matter.
    None is left out.
    """
    used = {name: file for name, file in inputs.items() if file is not None}
    for name, output in outputs.items():
        if output is None:
            continue
        for other, file in used.items():
            if _same_file(output, file):
                raise ArgumentError(
                    f"expected {name} and {other} to be two files; found one, {_spelled(output)}, which would be "
                    f"written over. Pass another {name}."
                )
        used[name] = output


def write_aside(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file under another name, then rename it, so that nobody finds half of it."""
    with aside(path) as part:
        part.write_bytes(content)


def npy_head(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, Any]:
    """Read the head of a npy file of `size` bytes: shape, whether its columns lie one after another, and dtype.

    `DataError` where the head is damaged, or promises another number of bytes than follow: nothing may be made, or
    awaited, of what only a head says.
    """
    from numpy.lib import format as npy

    begin = file.tell()
    try:
        read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception as error:  # whatever a damaged head raises
        raise DataError(f"expected a npy file; its head is damaged: {str(error)[:200]}.") from error
    expected, rest = math.prod(shape) * dtype.itemsize, size - (file.tell() - begin)
    empty = expected == 0 and shape[:1] != (0,)  # rows without a byte: there could be any number of them
    if not dtype.hasobject and (expected != rest or min(shape, default=0) < 0 or empty):
        raise DataError(
            f"expected the numbers of shape {str(shape)[:80]} and dtype {str(dtype)[:40]} in the npy file; found "
            f"{rest} bytes. It is damaged, or was cut off: save it again."
        )
    return shape, fortran, dtype


def safe_cell(text: str) -> str:
    """Text for a csv file: an apostrophe goes before what a spreadsheet would run as a formula; numbers stay.

    Line breaks become LF, as `csv.writer` quotes no CR where lines end in LF: the rest would be a row of its own.

    >>> [safe_cell(text) for text in ("=1+1", "@SUM(A1)", "-1.5", "+49 170", "a=b")]
    ["'=1+1", "'@SUM(A1)", '-1.5', "'+49 170", 'a=b']
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text[:1] not in FORMULA or not text:
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def plain_cell(text: str) -> str:
    """The text that `safe_cell` was given."""
    return text[1:] if text[:1] == "'" and text[1:2] in FORMULA and len(text) > 1 else text


def digest_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file; of a folder, that of its files' names and contents, the same on every system."""
    found = hashlib.sha256()
    where = Path(path)
    for part in sorted(where.rglob("*"), key=lambda part: part.parts) if where.is_dir() else [where]:
        if part.is_file():
            found.update(part.relative_to(where).as_posix().encode() if where.is_dir() else b"")
            with part.open("rb") as file:
                while block := file.read(1 << 20):
                    found.update(block)
    return found.hexdigest()


def _remove_left_behind(folder: Path, name: str) -> None:
    """Files that writers of `name` left in `folder`, when they were killed."""
    left = re.compile(rf"{re.escape(name)}\.[0-9a-f]{{16}}\.part")
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            with suppress(OSError):
                if left.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > _LEFT_AFTER:
                    with open(entry.path, "r+b") as file:
                        nobodys = locked(file) or os.name == "nt"  # which does not remove a file that is open
                    if nobodys:
                        os.unlink(entry.path)


def _same_file(one: Any, other: Any) -> bool:
    found = [_status(file) for file in (one, other)]
    if found[0] is not None and found[1] is not None:
        # A terminal, or /dev/null, may well be several of them.
        return os.path.samestat(found[0], found[1]) and stat.S_IFMT(found[0].st_mode) in (stat.S_IFREG, stat.S_IFDIR)
    paths = [file for file in (one, other) if not _is_stream(file)]
    return len(paths) == 2 and os.path.realpath(paths[0]) == os.path.realpath(paths[1])


def _status(file: Any) -> os.stat_result | None:
    """What the system says about a path or a stream; None where it knows nothing."""
    try:
        return os.fstat(file.fileno()) if _is_stream(file) else os.stat(file)
    except (OSError, ValueError):  # a stream in memory has no number
        return None


def _is_stream(file: Any) -> bool:
    return hasattr(file, "fileno")


def _spelled(file: Any) -> str:
    return getattr(file, "name", "a stream") if _is_stream(file) else str(file)
