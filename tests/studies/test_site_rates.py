"""The fit of the sites' odds against scipy, its nesting, and hard cases."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from latedrop.metrics import nll
from rounding import assert_same_doubles
from studies.site_rates import SiteFit, fit_sites, scored


def data(rows: int, sites: int, outputs: int = 1, floor: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Errors, variances by site, and the odds that the errors were drawn with."""
    generator = torch.Generator().manual_seed(seed)
    by_site = torch.rand(rows, outputs, sites, generator=generator, dtype=torch.float64) ** 3
    odds = torch.rand(sites, generator=generator, dtype=torch.float64)
    odds[::3] = 0
    std = (by_site @ odds + floor).sqrt()
    return torch.randn(rows, outputs, generator=generator, dtype=torch.float64) * std, by_site, odds


def cost(error: Tensor, variance: Tensor) -> float:
    return float(nll(torch.zeros_like(error), variance, error))


@pytest.mark.parametrize(("rows", "sites", "outputs"), [(300, 4, 1), (200, 3, 3), (15, 30, 1), (50, 1, 1)])
def test_a_larger_model_never_ends_worse(rows: int, sites: int, outputs: int) -> None:
    error, by_site, _ = data(rows, sites, outputs)
    costs = {}
    for per_site in (False, True):
        for floor in (False, True):
            fit = fit_sites(error, by_site, per_site=per_site, floor=floor)
            assert bool((fit.odds >= 0).all() and (fit.scales >= 0).all() and (fit.floors >= 0).all())
            # Outputs of equal size here, so that the mean over all of them is what was minimised.
            size = error.square().mean(0).sqrt()
            costs[per_site, floor] = cost(error / size, fit.variance(by_site) / size.square())
    slack = 1e-9
    assert costs[True, False] <= costs[False, False] + slack
    assert costs[False, True] <= costs[False, False] + slack
    assert costs[True, True] <= min(costs[True, False], costs[False, True]) + slack


def test_against_scipy_with_the_same_pull() -> None:
    error, by_site, _ = data(400, 5)
    fit = fit_sites(error, by_site, per_site=True, floor=True)
    common = fit_sites(error, by_site, per_site=False, floor=True)
    e2, u = error[:, 0].square().numpy(), by_site[:, 0].numpy()
    start = common.odds[0].item()

    def objective(theta: np.ndarray) -> float:
        w = u @ theta[:-1] * start + theta[-1]
        return float(np.mean(e2 / w + np.log(w)) + np.sum((theta[:-1] - 1) ** 2) / len(e2))

    found = [
        minimize(objective, np.append(np.full(5, a), b), bounds=[(0, None)] * 5 + [(1e-6, None)], method="L-BFGS-B")
        for a in (0.3, 1.0, 3.0)
        for b in (0.05, 0.5)
    ]
    best = min(found, key=lambda result: result.fun)
    ours = objective(np.append(fit.odds.numpy() / start, fit.floors.item()))
    assert ours <= best.fun + 1e-7
    # Near its best the cost is flat: the two searches end apart.
    np.testing.assert_allclose(fit.odds.numpy() / start, best.x[:-1], atol=2e-2)


def test_it_finds_the_truth_given_enough_rows() -> None:
    error, by_site, odds = data(40_000, 4)
    fit = fit_sites(error, by_site, per_site=True, floor=True)
    # The standard error of an odds from the expected curvature, U' diag(1/w^2) U / 2.
    w = by_site[:, 0] @ odds + 0.2
    columns = torch.cat([by_site[:, 0], torch.ones(len(w), 1, dtype=torch.float64)], 1) / w[:, None]
    errors = torch.linalg.inv(columns.T @ columns / 2).diagonal().sqrt()
    assert bool(((fit.odds * fit.scales - odds).abs() < 4 * errors[:-1]).all())
    assert abs(float(fit.floors) - 0.2) < 4 * float(errors[-1])


