"""What all studies share: how a command ends, the folder of the results, the versions that they were made with."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import latedrop
from latedrop import terminal
from latedrop.errors import FileError

__all__ = ["exit_code", "made_folder", "versions"]


def exit_code(study: Callable[[], Sequence[Path]], stopped: str) -> int:
    """Run a study as a command: say which files were written, or what is wrong; `stopped` is said after Ctrl-C."""
    return terminal.exit_code(lambda: f"written: {', '.join(map(str, study()))}", stopped)


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
