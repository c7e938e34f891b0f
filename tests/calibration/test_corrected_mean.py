"""The corrected mean on residuals that can and that cannot be predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration.corrected_mean import _ridge, fit_correction
from latedrop.errors import ArgumentError, DataError


def rows_of(count: int = 300, bias: str = "none", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, directions `(1, n, 5)` and errors `(n, 1)` with noise of standard deviation 0.5."""
    rng = np.random.default_rng(seed)
    x, phi = rng.normal(size=(count, 3)), rng.normal(size=(1, count, 5))
    error = 0.5 * rng.normal(size=(count, 1))
    if bias == "step":
        error += np.where(x[:, :1] > 0, 1, -1)
    if bias == "linear":
        error += phi[0, :, :1]
    return torch.from_numpy(x).float(), torch.from_numpy(phi), torch.from_numpy(error)


def test_noise_is_not_corrected() -> None:
    for seed in range(3):
        x, phi, error = rows_of(seed=seed)
        correction, added = fit_correction(x, phi, error, torch.ones_like(error))
        assert not correction.used
        assert not added.any()
        assert not correction.values(x, phi).any()


@pytest.mark.parametrize("bias", ["step", "linear"])
def test_a_bias_is_found_and_taken_away(bias: str) -> None:
    x, phi, error = rows_of(400, bias)
    correction, added = fit_correction(x, phi, error, torch.ones_like(error))
    new, new_phi, truth = rows_of(400, bias, seed=1)
    left = truth - correction.values(new, new_phi)
    gained = 1 - float(left.square().mean() / truth.square().mean())
    assert gained > 0.5
    # What it says it gains is what it gains on new rows, up to the errors of both.
    assert abs(gained - correction.gains[0]) < 5 * correction.gain_errors[0]
    assert float((error - added).square().mean()) == pytest.approx(float(left.square().mean()), rel=0.3)


def test_rows_count_by_the_inverse_of_their_variance() -> None:
    """Half of the rows are so noisy that the bias of the others would drown without weights."""
    x, phi, error = rows_of(200, "linear")
    noisy = x[:, 1:2] > 0
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=(200, 1))) * torch.where(noisy, 50, 0)
    variance = torch.where(noisy, 2500.0, 1.0)
    assert fit_correction(x, phi, error + noise, variance)[0].used
    assert not fit_correction(x, phi, error + noise, torch.ones_like(variance))[0].used


def test_ridge_leaves_each_row_out() -> None:
    _, phi, error = rows_of(40, "linear")
    weight = np.random.default_rng(2).uniform(0.5, 2, 40)
    weight /= weight.mean()
    rows, target = phi[0].numpy(), error[:, 0].numpy()
    slope, left = _ridge(rows, target, weight)
    # The penalty in use solves the normal equations of all rows.
    moment = (rows * weight[:, None]).T @ target
    gram = (rows * weight[:, None]).T @ rows
    penalty = float(np.mean((moment - gram @ slope) / slope))
    for i in range(0, 40, 7):
        out = np.arange(40) != i
        part = rows[out] * weight[out, None]
        alone = np.linalg.solve(part.T @ rows[out] + penalty * np.eye(5), part.T @ target[out])
        assert left[i] == pytest.approx(rows[i] @ alone, rel=1e-6)


@pytest.fixture(scope="module")
def biased() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that misses a step of its target, and validation rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.rand(300, 2) * 2 - 1
    y = net(x).detach() + (x[:, :1] > 0) + 0.1 * torch.randn(300, 1)
    return net, x, y


def test_a_calibration_corrects_the_mean_and_says_so(biased: tuple[nn.Module, Tensor, Tensor], tmp_path: Path) -> None:
    net, x, y = biased
    method = latedrop.Terms(mean="corrected")
    uq = latedrop.calibrate(net, (x[:200], y[:200]), method=method, progress=False)
    p = uq.predict(x[200:])
    plain = net(x[200:]).detach()
    assert float((p.mean - y[200:]).square().mean()) < 0.2 * float((plain - y[200:]).square().mean())
    assert uq.calibration.mean == "corrected"
    assert "corrected mean: on rows of other folds squared errors are smaller by" in str(uq.calibration)
    low, high = p.interval(0.9)
    assert 0.8 <= float(((low <= y[200:]) & (y[200:] <= high)).double().mean()) <= 0.98
    uq.save(tmp_path / "uq.json")
    torch.testing.assert_close(latedrop.load(tmp_path / "uq.json", net).predict(x).mean, uq.predict(x).mean)


def test_the_correction_fades_far_from_the_reference_rows(biased: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = biased
    uq = latedrop.calibrate(net, (x, y), method=latedrop.Terms(mean="corrected"), progress=False)
    far = torch.tensor([[40.0, -40.0], [200.0, 200.0]])
    p = uq.predict(far)
    with torch.no_grad():
        moved = (p.mean - net(far)).abs()[:, 0]
        near = (uq.predict(x).mean - net(x)).abs().max()
    assert bool((p.novelty > 100).all())
    assert float(moved.max()) < 0.05 * float(near)


def test_it_needs_mask_gradients_and_a_forest(biased: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = biased
    with pytest.raises(ArgumentError, match="expected terms with 'gradients' before 'forest' for mean='corrected'"):
        latedrop.calibrate(net, (x, y), method=latedrop.Terms(["dropout"], mean="corrected"), progress=False)
    with pytest.raises(DataError, match="at least 60 validation rows for a corrected mean; found 40"):
        latedrop.calibrate(net, (x[:40], y[:40]), method=latedrop.Terms(mean="corrected"), progress=False)
