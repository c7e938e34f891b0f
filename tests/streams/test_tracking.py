"""Intervals that follow errors: the bound holds exactly whatever comes, and coverage returns after every change."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latedrop.quantiles import normal_quantile
from latedrop.streams.tracking import LEAST_SCALE, STEP, Tracker
from rounding import assert_same_doubles


def missed(tracker: Tracker, targets: np.ndarray, std: float = 1.0, level: float = 0.9) -> np.ndarray:
    """Learn labels `(N,)` or `(N, K)` of predictions that are always 0; return which were missed."""
    zeros = np.zeros(targets[:1].size)
    return np.array([tracker.learn(zeros, zeros + std, np.atleast_1d(row), level) for row in targets]).reshape(
        targets.shape
    )


def stream(kind: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise, time = rng.standard_normal(count), np.arange(count)
    return {
        "steady": noise,
        "step": noise * np.where(time < count // 2, 1, 4),
        "growth": noise * np.exp(np.linspace(0, 3, count)),
        "shrinking": noise * np.exp(np.linspace(0, -3, count)),
        "bias": noise + np.where(time < count // 3, 0, 5),
        "walk": noise + np.cumsum(0.2 * rng.standard_normal(count)),
        "season": noise * (1.5 + np.sin(time / 20)),
        "heavy tails": rng.standard_t(2.5, count),
    }[kind]


def most_misses(labels: int, largest: float, level: float, step: float = STEP) -> float:
    """How many labels can lie outside their intervals at most, if no error is above `largest · s`.

    A miss means `z · c · exp(theta) < largest`, as `t >= z`, and `c` is never below `LEAST_SCALE`; only a miss raises
    `theta`, by `step · level`. `theta` is bounded so, and is the sum of its steps.
    """
    top = max(0.0, math.log(largest / (normal_quantile((1 + level) / 2) * LEAST_SCALE)))
    return (1 - level) * labels + top / step + level


KINDS = ("steady", "step", "growth", "shrinking", "bias", "walk", "season", "heavy tails")


def test_the_first_interval_is_the_predictors_own() -> None:
    tracker = Tracker.of(2)
    np.testing.assert_allclose(tracker.factor(0.9), 1.6448536, rtol=1e-7)  # eight digits
    np.testing.assert_array_equal(tracker.bias, 0)


def test_theta_is_the_sum_of_its_steps() -> None:
    tracker = Tracker.of(1)
    misses = missed(tracker, stream("step", 500, 0))
    assert_same_doubles(tracker.theta, STEP * (misses.sum() - 0.1 * 500), scale=STEP * 500)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=120),
    st.sampled_from([0.5, 0.8, 0.9, 0.99]),
    st.sampled_from([0.02, 0.15, 1.0]),
)
def test_misses_are_bounded_whatever_comes(targets: list[float], level: float, step: float) -> None:
    tracker = Tracker.of(1)
    largest, misses = 0.0, 0
    for target in targets:
        largest = max(largest, abs(target - tracker.bias[0]))
        misses += int(tracker.learn(np.zeros(1), np.ones(1), np.array([target]), level, step)[0])
        assert tracker.scale[0] >= LEAST_SCALE
    assert misses <= most_misses(len(targets), max(largest, 1e-9), level, step) + 1e-9


def test_misses_are_bounded_against_one_who_sees_the_interval() -> None:
    """Every label lies just outside, as long as errors of at most 20 standard deviations allow it."""
    tracker, misses, count = Tracker.of(1), 0, 3000
    for _ in range(count):
        aim = min(1.001 * tracker.factor(0.9)[0], 20.0)
        misses += int(tracker.learn(np.zeros(1), np.ones(1), tracker.bias + aim, 0.9)[0])
    assert 0.1 * count * 0.9 < misses <= most_misses(count, 20, 0.9)
    assert misses / count == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("level", [0.8, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_long_run_coverage_of_drifting_streams(kind: str, level: float) -> None:
    count = 2000
    targets = np.stack([stream(kind, count, seed) for seed in range(3)], 1)
    misses = missed(Tracker.of(3), targets, level=level)
    assert misses.mean() == pytest.approx(1 - level, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_coverage_is_near_the_level_soon_after_a_change(kind: str) -> None:
    misses = missed(Tracker.of(10), np.stack([stream(kind, 1500, seed) for seed in range(10)], 1)).mean(1)
    windows = misses[100:].reshape(-1, 100).mean(1)  # 1000 labels each: a standard error of 0.01 were they independent
    assert 1 - windows.min() < 0.96
    assert 1 - windows.max() > 0.84


def test_units_do_not_matter() -> None:
    targets = stream("walk", 300, 0)
    one, other = Tracker.of(1), Tracker.of(1)
    np.testing.assert_array_equal(missed(one, targets), missed(other, 1000 * targets, std=1000.0))
    np.testing.assert_allclose(1000 * one.bias, other.bias)


def test_a_constant_bias_is_found_and_none_is_not_made_up() -> None:
    tracker = Tracker.of(1)
    missed(tracker, 3 + 0.5 * stream("steady", 200, 0))
    assert tracker.bias[0] == pytest.approx(3, abs=0.25)
    errors = []
    for seed in range(20):
        tracker = Tracker.of(1)
        for target in stream("steady", 200, seed):
            errors.append(target - tracker.bias[0])
            missed(tracker, np.array([target]))
    assert np.mean(np.square(errors)) < 1.08  # the largest gain alone would give 1.67, and the variance is 1


def test_a_bias_that_wanders_is_followed() -> None:
    own, corrected = [], []
    for seed in range(5):
        tracker = Tracker.of(1)
        for target in 4 * np.sin(np.arange(300) / 30) + 0.5 * stream("steady", 300, seed):
            own.append(target**2)
            corrected.append((target - tracker.bias[0]) ** 2)
            missed(tracker, np.array([target]))
    assert np.mean(corrected) < 0.1 * np.mean(own)


@pytest.mark.parametrize("slip", [1e3, 1e12, 1e200])
def test_one_absurd_label_does_little(slip: float) -> None:
    tracker = Tracker.of(1)
    missed(tracker, stream("steady", 100, 0))
    before = tracker.factor(0.9)[0]
    missed(tracker, np.array([slip]))
    assert tracker.factor(0.9)[0] < 2 * before
    assert abs(tracker.bias[0]) < 3
    assert missed(tracker, stream("steady", 200, 1)).mean() < 0.15


def test_no_errors_at_all_narrow_the_interval_and_end_somewhere() -> None:
    tracker = Tracker.of(1)
    missed(tracker, np.zeros(5000))
    assert 1e-3 < tracker.factor(0.9)[0] < 0.01
    assert missed(tracker, stream("steady", 300, 0))[50:].mean() < 0.2
