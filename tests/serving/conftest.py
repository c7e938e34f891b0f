"""Calibrated models for the service."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import latedrop


def network(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))


@pytest.fixture(scope="session")
def regression() -> Any:
    dice = np.random.default_rng(0)
    x = dice.normal(size=(80, 3)).astype(np.float32)
    return latedrop.calibrate(network(), (x, x[:, :1] * dice.normal(size=(80, 1))), progress=False)


@pytest.fixture(scope="session")
def drawn() -> Any:
    dice = np.random.default_rng(0)
    x = dice.normal(size=(80, 3)).astype(np.float32)
    return latedrop.calibrate(
        network(2), (x, dice.normal(size=(80, 2))), method=latedrop.Sampling(rates=[0.1], draws=20), progress=False
    )


@pytest.fixture(scope="session")
def classes() -> Any:
    dice = np.random.default_rng(0)
    x, y = dice.normal(size=(180, 3)).astype(np.float32), dice.integers(0, 3, 180)
    made = latedrop.calibrate(
        network(3), (x[60:], y[60:]), task=latedrop.Classification(names=["cat", "dog", "owl"]), progress=False
    )
    return made.conformal((x[:60], y[:60]))
