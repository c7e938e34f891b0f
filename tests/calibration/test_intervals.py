"""Interval kinds against exact ranks, exact expectations and simulated coverage."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from latedrop.calibration import intervals
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.levels import checked_level, normal_quantile
from latedrop.quantiles import ConformalScores, IsotonicKnots
from rounding import rounding

UNIT = ((1.0,), (0.0,))  # scale and floor, which a fit only carries along


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values))


def isotonic(*residuals: object) -> IsotonicKnots:
    pytest.importorskip("sklearn")
    return intervals.isotonic([tensor(z) for z in residuals], *UNIT)


def conformal(*residuals: object) -> ConformalScores:
    return intervals.conformal([tensor(z) for z in residuals], *UNIT)


@pytest.mark.parametrize("q", [1e-12, 0.01, 0.25, 0.5, 0.9, 1 - 1e-12])
def test_normal_quantile_is_scipys(q: float) -> None:
    assert normal_quantile(q) == pytest.approx(
        stats.norm.ppf(q), rel=rounding(torch.float64), abs=rounding(torch.float64)
    )


@pytest.mark.parametrize("rows", [1, 9, 10, 19, 99, 100, 1000])
def test_conformal_rank_is_exact(rows: int) -> None:
    fitted = conformal(np.arange(1.0, rows + 1) * np.where(np.arange(rows) % 2, 1, -1))
    for percent in range(1, 100):
        rank = math.ceil((rows + 1) * Fraction(percent, 100))
        level = percent / 100
        low, high = (1 - level) / 2, (1 + level) / 2
        if rank <= rows:
            assert fitted.quantiles(high)[0] == rank, percent
            assert fitted.quantiles(low)[0] == -rank, percent
        else:
            needed = math.ceil(Fraction(percent, 100 - percent))
            match = rf"expected at least {needed} conformal rows for an interval at level {level:g}; found {rows}\."
            with pytest.raises(ArgumentError, match=match):
                fitted.quantiles(high)
            conformal(np.ones(needed)).quantiles(high)
    assert fitted.quantiles(0.5)[0] == 0


@pytest.mark.parametrize(("rows", "level"), [(19, 0.9), (20, 0.9), (49, 0.5), (10, 0.75)])
def test_conformal_coverage_is_what_theory_says(rows: int, level: float) -> None:
    """Over repeated fits the coverage is Beta(k, rows + 1 - k), with k the rank: its mean is k / (rows + 1)."""
    repeats, fresh = 1000, 200
    rng = np.random.default_rng(rows)
    covered = np.empty(repeats)
    for i in range(repeats):
        z = rng.standard_t(3, size=rows) + 0.5  # neither Gaussian, nor centred, nor of unit size
        score = conformal(z).quantiles((1 + level) / 2)[0]
        covered[i] = np.mean(np.abs(rng.standard_t(3, size=fresh) + 0.5) <= score)
    k = math.ceil((rows + 1) * level - 1e-9)
    expected = k / (rows + 1)
    spread = expected * (1 - expected) / (rows + 2)
    # The variance of one repeat is that of the Beta and the binomial's of the fresh rows. Three standard errors.
    error = math.sqrt((spread + (expected * (1 - expected) - spread) / fresh) / repeats)
    assert abs(covered.mean() - expected) < 3 * error
    assert expected >= level - 1e-12
    assert covered.mean() > level - 3 * error


SHAPES = {
    "skewed": lambda rng, n: rng.exponential(size=n) - 1,
    "laplace": lambda rng, n: rng.laplace(scale=2**-0.5, size=n),
    "biased": lambda rng, n: rng.normal(2, 1, size=n),
    "far too wide": lambda rng, n: 0.01 * rng.normal(size=n),
    "far too narrow": lambda rng, n: 100 * rng.normal(size=n),
    "two lumps": lambda rng, n: rng.normal(size=n) / 10 + rng.choice([-1, 1], size=n),
}


@pytest.mark.parametrize("draw", SHAPES.values(), ids=SHAPES)
def test_isotonic_repairs_what_is_not_gaussian(draw) -> None:
    n = 4000
    rng = np.random.default_rng(1)
    fitted, fresh = isotonic(draw(rng, n)), draw(rng, n)
    off = []
    for q in (0.02, 0.05, 0.25, 0.5, 0.75, 0.95, 0.98):
        # A frequency among n fresh rows, of a quantile that n other rows gave: four standard errors, and one step of
        # the 200 knots, between which two lumps leave room.
        error = math.sqrt(2 * q * (1 - q) / n)
        assert abs(np.mean(fresh <= fitted.quantiles(q)[0]) - q) < 4 * error + 1 / 200, q
        off.append(abs(np.mean(fresh <= normal_quantile(q)) - q) / error)
    assert max(off) > 5, "the Gaussian is not off: the case tests nothing"


@pytest.mark.parametrize("size", [1.0, 10.0, 1e3, 1e6])
def test_isotonic_is_finite_however_far_the_residuals_are(size: float) -> None:
    z = size * np.random.default_rng(0).normal(size=500)
    fitted = isotonic(z)
    for q in (0.05, 0.5, 0.95):
        # Four standard errors of a quantile of n rows, sqrt(q (1 - q) / n) / density.
        error = math.sqrt(q * (1 - q) / 500) / stats.norm.pdf(stats.norm.ppf(q))
        assert fitted.quantiles(q)[0] / size == pytest.approx(normal_quantile(q), abs=4 * error)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fit", [intervals.isotonic, intervals.conformal])
def test_residuals_of_no_variance_are_refused(fit: Callable[..., object], value: float) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(DataError, match="expected finite standardised residuals; found 2 NaN or inf"):
        fit([tensor([0.0, value, 1.0]), tensor([value])], *UNIT)


@pytest.mark.parametrize("level", [0, 1, -0.1, 90, math.nan, math.inf, True, "0.9", None, [0.9], torch.ones(2) / 2])
def test_what_is_no_level_is_refused(level: object) -> None:
    with pytest.raises(ArgumentError, match=r"expected a probability inside \(0, 1\).*A 90 % interval is level 0\.9"):
        checked_level(level)
