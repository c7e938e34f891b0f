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
from latedrop.errors import ArgumentError, DataError
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
    found = optimize.minimize_scalar(lambda log: nll_of(e2, np.exp(log) * v), bounds=(-5, 5), options={"xatol": 1e-9})
    assert math.log(scale) == pytest.approx(found.x, abs=1e-6)  # the search ends within 1e-9, where the cost is flat
    assert nll_of(e2, scale * v) <= found.fun + 1e-12


def test_optimal_scale_is_exact_on_a_small_case() -> None:
    scale = optimal_scale(torch.zeros(3), torch.tensor([1.0, 4.0, 0.25]), torch.tensor([1.0, 2.0, -2.0]))
    assert scale.dtype == torch.float64
    assert scale.tolist() == [(1 + 1 + 16) / 3]


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
@given(errors_and_variances())
def test_relaxed_scale_has_the_root_between_its_sides(case: tuple[np.ndarray, np.ndarray]) -> None:
    error, variance = case
    assume((error == 0).mean() < 0.5)  # with more, the balance is above 0 at any scale
    scale = float(relaxed_scale(torch.zeros(len(error)), torch.tensor(variance), torch.tensor(error)))
    ratio = error / np.sqrt(variance)
    assert balance_of(ratio, scale * (1 - 1e-6)) <= TOL
    assert balance_of(ratio, scale * (1 + 1e-6)) >= -TOL


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


def test_relaxed_scale_agrees_with_the_balance_metric() -> None:
    mean, variance, target = make(1000)
    scale = relaxed_scale(mean, variance, target)
    assert abs(float(metrics.balance(mean, variance * scale, target))) < TOL
    assert float(metrics.miscalibration_area(mean, variance * scale, target)) < float(
        metrics.miscalibration_area(mean, variance * optimal_scale(mean, variance, target), target)
    )


def test_both_scales_find_the_true_one_of_gaussian_errors() -> None:
    n, true = 20_000, 7.0
    rng = np.random.default_rng(3)
    variance = torch.tensor(rng.uniform(0.1, 3, size=n))
    target = torch.tensor(rng.normal(size=n)) * (true * variance).sqrt()
    # Standard errors of log(scale): sqrt(2 / n) for the mean of chi-squares. The balance has variance 1 / (12 n) and
    # slope 1 / (2 pi) in log(scale), hence 2 pi / sqrt(12 n) for its root. Three of them.
    optimal, relaxed = (float(f(torch.zeros(n), variance, target)) for f in (optimal_scale, relaxed_scale))
    assert abs(math.log(optimal / true)) < 3 * math.sqrt(2 / n)
    assert abs(math.log(relaxed / true)) < 3 * 2 * math.pi / math.sqrt(12 * n)


def test_equal_errors_leave_a_single_jump() -> None:
    ones = torch.ones(8, dtype=torch.float64)
    scale = float(relaxed_scale(0 * ones, ones, ones))
    # All are inside from the level where z_a sqrt(scale) = 1: half of the levels must be above it.
    assert scale == pytest.approx(1 / stats.norm.ppf(0.75) ** 2, rel=0.05)


@pytest.mark.parametrize("tiny", [0.0, 1e-300, 1e-150, 1e-40])
def test_errors_of_nearly_zero_count_as_zero(tiny: float) -> None:
    """Maps that are right but for the tails of kernels: a scale of 1e-80 would be no variance at all."""
    error = torch.linspace(0.1, 1, 100, dtype=torch.float64)
    error[:70] = tiny
    scale = relaxed_scale(torch.zeros(100), torch.ones(100), error)
    assert float(scale) > 1e-24
    metrics.nll(
        torch.zeros(100), (1e-6 * scale.float()).expand(100), error.float()
    )  # a variance that a likelihood takes


@pytest.mark.parametrize("zeros", [20, 49, 50, 51, 70, 99])
def test_errors_of_zero_leave_a_usable_relaxed_scale(zeros: int) -> None:
    error = torch.linspace(1, 2, 100, dtype=torch.float64)
    error[:zeros] = 0
    scale = float(relaxed_scale(torch.zeros(100), torch.ones(100), error))
    ratio = error.numpy()
    lowest = (ratio[zeros] / stats.norm.ppf(0.995)) ** 2  # where the first error comes inside the widest interval
    assert scale > lowest / 4
    assert scale < float(ratio[-1] / stats.norm.ppf(0.505)) ** 2
    if zeros > 50:
        assert balance_of(ratio, scale) == pytest.approx(zeros / 100 - 0.5)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3), (10, 2, 4, 5)])
