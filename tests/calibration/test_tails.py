"""Student tails against scipy and samples of a known tail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from latedrop.errors import ArgumentError
from latedrop.metrics.tails import DEGREES, LEAST_ROWS, Tail, fit_tail


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
    for nu, scale in ((3.5, 1.0), (2.0, 1.0), (3.0, 0.0)):
        with pytest.raises(ArgumentError, match="whole or infinite degrees of freedom"):
            Tail(nu, scale)
