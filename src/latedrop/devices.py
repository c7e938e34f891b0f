"""Choose the device of a command, and name the device and versions that a result was computed with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from latedrop.errors import ArgumentError

__all__ = ["chosen_device", "device_name", "one_thread", "versions"]


def chosen_device(name: str) -> torch.device:
    """Return the device of `--device`; `auto` is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # a missing backend, or a driver that is too old, can raise any error
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
        raise ArgumentError(
            f"expected --device auto, cpu or cuda; found {name!r}, which this machine or this torch does not have: "
            f"{reason}. Use --device auto."
        ) from error
    return device


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the number of CPU threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"


def versions() -> dict[str, str]:
    """Return the versions and the system on which the digits of a result depend."""
    from latedrop import __version__

    return {
        "latedrop": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside the block, so that sums have the same rounding on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