def test_outputs_share_the_odds_and_have_their_own_scale_and_floor() -> None:
    error, by_site, _ = data(500, 3, outputs=2)
    units = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    fit = fit_sites(error * units, by_site * units.square()[:, None], per_site=True, floor=True)
    same = fit_sites(error, by_site, per_site=True, floor=True)
    # Two searches, which end near the same place.
    torch.testing.assert_close(fit.variance(by_site * units.square()[:, None]) / units.square(), same.variance(by_site))
    assert abs(float(fit.scales.log().mean())) < 1e-9


@pytest.mark.parametrize("per_site", [False, True])
@pytest.mark.parametrize("floor", [False, True])
def test_sites_and_rows_without_variance(per_site: bool, floor: bool) -> None:
    error, by_site, _ = data(100, 4)
    by_site[:, :, 2] = 0
    by_site[:7] = 0
    fit = fit_sites(error, by_site, per_site=per_site, floor=floor)
    assert bool(torch.isfinite(fit.odds).all())
    assert bool((fit.odds >= 0).all())


@pytest.mark.parametrize("outputs", [1, 2])
def test_where_the_floor_explains_all_the_sites_keep_a_rate(outputs: int) -> None:
    for seed in range(20):  # whether the common or the own rates win such a tie is a matter of rounding
        _, by_site, _ = data(200, 3, outputs, seed=seed)
        error = 1 / (1 + 3 * by_site.sum(2))  # the larger the variance, the smaller the error
        fit = fit_sites(error, by_site, per_site=True, floor=True)
        assert bool((fit.odds > 0).all())
        assert fit.scales.tolist() == [0.0] * outputs
        assert_same_doubles(fit.floors, error.square().mean(0))


def test_more_sites_than_rows_stays_near_the_common_rate() -> None:
    error, by_site, _ = data(12, 60)
    common = fit_sites(error, by_site, per_site=False, floor=False)
    own = fit_sites(error, by_site, per_site=True, floor=False)
    ratio = own.odds / common.odds
    assert float(ratio.max()) < 5
    assert own.odds.shape == (60,)


def test_it_is_deterministic() -> None:
    error, by_site, _ = data(100, 4)
    a, b = (fit_sites(error, by_site, per_site=True, floor=True) for _ in range(2))
    assert torch.equal(a.odds, b.odds)  # the same call on the same numbers
    assert torch.equal(a.floors, b.floors)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 40), st.integers(1, 8), st.integers(0, 10_000))
def test_the_fit_is_stationary_and_scales_with_the_data(rows: int, sites: int, seed: int) -> None:
    error, by_site, _ = data(rows, sites, seed=seed)
    fit = fit_sites(error, by_site, per_site=True, floor=True)
    larger = fit_sites(error * 10, by_site, per_site=True, floor=True)
    assert isinstance(fit, SiteFit)
    torch.testing.assert_close(larger.variance(by_site), fit.variance(by_site) * 100, rtol=1e-2, atol=0)


@pytest.mark.parametrize("terms", [1, 4, 60])
def test_many_terms_end_where_no_coefficient_can_improve(terms: int) -> None:
    generator = torch.Generator().manual_seed(terms)
    columns = torch.rand(400, terms, generator=generator, dtype=torch.float64)
    true = torch.zeros(terms, dtype=torch.float64)
    true[: max(1, terms // 10)] = 1.0
    e2 = (columns @ true) * torch.randn(400, generator=generator, dtype=torch.float64).square()
    start = torch.ones(terms, dtype=torch.float64)
    theta = scored(e2, columns, start, torch.zeros(terms, dtype=torch.float64)).requires_grad_(True)
    w = columns @ theta
    (slope,) = torch.autograd.grad((e2 / w + w.log()).mean() / 2, [theta])
    assert bool((theta >= 0).all())
    assert bool((slope >= -1e-4).all())  # what is at 0 would not gain from more
    assert bool((slope[theta > 1e-6].abs() < 1e-4).all())  # what is above 0 is at its best
