"""Calibrated models for the service."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import latedrop
from networks import mlp

DICE = np.random.default_rng(0)
X = DICE.normal(size=(180, 3)).astype(np.float32)


@pytest.fixture(scope="session")
def regression() -> Any:
    return latedrop.calibrate(mlp(3, 16, 16, 1), (X, X[:, :1] * DICE.normal(size=(180, 1))), progress=False)


@pytest.fixture(scope="session")
def drawn() -> Any:
    method = latedrop.Sampling(rates=[0.1], draws=20)
    return latedrop.calibrate(mlp(3, 16, 16, 2), (X, DICE.normal(size=(180, 2))), method=method, progress=False)


@pytest.fixture(scope="session")
def classes() -> Any:
    y, task = DICE.integers(0, 3, 180), latedrop.Classification(names=["cat", "dog", "owl"])
    made = latedrop.calibrate(mlp(3, 16, 16, 3), (X[60:], y[60:]), task=task, progress=False)
    return made.conformal((X[:60], y[:60]))
