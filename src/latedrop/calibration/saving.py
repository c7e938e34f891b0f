"""A calibration on disk: JSON, and beside it a safetensors file with what its terms have learned, where that is large.

Nothing is unpickled. The JSON holds the checksum of the other file, so that two that do not belong together are found.
"""

from __future__ import annotations

import glob
import hashlib
import os
from pathlib import Path

from torch import Tensor

from latedrop.calibration.record import Calibration
from latedrop.errors import FileError, LatedropError
from latedrop.files import readable, write_aside
from latedrop.records import read_text

__all__ = ["read_calibration", "save_calibration"]

_LARGE = 20_000  # numbers; below, they stay readable in the JSON


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a calibration; where it is large and safetensors is installed, what its terms learned goes beside it."""
    path = Path(path)
    stored: dict[str, Tensor] = {}
    separated = calibration.to_json(stored)
    beside = None
    if sum(tensor.numel() for tensor in stored.values()) > _LARGE:
        content = _safetensors(stored)
        if content is not None:
            beside = _beside(path, hashlib.sha256(content).hexdigest())
            write_aside(beside, content)
    # The JSON names the other file by its content: written last, it always finds the one that it belongs to.
    write_aside(path, (calibration.to_json() if beside is None else separated).encode())
    for stale in path.parent.glob(f"{glob.escape(path.name)}.*.safetensors"):
        if stale != beside:
            stale.unlink(missing_ok=True)


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """The inverse of `save_calibration`."""
    path = Path(path)
    return Calibration.from_json(read_text(path, "a calibration file"), lambda: _stored(path))


def _stored(path: Path) -> dict[str, Tensor]:
    found = sorted(path.parent.glob(f"{glob.escape(path.name)}.*.safetensors"))
    if len(found) != 1:
        raise FileError(
            f"expected one file {path.name}.….safetensors beside {path}, with what its terms have learned; found "
            f"{len(found)}. Keep the two files together, or calibrate again."
        )
    (beside,) = found
    try:
        from safetensors.torch import load
    except ImportError as error:
        raise LatedropError(
            f"expected safetensors to read {beside}; it is not installed. Run: pip install 'latedrop[safetensors]'"
        ) from error
    with readable(beside, "a safetensors file"):
        content = beside.read_bytes()
    if _beside(path, hashlib.sha256(content).hexdigest()) != beside:
        raise FileError(f"expected {beside} as it was saved; its content is another. Calibrate again.")
    tensors: dict[str, Tensor] = load(content)
    return tensors


def _beside(path: Path, digest: str) -> Path:
    return path.with_name(f"{path.name}.{digest[:16]}.safetensors")


def _safetensors(tensors: dict[str, Tensor]) -> bytes | None:
    try:
        from safetensors.torch import save
    except ImportError:
        return None
    content: bytes = save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
    return content
