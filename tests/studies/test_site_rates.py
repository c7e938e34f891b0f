"""The fit of the sites' odds: its nesting, the truth, and hard cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latedrop.calibration.scale import fit_floor
from latedrop.metrics import nll
from rounding import assert_same_doubles
from studies.site_rates import fit_sites, scored


def data(rows: int, sites: int, floor: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Errors, variances by site, and the odds that the errors were drawn with."""
    generator = torch.Generator().manual_seed(seed)
    by_site = torch.rand(rows, sites, generator=generator, dtype=torch.float64) ** 3
    odds = torch.rand(sites, generator=generator, dtype=torch.float64)
    odds[::3] = 0
    return torch.randn(rows, generator=generator, dtype=torch.float64) * (by_site @ odds + floor).sqrt(), by_site, odds


@pytest.mark.parametrize(("rows", "sites"), [(300, 4), (15, 30), (50, 1)])
def test_it_never_ends_worse_than_one_common_rate_with_a_floor(rows: int, sites: int) -> None:
    error, by_site, _ = data(rows, sites)
    zero, fit = torch.zeros_like(error), fit_sites(error, by_site)
    scale, floor = fit_floor(zero, by_site.sum(1), error)
    assert bool((fit.odds >= 0).all())
    assert fit.floor >= 0
    own, common = (float(nll(zero, v, error)) for v in (fit.variance(by_site), scale * by_site.sum(1) + floor))
    assert own <= common + 1e-9


def test_it_finds_the_truth_given_enough_rows() -> None:
    error, by_site, odds = data(40_000, 4)
    fit = fit_sites(error, by_site)
    # The standard error of an odds from the expected curvature, U' diag(1/w^2) U / 2.
    w = by_site @ odds + 0.2
    columns = torch.cat([by_site, torch.ones(len(w), 1, dtype=torch.float64)], 1) / w[:, None]
    errors = torch.linalg.inv(columns.T @ columns / 2).diagonal().sqrt()
    assert bool(((fit.odds - odds).abs() < 4 * errors[:-1]).all())
    assert abs(fit.floor - 0.2) < 4 * float(errors[-1])


def test_sites_and_rows_without_variance() -> None:
    error, by_site, _ = data(100, 4)
    by_site[:, 2] = 0
    by_site[:7] = 0
    odds = fit_sites(error, by_site).odds
    assert bool((torch.isfinite(odds) & (odds >= 0)).all())


def test_where_the_floor_explains_all_the_sites_keep_a_rate() -> None:
    for seed in range(20):  # whether the common or the own rates win such a tie is a matter of rounding
        _, by_site, _ = data(200, 3, seed=seed)
        error = 1 / (1 + 3 * by_site.sum(1))  # the larger the variance, the smaller the error
        fit = fit_sites(error, by_site)
        assert bool((fit.odds > 0).all())
        assert fit.scale == 0
        assert_same_doubles(torch.tensor(fit.floor, dtype=torch.float64), error.square().mean())


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 40), st.integers(1, 8), st.integers(0, 10_000))
def test_the_fit_scales_with_the_data(rows: int, sites: int, seed: int) -> None:
    error, by_site, _ = data(rows, sites, seed=seed)
    fit, larger = fit_sites(error, by_site), fit_sites(error * 10, by_site)
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
