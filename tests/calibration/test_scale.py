"""Scales and floors against numerical minimisation, brute force and known answers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import optimize, stats
from torch import Tensor

from latedrop import metrics
from latedrop.calibration.scale import TradeoffPoint, apply_scale, fit_floor, optimal_scale, relaxed_scale, tradeoff
from latedrop.errors import DataError
from rounding import assert_same_doubles, assert_same_up_to_rounding, rounding

LEVELS = np.arange(1, 100) / 100
Z = stats.norm.ppf((1 + LEVELS) / 2)
TOL = 1e-4  # the default of `relaxed_scale`
quick = settings(max_examples=25, deadline=None, derandomize=True)


def make(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and target in float64; the errors are too large, and heavier-tailed than a Gaussian."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=shape), rng.uniform(0.2, 2, size=shape)
    target = mean + 1.7 * std * rng.standard_t(4, size=shape)
    return torch.tensor(mean), torch.tensor(std**2), torch.tensor(target)


def nll_of(e2: np.ndarray, variance: np.ndarray) -> float:
    return float(np.mean(e2 / variance + np.log(variance)) / 2)


def balance_of(ratio: np.ndarray, scale: float) -> float:
    """The balance by its definition: `ratio` is `|error| / std`, every level is looked at by itself."""
    return float(np.mean((ratio[None] <= Z[:, None] * math.sqrt(scale)).mean(1) - LEVELS))


@st.composite
def errors_and_variances(draw: st.DrawFn, smallest: float = 1e-3) -> tuple[np.ndarray, np.ndarray]:
    """A few errors, some of them 0 and some equal, with their variances."""
    size = draw(st.integers(1, 25))
    number = st.floats(smallest, 1e3).map(lambda value: float(f"{value:.3g}"))
    error = draw(arrays(np.float64, size, elements=st.one_of(st.just(0.0), st.just(1.0), number)))
    assume(error.any())
    return error, draw(arrays(np.float64, size, elements=number))


def test_optimal_scale_is_the_numerical_minimum() -> None:
    mean, variance, target = make(300)
    scale = float(optimal_scale(mean, variance, target))
    e2, v = (target - mean).square().numpy(), variance.numpy()
    best = optimize.minimize_scalar(lambda log: nll_of(e2, np.exp(log) * v), bounds=(-5, 5), options={"xatol": 1e-9})
    assert math.log(scale) == pytest.approx(best.x, abs=1e-6)  # the search ends within 1e-9, where the cost is flat
    assert nll_of(e2, scale * v) <= best.fun + 1e-12


@quick
@given(errors_and_variances())
def test_relaxed_scale_is_as_balanced_as_any(case: tuple[np.ndarray, np.ndarray]) -> None:
    error, variance = case
    scale = float(relaxed_scale(torch.zeros(len(error)), torch.tensor(variance), torch.tensor(error)))
    ratio = error / np.sqrt(variance)
    # The balance changes at these scales only; just below and just above, all its values are seen.
    jumps = np.unique(ratio[ratio > 0][:, None] / Z)
    roots = np.concatenate([jumps * (1 - 1e-9), jumps * (1 + 1e-9)])
    inside = np.searchsorted(np.sort(ratio), Z * roots[:, None], side="right") / len(ratio)
    best = np.abs((inside - LEVELS).mean(1)).min()
    assert abs(balance_of(ratio, scale)) <= best + TOL


@quick
@given(errors_and_variances(), st.floats(1e-6, 1e6))
def test_scales_divide_by_what_multiplies_the_variance(case: tuple[np.ndarray, np.ndarray], k: float) -> None:
    mean, (target, variance) = torch.zeros(len(case[0])), map(torch.tensor, case)
    for function in (optimal_scale, relaxed_scale):
        expected = function(mean, variance, target) / k
        assert_same_doubles(function(mean, variance * k, target), expected)
    # The cost is flat at its best: the fits are compared by what they cost.
    before = apply_scale(variance, *fit_floor(mean, variance, target))
    after = apply_scale(variance * k, *fit_floor(mean, variance * k, target))
    costs = [nll_of(case[0] ** 2, fitted.numpy()) for fitted in (before, after)]
    assert costs[0] == pytest.approx(costs[1], abs=rounding(torch.float64))


@pytest.mark.parametrize("tiny", [0.0, 1e-300, 1e-150, 1e-40])
def test_errors_of_nearly_zero_count_as_zero(tiny: float) -> None:
    """Maps that are right but for the tails of kernels: a scale of 1e-80 would be no variance at all."""
    error = torch.linspace(0.1, 1, 100, dtype=torch.float64)
    error[:70] = tiny
    scale = relaxed_scale(torch.zeros(100), torch.ones(100), error)
    assert float(scale) > 1e-24
    metrics.nll(torch.zeros(100), (1e-6 * scale.float()).expand(100), error.float())


def floor_cases() -> list[tuple[np.ndarray, np.ndarray]]:
    """Squared errors and variances: noise below, at and above the variance; unrelated; spread over many decades."""
    rng = np.random.default_rng(5)
    cases = []
    for floor, spread in [(0.0, 1), (1e-3, 1), (1.0, 1), (1e3, 1), (1e-4, 4), (1.0, 6)]:
        variance = np.exp(spread * rng.normal(size=200))
        cases.append(((3 * variance + floor) * rng.chisquare(1, size=200), variance))
    cases.append((np.exp(3 * rng.normal(size=30)), np.exp(3 * rng.normal(size=30))))
    cases.append((rng.chisquare(1, size=5), np.array([1.0, 1.0, 1e-8, 1e-8, 1e-4])))
    return cases


@pytest.mark.parametrize("case", floor_cases(), ids=range(len(floor_cases())))
def test_fit_floor_is_as_good_as_a_general_optimiser(case: tuple[np.ndarray, np.ndarray]) -> None:
    e2, variance = case
    scale, floor = (
        float(t) for t in fit_floor(torch.zeros(len(e2)), torch.tensor(variance), torch.tensor(np.sqrt(e2)))
    )
    assert scale >= 0
    assert floor >= 0
    starts = [(s * e2.mean() / variance.mean(), f * e2.mean()) for s in (1e-2, 10) for f in (1e-5, 1)]
    least = min(
        optimize.minimize(
            lambda log: nll_of(e2, np.exp(log[0]) * variance + np.exp(log[1])),
            np.log(start),
            method="L-BFGS-B",
            bounds=[(-40, 40)] * 2,
        ).fun
        for start in starts
    )
    assert nll_of(e2, scale * variance + floor) <= least + 1e-6


def test_fit_floor_takes_rows_of_no_variance() -> None:
    mean, variance, target = make(200)
    variance[::4] = 0
    scale, floor = fit_floor(mean, variance, target)
    assert float(floor) > 0
    fitted = apply_scale(variance, scale, floor)
    assert math.isfinite(float(metrics.nll(mean, fitted, target)))


@pytest.mark.parametrize("shape", [(2,), (4,), (4, 1), (4, 3), (2, 4)])
def test_apply_scale_refuses_another_number_of_outputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"expected 2 outputs along axis 1.*found variances of shape"):
        apply_scale(torch.ones(shape), torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize("shape", [(300,), (100, 3)])
def test_tradeoff_goes_from_one_scale_to_the_other(shape: tuple[int, ...]) -> None:
    data = make(*shape)
    per_output = len(shape) > 1
    optimal, relaxed = (f(*data, per_output=per_output) for f in (optimal_scale, relaxed_scale))
    zero = torch.zeros_like(optimal)
    path = tradeoff(*data, (optimal, zero), (relaxed, zero))
    assert len(path) == 21
    assert all(isinstance(point, TradeoffPoint) for point in path)
    assert_same_up_to_rounding(torch.tensor(path[0].scale), optimal.float(), terms=1)
    assert_same_up_to_rounding(torch.tensor(path[-1].scale), relaxed.float(), terms=1)
    assert path[0].nll == pytest.approx(float(metrics.nll(data[0], apply_scale(data[1], optimal, zero), data[2])))
    scores = [point.nll for point in path]
    assert scores == sorted(scores)
    assert path[-1].ma < path[0].ma
    ratios = np.diff(np.log([point.scale for point in path]), axis=0)
    assert_same_doubles(ratios, ratios[:1].repeat(20, 0))


@pytest.mark.parametrize("function", [optimal_scale, relaxed_scale])
def test_a_variance_of_zero_needs_a_floor(function) -> None:
    mean, variance, target = make(10)
    variance[:3] = 0
    with pytest.raises(DataError, match=r"variance is 0 in 3 of 10 entries.*add a floor"):
        function(mean, variance, target)


@pytest.mark.parametrize("function", [optimal_scale, relaxed_scale, fit_floor])
def test_no_errors_no_scale(function) -> None:
    mean, variance, _ = make(10)
    with pytest.raises(DataError, match="found every prediction equal to its target"):
        function(mean, variance, mean)
    with pytest.raises(DataError, match=r"expected at least one entry, found shape \(0,\)"):
        function(mean[:0], variance[:0], mean[:0])
