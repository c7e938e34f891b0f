"""Which device a command runs on, and what is said of one that cannot be had."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from latedrop.devices import chosen_device
from latedrop.errors import ArgumentError


def test_cpu_is_the_cpu() -> None:
    assert chosen_device("cpu") == torch.device("cpu")


def test_no_gpu_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ArgumentError, match=r"expected a CUDA device for --device cuda; t.*Use --device cpu"):
        chosen_device("cuda")


@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("driver is too old.\nCompile with TORCH_USE_CUDA_DSA"), "driver is too old"),
        (AssertionError(), "AssertionError"),
    ],
    ids=["text", "no text"],
)
def test_cuda_that_cannot_be_started_says_why(
    monkeypatch: pytest.MonkeyPatch, available: bool, error: Exception, said: str
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch, "empty", refuse)
    expected = f"--device cuda; torch counts 1, but CUDA could not be started: {said}. Repair the driver"
    with pytest.raises(ArgumentError, match=expected):
        chosen_device("cuda")
