"""Seconds per call, measured in turns so that a noisy machine disturbs all candidates alike."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import latedrop

RESULTS = Path(__file__).parent / "results"


def in_turns(candidates: dict[str, Callable[[], Any]], *, repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each candidate over `repeats` rounds; every round runs all of them, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "latedrop": latedrop.__version__,
    }


def write(name: str, record: dict[str, Any]) -> Path:
    """Write one result as JSON, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
