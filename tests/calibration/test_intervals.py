"""Interval kinds and Student tails against exact ranks, scipy and samples of a known tail."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from latedrop.calibration import scale
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.levels import checked_level, normal_quantile
from latedrop.metrics.tails import DEGREES, LEAST_ROWS, Tail, fit_tail
from latedrop.quantiles import ConformalScores, IsotonicKnots
from rounding import assert_same_doubles

UNIT = ((1.0,), (0.0,))  # scale and floor, which a fit only carries along


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values))


def isotonic(*residuals: object) -> IsotonicKnots:
    return scale.isotonic([tensor(z) for z in residuals], *UNIT)


def conformal(*residuals: object) -> ConformalScores:
    return scale.conformal([tensor(z) for z in residuals], *UNIT)


@pytest.mark.parametrize("q", [1e-12, 0.01, 0.25, 0.5, 0.9, 1 - 1e-12])
def test_normal_quantile_is_scipys(q: float) -> None:
    assert_same_doubles(normal_quantile(q), stats.norm.ppf(q), scale=1.0)


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


@pytest.mark.parametrize("size", [1.0, 10.0, 1e3, 1e6])
def test_isotonic_is_finite_however_far_the_residuals_are(size: float) -> None:
    z = size * np.random.default_rng(0).normal(size=500)
    fitted = isotonic(z)
    for q in (0.05, 0.5, 0.95):
        # Four standard errors of a quantile of n rows, sqrt(q (1 - q) / n) / density.
        error = math.sqrt(q * (1 - q) / 500) / stats.norm.pdf(stats.norm.ppf(q))
        assert fitted.quantiles(q)[0] / size == pytest.approx(normal_quantile(q), abs=4 * error)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fit", [scale.isotonic, scale.conformal])
def test_residuals_of_no_variance_are_refused(fit: Callable[..., object], value: float) -> None:
    with pytest.raises(DataError, match="expected finite standardised residuals; found 2 NaN or inf"):
        fit([tensor([0.0, value, 1.0]), tensor([value])], *UNIT)


@pytest.mark.parametrize("level", [0, 1, -0.1, 90, math.nan, math.inf, True, "0.9", None, [0.9], torch.ones(2) / 2])
def test_what_is_no_level_is_refused(level: object) -> None:
    with pytest.raises(ArgumentError, match=r"expected a probability inside \(0, 1\).*A 90 % interval is level 0\.9"):
        checked_level(level)


def reference(nu: float) -> object:
    return stats.norm if math.isinf(nu) else stats.t(nu)


@pytest.mark.parametrize("nu", [6.0, *DEGREES])
def test_quantiles_are_those_of_scipy(nu: float) -> None:
    tail = Tail(nu, 1.7)
    for q in (1e-6, 0.005, 0.05, 0.25, 0.4999, 0.5, 0.5001, 0.75, 0.9, 0.975, 0.995, 1 - 1e-6):
        assert tail.quantile(q) == pytest.approx(1.7 * reference(nu).ppf(q), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("nu", DEGREES)
def test_likelihood_and_variance_are_those_of_scipy(nu: float) -> None:
    error, variance = torch.linspace(-9, 9, 31), torch.linspace(0.1, 4, 31)
    nll = Tail(nu, 0.8).nll(error, variance)
    z = error.double() / (0.8 * variance.double().sqrt())
    expected = -reference(nu).logpdf(z.numpy()) + np.log(0.8 * variance.double().sqrt().numpy())
    np.testing.assert_allclose(nll, expected, rtol=1e-10)
    assert Tail(nu, 0.8).variance == pytest.approx(0.64 * reference(nu).var())


def test_no_other_scale_and_degree_is_more_likely() -> None:
    z = torch.from_numpy(stats.t(4).rvs(400, random_state=1) * 2.0)
    tail = fit_tail(z)

    def cost(nu: float, factor: float) -> float:
        return float(Tail(nu, tail.scale * factor).nll(z, torch.ones(400)).mean()) + 4 / (nu * 400)

    assert all(cost(tail.nu, 1) < cost(tail.nu, factor) for factor in (0.99, 1.01))
    factors = np.geomspace(0.5, 2, 60)
    assert all(cost(tail.nu, 1) < cost(nu, factor) for nu in DEGREES if nu != tail.nu for factor in factors)


def test_few_rows_have_as_many_degrees_however_many_entries_they_have() -> None:
    z = torch.from_numpy(stats.t(3).rvs(300, random_state=0))
    assert fit_tail(z[: LEAST_ROWS - 1]) == Tail(LEAST_ROWS - 1.0)
    assert fit_tail(z, rows=12.5) == Tail(12.0)
    assert fit_tail(z[:2]) == Tail(3.0)
    assert fit_tail(z).nu in DEGREES
    light = torch.from_numpy(np.random.default_rng(3).uniform(-1, 1, 400))
    assert [fit_tail(light[:count]).nu for count in (40, 60, 400)] == [40, 60, math.inf]


def test_degrees_that_are_no_whole_number_are_refused() -> None:
    for nu, factor in ((3.5, 1.0), (2.0, 1.0), (3.0, 0.0)):
        with pytest.raises(ArgumentError, match="whole or infinite degrees of freedom"):
            Tail(nu, factor)
