"""Which device a command runs on, and what is said of one that cannot be had."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from latedrop.devices import chosen_device
from latedrop.errors import ArgumentError


def test_cpu_is_the_cpu() -> None:
    assert chosen_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "said"), [("gpu", ""), ("cuda:63", ""), ("cuda", "driver is too old")], ids=["name", "number", "driver"]
)
def test_one_that_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{said}.\nCompile with TORCH_USE_CUDA_DSA")

    if said:
        monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ArgumentError, match=f"--device auto.*found '{name}', which.*: {said}.*Use --device auto"):
        chosen_device(name)
