"""Files that others may have touched: whole or not there when written, and read with an error in our words.

A file is written under a name of its own, then renamed; no output takes the place of an input. Beside it, what JSON,
csv and npy files need.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from latedrop.errors import ArgumentError, DataError, FileError, LatedropError

__all__ = [
    "FORMULA",
    "aside",
    "check_apart",
    "csv_line",
    "digest_of",
    "in_utf8",
    "locked",
    "npy_head",
    "parsed",
    "plain_cell",
    "read_text",
    "readable",
    "safe_cell",
    "understood",
    "write_aside",
]

_log = logging.getLogger(__name__)
FORMULA = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"
"""What a formula starts with, also in full width, or a cell that becomes one when its edges are cut."""


@contextmanager
def readable(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Raise `FileError` for what the system says while a file is read; `what` is what should be there."""
    try:
        yield
    except OSError as error:
        raise FileError(f"expected {what} at {path}; the system says: {error.strerror or error}.") from error


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """The text of a file; `FileError` where it cannot be read, or is no text."""
    try:
        with readable(path, what):
            return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"expected {what} at {path}; found a file that is not UTF-8 text.") from error


def parsed(content: str, what: str, remedy: str, *, finite: bool = False) -> Any:
    """The value of JSON; `DataError` where it is none, nested too deeply, or has a key twice; with `finite`, or NaN."""
    options: dict[str, Any] = {"parse_constant": _refused, "parse_float": _finite} if finite else {}
    try:
        return json.loads(content.removeprefix("\ufeff"), object_pairs_hook=_once, **options)
    except (ValueError, RecursionError) as error:
        problem = "lists inside lists without end" if isinstance(error, RecursionError) else str(error)
        problem = problem if content.strip() else "an empty file"
        raise DataError(
            f"expected the JSON of {what}; it is truncated or something else ({problem}). {remedy}"
        ) from error


@contextmanager
def understood(where: str | os.PathLike[str], what: str, remedy: str) -> Iterator[None]:
    """Raise `FileError` where plain data is used whose fields were not checked, and one is not as it should be."""
    try:
        yield
    except LatedropError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        named = f"field {error} is missing" if isinstance(error, KeyError) else f"a field is of another kind ({error})"
        raise FileError(f"expected {what} with all fields in {where}; {named}. {remedy}") from error


@contextmanager
def aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name of one's own to write under; it becomes `path` at the end, and goes where anything comes in between.

    Of several writers each has its own name, and the last to finish leaves the whole of what it wrote. A link keeps
    leading where it did; a device or a pipe gets the content and stays what it is.
    """
    end = Path(os.path.realpath(path))
    special = end.exists() and not end.is_file() and not end.is_dir()
    part = (Path(tempfile.gettempdir()) if special else end.parent) / f"{end.name}.{secrets.token_hex(8)}.part"
    try:
        part.open("xb").close()
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

    Paths, and numbers of open files, are compared by the file that they lead to, so that links and other spellings do
    not matter. None is left out.
    """
    used = {name: file for name, file in inputs.items() if file is not None}
    for name, output in outputs.items():
        if output is None:
            continue
        for other, file in used.items():
            if _same_file(output, file):
                shown = "standard output" if isinstance(output, int) else output
                raise ArgumentError(
                    f"expected {name} and {other} to be two files; found one, {shown}, which would be written over. "
                    f"Pass another {name}."
                )
        used[name] = output


def write_aside(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file under another name, then rename it, so that nobody finds half of it; text as `in_utf8` gives it."""
    with aside(path) as part:
        part.write_bytes(in_utf8(content).encode() if isinstance(content, str) else content)


def in_utf8(text: str) -> str:
    r"""Return text that can be written as UTF-8: names of files may hold any bytes, which Python keeps as surrogates.

    >>> print(in_utf8("a\udcff.png"))
    a\udcff.png
    """
    return text.encode("utf-8", "backslashreplace").decode()


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

    >>> [safe_cell(text) for text in ("=1+1", "@SUM(A1)", "-1.5", "+49 170", "a=b")]
    ["'=1+1", "'@SUM(A1)", '-1.5', "'+49 170", 'a=b']
    """
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


def csv_line(cells: Iterable[Any]) -> str:
    r"""Write one line of csv that ends in LF, its texts made safe by `safe_cell`.

    >>> csv_line(["=1", "a\rb", 2.5])
    '\'=1,"a\rb",2.5\n'
    """
    line = io.StringIO(newline="")
    # csv.writer quotes the characters of the line's end alone: a bare CR would begin a row of its own.
    writer = csv.writer(line, lineterminator="\r\n")
    writer.writerow([safe_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return in_utf8(line.getvalue().removesuffix("\r\n") + "\n")


def digest_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file; of a folder, that of its files' names and contents, the same on every system."""
    digest = hashlib.sha256()
    where = Path(path)
    for part in sorted(where.rglob("*"), key=lambda part: part.parts) if where.is_dir() else [where]:
        if part.is_file():
            digest.update(part.relative_to(where).as_posix().encode() if where.is_dir() else b"")
            with part.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _same_file(one: Any, other: Any) -> bool:
    try:
        first, second = os.stat(one), os.stat(other)
    except OSError:  # one is not there yet
        paths = not isinstance(one, int) and not isinstance(other, int)
        return paths and os.path.realpath(one) == os.path.realpath(other)
    # A terminal, or /dev/null, may well be several of them.
    return os.path.samestat(first, second) and stat.S_IFMT(first.st_mode) in (stat.S_IFREG, stat.S_IFDIR)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands there twice")
    return values


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        _refused(digits)
    return value
