"""Conformal baselines: the promised share is held, sigma follows the noise, scores against an independent reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.conformal import Scores, forest_difficulty, neighbour_difficulty


def rows_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows whose errors are five times as large where the first input is above 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.normal(size=count) * np.where(x[:, 0] > 0, 1, 0.2))


def test_the_quantile_counts_the_new_row() -> None:
    scores = Scores(torch.arange(1.0, 10.0).double() * torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1, 1]))
    assert scores.quantile(0.75) == 5
    assert scores.quantile(0.95) == 9
    assert scores.quantile(0.975) == math.inf


@pytest.mark.parametrize("kind", ["forest", "neighbours"])
def test_the_level_is_held_and_widths_follow_the_noise(kind: str) -> None:
    x, error = rows_of(600, 0)
    if kind == "forest":
        sigma, rest = forest_difficulty(x, error)
        scores = Scores(error[rest] / sigma(x[rest]))
    else:
        sigma, own = neighbour_difficulty(x, error)
        scores = Scores(error / own)
    new, errors = rows_of(4000, 1)
    half = sigma(new) * scores.quantile(0.95)
    assert float((errors.abs() <= half).double().mean()) == pytest.approx(0.9, abs=0.05)
    large = new[:, 0] > 0
    assert float(half[large].median()) > 3 * float(half[~large].median())


def test_a_row_is_left_out_of_its_own_neighbours() -> None:
    x, error = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([3.0, 1.0, 5.0]).double()
    sigma, own = neighbour_difficulty(x, error)
    torch.testing.assert_close(own, torch.tensor([3.01, 4.01, 2.01]).double())
    torch.testing.assert_close(sigma(torch.tensor([[0.1]])), torch.tensor([2.01]).double())


def test_crps_is_that_of_the_predictive_distribution() -> None:
    """By its definition: the integral of the squared difference of distribution functions."""
    z = torch.tensor([-1.0, 0.5, 2.0]).double()
    error, variance = torch.tensor([0.3, 4.0]).double(), torch.tensor([1.0, 4.0]).double()
    grid = np.linspace(-30, 30, 600_001)
    for i, found in enumerate(Scores(z).crps(error, variance).tolist()):
        sigma = math.sqrt(float(variance[i]))
        below = (sigma * z.numpy()[:, None] <= grid).mean(0)
        expected = float(np.square(below - (grid >= float(error[i]))).sum() * (grid[1] - grid[0]))
        assert found == pytest.approx(expected, abs=1e-3)
