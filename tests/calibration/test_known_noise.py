"""The whole road on three kinds of known noise: what there is to find is found, said, and better than a constant."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.evaluation.judgement import judge
from networks import mlp, trained


def network(x: Tensor, y: Tensor) -> nn.Module:
    return trained(mlp(x.shape[1], 40, 40, 1), x, y, 200, 1e-2)


def step(x: Tensor) -> Tensor:
    """A standard deviation ten times as large where the third input is above 0."""
    return torch.where(x[:, 2:] > 0, 0.5, 0.05)


def growing(x: Tensor) -> Tensor:
    """A standard deviation that grows with the first input."""
    return 0.05 + 0.4 * (x[:, :1] + 1) / 2


def even(x: Tensor) -> Tensor:
    """Noise of one variance for all rows."""
    return torch.full_like(x[:, :1], 0.2)


def rows(count: int, std: Callable[[Tensor], Tensor], seed: int, degrees: float = math.inf) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.uniform(-1, 1, (count, 3))).float()
    noise = rng.normal(size=(count, 1)) if math.isinf(degrees) else rng.standard_t(degrees, (count, 1))
    return x, (2 * x[:, :1]).sin() + x[:, 1:2] + std(x) * torch.from_numpy(noise).float()


def calibrated(std: Callable[[Tensor], Tensor], degrees: float = math.inf) -> latedrop.Predictor:
    x, y = rows(600, std, 0, degrees)
    return latedrop.calibrate(network(x, y), rows(500, std, 1, degrees), reference=x, progress=False)


@pytest.mark.parametrize(("std", "correlation"), [(step, 0.9), (growing, 0.6)], ids=["step", "growing"])
def test_noise_that_varies_is_found(std: Callable[[Tensor], Tensor], correlation: float) -> None:
    uq = calibrated(std)
    verdict = uq.calibration.verdict
    assert verdict.better
    assert "forest" in uq.calibration.terms.choice
    x, y = rows(3000, std, 2)
    p = uq.predict(x)
    assert float(torch.corrcoef(torch.stack([p.std[:, 0].log(), std(x)[:, 0].log()]))[0, 1]) > correlation
    judged = judge(p, y, inputs=x).together
    assert judged.verdict.gain > 0.05
    # Standard errors: 0.005 of 3000 rows, 0.013 of a deviation that was fitted to 500.
    assert judged.verdict.coverage == pytest.approx(0.9, abs=0.04)


def test_even_noise_is_left_alone() -> None:
    uq = calibrated(even)
    x, y = rows(3000, even, 2)
    p = uq.predict(x)
    judged = judge(p, y, inputs=x).together.verdict
    assert judged.gain > -0.02
    assert judged.coverage == pytest.approx(0.9, abs=0.04)
    usual = p.std[p.novelty <= 1]  # type: ignore[operator]
    assert float(usual.max() / usual.min()) < 2


def test_heavy_tails_are_seen() -> None:
    uq = calibrated(even, degrees=3)
    assert uq.calibration.degrees <= 7
    x, y = rows(3000, even, 2, 3)
    p = uq.predict(x)
    for level in (0.5, 0.9, 0.99):
        low, high = p.interval(level)
        coverage = float(((low <= y) & (y <= high)).double().mean())
        # A quantile of 500 rows has a standard error of 0.022, 0.013 and 0.004; new rows add a third of that.
        assert coverage == pytest.approx(level, abs={0.5: 0.07, 0.9: 0.04, 0.99: 0.015}[level])


def test_a_range_that_is_off_is_the_headline() -> None:
    """One width for noise that varies: right on average, and in no range."""
    x, y = rows(600, step, 0)
    net = network(x, y)
    uq = latedrop.calibrate(net, rows(500, step, 1), reference=x, progress=False, method=latedrop.Terms(["size"]))
    verdict = uq.calibration.verdict
    assert verdict.grade == "bad"
    assert verdict.slices
    test_x, test_y = rows(2000, step, 2)
    together = judge(uq.predict(test_x), test_y, inputs={"age": test_x[:, 2]}).together.verdict
    assert together.grade == "bad"
    assert any(part.by == "age" for part in together.slices)
    assert "not everywhere" in together.sentence
