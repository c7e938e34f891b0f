"""The corrected mean on residuals that can and that cannot be predicted."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.instead.corrected_mean import Correction, _ridge, fit_correction
from latedrop.errors import DataError


def rows_of(count: int = 300, bias: str = "none", seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, directions `(n, 1, 5)` and errors `(n, 1)` with noise of standard deviation 0.5."""
    rng = np.random.default_rng(seed)
    x, phi = rng.normal(size=(count, 3)), rng.normal(size=(count, 1, 5))
    error = 0.5 * rng.normal(size=(count, 1))
    if bias == "step":
        error += np.where(x[:, :1] > 0, 1, -1)
    if bias == "linear":
        error += phi[:, :, 0]
    return x, phi, error


def test_noise_is_not_corrected() -> None:
    for seed in range(5):
        x, phi, error = rows_of(seed=seed)
        correction, added = fit_correction(x, phi, error, np.ones_like(error))
        assert not correction.used
        assert not added.any()
        assert not correction.predict(x, phi).any()


@pytest.mark.parametrize(("bias", "trees", "linear"), [("step", True, False), ("linear", False, True)])
def test_a_bias_is_found_and_taken_away(bias: str, trees: bool, linear: bool) -> None:
    x, phi, error = rows_of(400, bias)
    for kinds in ({"linear": linear, "boosted": trees}, {}):
        correction, added = fit_correction(x, phi, error, np.ones_like(error), **kinds)
        new, new_phi, truth = rows_of(400, bias, seed=1)
        left = truth - correction.predict(new, new_phi)
        assert np.mean(left**2) < 0.5 * np.mean(truth**2)
        # What it says it gains is what it gains on new rows, up to the errors of both.
        gained = 1 - np.mean(left**2) / np.mean(truth**2)
        assert abs(gained - float(correction.gain[0])) < 5 * float(correction.gain_error[0])
        assert np.mean((error - added) ** 2) == pytest.approx(np.mean(left**2), rel=0.3)


def test_rows_count_by_the_inverse_of_their_variance() -> None:
    """Half of the rows are so noisy that the bias of the others would drown without weights."""
    x, phi, error = rows_of(200, "linear")
    noisy = np.random.default_rng(1).normal(size=(200, 1)) * np.where(x[:, 1:2] > 0, 50, 0)
    variance = np.where(x[:, 1:2] > 0, 2500, 1.0)
    assert fit_correction(x, phi, error + noisy, variance)[0].used
    assert not fit_correction(x, phi, error + noisy, np.ones_like(variance))[0].used


def test_outputs_are_corrected_apart() -> None:
    x, phi, error = rows_of(300, "linear")
    both = np.concatenate([error, rows_of(300)[2]], 1)
    correction, added = fit_correction(x, np.repeat(phi, 2, 1), both, np.ones_like(both))
    assert correction.factors[0] > 0.5
    assert correction.factors[1] == 0
    assert not added[:, 1].any()


def test_the_correction_fades_with_novelty() -> None:
    x, phi, error = rows_of(300, "linear")
    correction, _ = fit_correction(x, phi, error, np.ones_like(error))
    novelty = np.linspace(0, 5, 300)
    faded = correction.predict(x, phi, novelty)
    np.testing.assert_allclose(faded * np.maximum(1, novelty)[:, None], correction.predict(x, phi))


def test_ridge_leaves_each_row_out() -> None:
    _, phi, error = rows_of(40, "linear")
    weight = np.random.default_rng(2).uniform(0.5, 2, 40)
    rows, target = phi[:, 0], error[:, 0]
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


def test_the_state_comes_back_and_few_rows_are_refused() -> None:
    x, phi, error = rows_of(200, "step")
    correction, _ = fit_correction(x, phi, error, np.ones_like(error))
    again = Correction.from_state(correction.state())
    np.testing.assert_array_equal(again.predict(x, phi), correction.predict(x, phi))
    with pytest.raises(DataError, match="expected at least 60 validation rows for a corrected mean; found 59"):
        fit_correction(x[:59], phi[:59], error[:59], np.ones((59, 1)))
