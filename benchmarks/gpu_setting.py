"""What the parts of `benchmarks.gpu_round` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DRAWS, RATE = 50, 0.05
Unit = tuple[str, Callable[[], dict[str, Any]]]
"""A name, and what measures it."""


@dataclass(frozen=True)
class Setting:
    """Where and how units are measured: `turns(runs, base)` times candidates; `most` rows of a large network."""

    device: torch.device
    small: bool
    most: int
    turns: Callable[[dict[str, Callable[[], Any]], str], dict[str, Any]]