def test_per_output_is_each_output_by_itself(shape: tuple[int, ...]) -> None:
    data = make(*shape)
    outputs = shape[1] if len(shape) > 1 else 1
    for function in (optimal_scale, relaxed_scale, lambda *d, **k: torch.stack(fit_floor(*d, **k))):
        joint = function(*data, per_output=True)
        assert joint.shape[-1] == outputs
        for k in range(outputs):
            alone = function(*(t[:, k] if len(shape) > 1 else t for t in data))
            assert alone.shape[-1] == 1
            assert_same_doubles(joint[..., k], alone[..., 0])
        flat = function(*(t.flatten() for t in data))
        assert_same_doubles(function(*data), flat)


def test_a_target_of_n_goes_with_a_mean_of_n_by_one() -> None:
    mean, variance, target = make(30, 1)
    assert_same_doubles(optimal_scale(mean, variance, target[:, 0]), optimal_scale(mean, variance, target))


def test_levels_are_those_asked_for() -> None:
    mean, variance, target = make(2000)
    one = relaxed_scale(mean, variance, target, levels=1)
    assert float(metrics.coverage(mean, variance * one, target, level=0.5)) == pytest.approx(0.5, abs=1 / 2000)


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
    found = min(
        optimize.minimize(
            lambda log: nll_of(e2, np.exp(log[0]) * variance + np.exp(log[1])),
            np.log(start),
            method="L-BFGS-B",
            bounds=[(-40, 40)] * 2,
        ).fun
        for start in starts
    )
    assert nll_of(e2, scale * variance + floor) <= found + 1e-6


@quick
@given(errors_and_variances())
def test_fit_floor_is_never_worse_than_no_floor_or_only_floor(case: tuple[np.ndarray, np.ndarray]) -> None:
    error, variance = case
    mean, target, v = torch.zeros(len(error)), torch.tensor(error), torch.tensor(variance)
    fitted = nll_of(error**2, apply_scale(v, *fit_floor(mean, v, target)).numpy())
    assert fitted <= nll_of(error**2, variance * float(optimal_scale(mean, v, target))) + 1e-9
    assert fitted <= nll_of(error**2, np.full_like(variance, np.mean(error**2))) + 1e-9


def test_fit_floor_finds_the_true_scale_and_floor() -> None:
    n, scale, floor = 5_000, 3.0, 0.5
    rng = np.random.default_rng(11)
    variance = rng.exponential(size=n)
    total = scale * variance + floor
    target = torch.tensor(rng.normal(size=n) * np.sqrt(total))
    found = torch.cat(fit_floor(torch.zeros(n), torch.tensor(variance), target)).numpy()
    # The Fisher information of (scale, floor) is sum g g^T / (2 total^2), with g = (variance, 1). Four standard errors.
    gradient = np.stack([variance, np.ones(n)]) / total
    errors = np.sqrt(np.diag(np.linalg.inv(gradient @ gradient.T / 2)))
    assert (np.abs(found - [scale, floor]) < 4 * errors).all()


def test_fit_floor_takes_rows_of_no_variance() -> None:
    mean, variance, target = make(200)
    variance[::4] = 0
    scale, floor = fit_floor(mean, variance, target)
    assert float(floor) > 0
    fitted = apply_scale(variance, scale, floor)
    assert math.isfinite(float(metrics.nll(mean, fitted, target)))


def test_fit_floor_of_no_variance_at_all_is_a_constant() -> None:
    mean, variance, target = make(50)
    scale, floor = fit_floor(mean, 0 * variance, target)
    assert scale.tolist() == [0.0]
    assert floor.tolist() == [float((target - mean).square().mean())]


