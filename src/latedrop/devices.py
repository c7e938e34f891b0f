"""Which device a command runs on, and what it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from latedrop.errors import ArgumentError

__all__ = ["chosen_device", "device_name", "one_thread"]


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


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside: small tensors are no faster on more, and sums come out alike on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
