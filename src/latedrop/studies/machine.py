"""Where a study runs: its device, the folder of its results, and what a record says of machine and versions."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import torch

import latedrop
from latedrop.errors import ArgumentError, FileError

__all__ = ["chosen_device", "device_name", "made_folder", "versions"]


def chosen_device(name: str) -> torch.device:
    """The device of `--device`; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"expected --device auto, cpu or cuda; found {name!r}.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"expected a CUDA device for --device {name}; torch finds none. Use --device cpu.")
    return device


def device_name(device: torch.device) -> str:
    """Of the GPU, or the number of threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"


def made_folder(path: Path) -> Path:
    """The folder, made if need be, before any work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"expected to make the folder {path}; the system says: {error}. Pass another --out.") from error
    return path


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "latedrop": latedrop.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
