"""A calibration on disk: JSON, and beside it a safetensors file with what its terms have learned, where that is large.

Nothing is unpickled. The JSON names the other file by its checksum: it always reads the one that it belongs to, also
where another was written and the program ended before its JSON was.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from torch import Tensor

from latedrop.calibration.class_record import CLASSES, ClassCalibration
from latedrop.calibration.record import CALIBRATION, Calibration
from latedrop.errors import FileError, LatedropError
from latedrop.files import read_text, readable, write_aside
from latedrop.records import naming
from latedrop.stored_tensors import elsewhere

__all__ = ["read_calibration", "save_calibration"]

_LARGE = 100_000  # numbers; below, they stay readable in the JSON
_NAME = re.compile("[0-9a-f]{16}")


def save_calibration(calibration: Calibration | ClassCalibration, path: str | os.PathLike[str]) -> list[Path]:
    """Write a calibration; where it is large and safetensors is installed, what its terms learned goes beside it.

    Returns the files that it is in.
    """
    path = Path(path)
    replaced = _named_in(path)
    tensors: dict[str, Tensor] = {}
    calibration.to_json(elsewhere(tensors, ""))
    large = sum(tensor.numel() for tensor in tensors.values()) > _LARGE
    content = _safetensors(tensors) if large else None
    if content is None:
        written, text = [path], calibration.to_json()
    else:
        name = _name_of(content)
        written, text = [path, _beside(path, name)], calibration.to_json(elsewhere({}, name))
        write_aside(written[1], content)
    write_aside(path, text.encode())  # last: it names the other file, which then is there
    for stale in {_beside(path, name) for name in replaced} - {*written}:
        stale.unlink(missing_ok=True)
    return written


def read_calibration(path: str | os.PathLike[str]) -> Calibration | ClassCalibration:
    """The inverse of `save_calibration`."""
    path = Path(path)
    text = read_text(path, "a calibration file")
    files: dict[str, dict[str, Tensor]] = {}

    def beside(name: str) -> dict[str, Tensor]:
        files[name] = files[name] if name in files else _stored(path, name)
        return files[name]

    with naming(path):
        if f'"{CLASSES.key}"' in text[:100]:
            return CLASSES.from_json(text, beside)
        return CALIBRATION.from_json(text, beside)


def _stored(path: Path, name: str) -> dict[str, Tensor]:
    beside = _beside(path, name)
    if not _NAME.fullmatch(name) or not beside.is_file():
        raise FileError(
            f"expected {beside.name} beside {path}, with what its terms have learned; it is not there. Keep the two "
            "files together, and rename both alike; or calibrate again."
        )
    try:
        from safetensors.torch import load
    except ImportError as error:
        raise LatedropError(
            f"expected safetensors to read {beside}; it is not installed. Run: pip install 'latedrop[safetensors]'"
        ) from error
    with readable(beside, "a safetensors file"):
        content = beside.read_bytes()
    if _name_of(content) != name:
        raise FileError(f"expected {beside} as it was saved; its content is another. Calibrate again.")
    tensors: dict[str, Tensor] = load(content)
    return tensors


def _beside(path: Path, name: str) -> Path:
    return path.with_name(f"{path.name}.{name}.safetensors")


def _name_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _named_in(path: Path) -> set[str]:
    """The files that a calibration at this path has beside it, if there is one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return set()
    return {*re.findall(r'"file": "([0-9a-f]{16})"', text)}


def _safetensors(tensors: dict[str, Tensor]) -> bytes | None:
    try:
        from safetensors.torch import save
    except ImportError:
        return None
    content: bytes = save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
    return content