def test_apply_scale_gives_each_output_its_own() -> None:
    scale, floor = torch.tensor([2.0, 3.0]), torch.tensor([0.5, 0.0])
    for shape in [(4, 2), (4, 2, 3), (4, 2, 3, 5)]:
        fitted = apply_scale(torch.ones(shape), scale, floor)
        assert fitted.shape == shape
        assert bool((fitted[:, 0] == 2.5).all() and (fitted[:, 1] == 3).all())
    for shape in [(4,), (4, 1), (4, 2), (4, 2, 3)]:
        assert bool((apply_scale(torch.ones(shape), scale[:1], floor[:1]) == 2.5).all())
    assert apply_scale(torch.ones(3, dtype=torch.float32), scale[:1].double(), floor[:1]).dtype == torch.float32


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
    path = tradeoff(*data, (optimal, zero), (relaxed, zero), steps=11)
    assert len(path) == 11
    assert all(isinstance(point, TradeoffPoint) for point in path)
    assert_same_up_to_rounding(torch.tensor(path[0].scale), optimal.float(), terms=1)
    assert_same_up_to_rounding(torch.tensor(path[-1].scale), relaxed.float(), terms=1)
    assert path[0].nll == pytest.approx(float(metrics.nll(data[0], apply_scale(data[1], optimal, zero), data[2])))
    scores = [point.nll for point in path]
    assert scores == sorted(scores)
    assert path[-1].ma < path[0].ma
    ratios = np.diff(np.log([point.scale for point in path]), axis=0)
    assert_same_doubles(ratios, ratios[:1].repeat(10, 0))


def test_tradeoff_moves_the_floor_too() -> None:
    mean, variance, target = make(200)
    scale, floor = fit_floor(mean, variance, target)
    path = tradeoff(mean, variance, target, (scale, floor), (scale * 4, floor * 4), steps=3)
    assert [point.floor[0] for point in path] == pytest.approx([float(floor), 2 * float(floor), 4 * float(floor)])
    still = tradeoff(mean, variance, target, (scale, 0 * floor), (scale * 4, 0 * floor), steps=3)
    assert [point.floor for point in still] == [(0.0,)] * 3


EVERY = pytest.mark.parametrize("function", [optimal_scale, relaxed_scale, fit_floor])


@EVERY
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(function, where: int, value: float) -> None:
    data = make(10)
    data[where][3] = value
    name = ("mean", "variance", "target")[where]
    with pytest.raises(DataError, match=rf"{name} is NaN or infinite in 1 of 10 entries, the first at index \(3,\)"):
        function(*data)


@EVERY
def test_a_negative_variance_is_refused(function) -> None:
    mean, variance, target = make(10)
    variance[2] = -1e-9
    with pytest.raises(DataError, match=r"variance is below 0 in 1 of 10 entries, the first at index \(2,\)"):
        function(mean, variance, target)


@pytest.mark.parametrize("function", [optimal_scale, relaxed_scale])
def test_a_variance_of_zero_needs_a_floor(function) -> None:
    mean, variance, target = make(10)
    variance[:3] = 0
    with pytest.raises(DataError, match=r"variance is 0 in 3 of 10 entries.*add a floor"):
        function(mean, variance, target)


@EVERY
def test_no_errors_no_scale(function) -> None:
    mean, variance, _ = make(10)
    with pytest.raises(DataError, match="found every prediction equal to its target"):
        function(mean, variance, mean)
    with pytest.raises(DataError, match=r"expected at least one entry, found shape \(0,\)"):
        function(mean[:0], variance[:0], mean[:0])


@EVERY
def test_one_output_without_errors_is_enough_to_refuse(function) -> None:
    mean, variance, target = make(10, 2)
    target[:, 1] = mean[:, 1]
    function(mean, variance, target)
    with pytest.raises(DataError, match="found every prediction equal to its target"):
        function(mean, variance, target, per_output=True)


@EVERY
@pytest.mark.parametrize("shape", [(10,), (1, 10), (1,), (10, 2), ()])
def test_nothing_is_broadcast(function, shape: tuple[int, ...]) -> None:
    mean, _, target = make(10, 1)
    with pytest.raises(DataError, match=r"expected variance of the mean's shape \(10, 1\), found"):
        function(mean, torch.ones(shape), target)
    if shape != (10,):
        with pytest.raises(DataError, match=r"expected target of the mean's shape \(10, 1\), found"):
            function(mean, torch.ones(10, 1), torch.ones(shape))


@pytest.mark.parametrize("levels", [0, -1])
def test_at_least_one_level(levels: int) -> None:
    with pytest.raises(ArgumentError, match=f"expected levels as a positive int.*found {levels}"):
        relaxed_scale(*make(10), levels=levels)
