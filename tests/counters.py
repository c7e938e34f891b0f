"""People counters for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from latedrop_crowd.calibration import CrowdCalibration, load_calibration
from latedrop_crowd.console.notices import Notices
from latedrop_crowd.console.sources import Source
from latedrop_crowd.console.store import Store
from latedrop_crowd.console.watch import Settings, Watch
from latedrop_crowd.mcnn import MCNN, Trained, load_weights, shipped


def network(seed: int = 0) -> MCNN:
    """Untrained, but every channel is on, so that all cells vary, and counts are a few people."""
    model = MCNN()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.uniform_(module.weight, -0.05, 0.1)
                nn.init.uniform_(module.bias, 0.1, 0.2)
    return model.eval()


def console(store: Store, *cameras: str, frames: Iterable[Any] = ()) -> Watch:
    """Watch cameras of these names, each with the same frames."""
    sources = [Source(name, False, lambda: iter(frames)) for name in cameras]
    return Watch(sources, *shipped_counter(), store, Settings(), Notices([]))


def shipped_counter(name: str = "scenes") -> tuple[Trained, CrowdCalibration]:
    """A counter that comes with the package, and its calibration."""
    trained = load_weights(shipped(name))
    return trained, load_calibration(shipped(name, ".calibration.json"), trained)
