"""The fit that is shrunk to a typical shape, and the guard, against known variances and a general optimiser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from benchmarks.instead.shape_fit import Guard, crossed_shape, fit_shape, typical_shares
from rounding import assert_same_doubles

SHARES = typical_shares(["leverage", "dropout"])


def rows_of(count: int, truth: tuple[float, ...] = (0.5, 2.0, 0.0), seed: int = 0) -> tuple[Tensor, Tensor]:
    """Errors `(n, 1)` and columns `(n, 1, J)`, the variance being `truth` of a one and of the columns."""
    rng = np.random.default_rng(seed)
    columns = rng.gamma(1.0, 1.0, (count, len(truth) - 1))
    variance = truth[0] + columns @ np.array(truth[1:])
    error = rng.normal(size=count) * np.sqrt(variance)
    return torch.from_numpy(error)[:, None], torch.from_numpy(columns)[:, None]


def test_typical_shares_add_up_to_one() -> None:
    assert_same_doubles(SHARES, torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64) / 0.8)
    assert float(typical_shares(["leverage", "dropout", "forest"]).sum()) == pytest.approx(1)


def test_few_rows_have_the_typical_shape_and_their_own_scale() -> None:
    error, columns = rows_of(5)
    fit = fit_shape(error, columns, torch.ones(1, 2), SHARES, weight=1e9)
    shape = torch.cat([fit.floors[:, None], fit.coefficients], 1)[0]
    scale = (error[:, 0].square() / (SHARES[0] + columns[:, 0] @ SHARES[1:])).mean()
    torch.testing.assert_close(shape, scale * SHARES, rtol=1e-4, atol=0)


def test_many_rows_have_their_way() -> None:
    error, columns = rows_of(40_000)
    fit = fit_shape(error, columns, torch.ones(1, 2), SHARES)
    assert float(fit.floors) == pytest.approx(0.5, abs=0.05)
    assert float(fit.coefficients[0, 0]) == pytest.approx(2, abs=0.1)
    assert float(fit.coefficients[0, 1]) < 0.05


@pytest.mark.parametrize("nu", [4.0, math.inf])
def test_no_other_coefficients_are_cheaper(nu: float) -> None:
    error, columns = rows_of(80, (1.0, 0.2, 1.0), seed=1)
    sizes = columns.mean(0)
    fit = fit_shape(error, columns, sizes, SHARES, weight=30, nu=nu)
    e2 = error[:, 0].square()
    units = torch.cat([torch.ones(80, 1), columns[:, 0] / sizes], 1)

    def cost(logs: np.ndarray) -> float:
        v = units @ torch.from_numpy(logs).exp()
        loss = e2 / v if math.isinf(nu) else (nu + 1) * torch.log1p(e2 / v / nu)
        off = torch.from_numpy(logs) - SHARES.log()
        off = off - SHARES @ off
        return float((loss + v.log()).sum() / 2 + 30 / 4 * SHARES @ off.square())

    found = torch.cat([fit.floors, fit.coefficients[0] * sizes[0]]).log().numpy()
    best = minimize(cost, found + 0.3, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10, "maxiter": 4000})
    assert cost(found) == pytest.approx(best.fun, abs=1e-5)
    np.testing.assert_allclose(found, best.x, atol=5e-3)


def test_units_of_errors_and_columns_cancel() -> None:
    error, columns = rows_of(60)
    units = torch.tensor([1e-4, 1e5]).double()
    one = fit_shape(error, columns, columns.mean(0), SHARES)
    other = fit_shape(1e3 * error, columns * units, columns.mean(0) * units, SHARES)
    torch.testing.assert_close(1e6 * one.variance(columns), other.variance(columns * units), rtol=1e-5, atol=0)


def test_a_column_without_size_is_left_out() -> None:
    error, columns = rows_of(60)
    columns[:, :, 1] = 0
    fit = fit_shape(error, columns, columns.mean(0), SHARES)
    assert float(fit.coefficients[0, 1]) == 0
    assert bool((fit.variance(columns) > 0).all())


def test_a_row_that_counts_twice_is_as_good_as_two() -> None:
    error, columns = rows_of(60)
    weights = torch.ones(60)
    weights[:20] = 2
    twice = [torch.cat([part, part[:20]]) for part in (error, columns)]
    sizes = columns.mean(0)
    one = fit_shape(error, columns, sizes, SHARES, weights, rows=80)
    other = fit_shape(*twice, sizes, SHARES)
    torch.testing.assert_close(one.variance(columns), other.variance(columns), rtol=1e-5, atol=0)


def test_outputs_are_fitted_apart() -> None:
    first, second = rows_of(50, seed=1), rows_of(50, (1.0, 0.1, 3.0), seed=2)
    error, columns = (torch.cat(part, 1) for part in zip(first, second, strict=True))
    both = fit_shape(error, columns, columns.mean(0), SHARES).variance(columns)
    for k, (e, u) in enumerate((first, second)):
        assert_same_doubles(both[:, k], fit_shape(e, u, u.mean(0), SHARES).variance(u)[:, 0])


def test_a_row_does_not_see_its_own_error_in_cross_validation() -> None:
    error, columns = rows_of(40)
    changed = error.clone()
    changed[7] *= 50
    sizes = columns.mean(0)
    one, other = (crossed_shape(e, columns, sizes, SHARES) for e in (error, changed))
    assert_same_doubles(other[7], one[7])
    assert float(other.sum()) > 2 * float(one.sum())


def guard_of(limit: float = 4.0) -> Guard:
    one = torch.ones(1).double()
    return Guard(torch.full((1, 2), limit).double(), 0.5 * one, 0 * one, 9 * one)


def test_usual_rows_keep_their_variance() -> None:
    variance, mean = torch.rand(20, 1).double(), torch.zeros(20, 1)
    novelty = guard_of().novelty(torch.linspace(0, 4, 20)[:, None, None].expand(20, 1, 2))
    assert_same_doubles(guard_of().grown(variance, novelty, mean, 10 * variance), variance)


def test_strange_rows_grow_in_proportion_up_to_the_ceiling() -> None:
    guard = guard_of()
    lev = torch.tensor([[[8.0, 0.0]], [[1.0, 40.0]], [[4e9, 4.0]], [[4e9, 4e9]]])
    mean = torch.tensor([[0.0], [0.0], [0.0], [4.0]])
    variance = torch.full((4, 1), 0.25).double()
    found = guard.grown(variance, guard.novelty(lev), mean)
    assert_same_doubles(found[:, 0], torch.tensor([2 * 0.25 + 0.5, 10 * 0.25 + 9 * 0.5, 9.0, 25.0]).double())


def test_the_variance_does_not_jump_at_the_limit() -> None:
    """Not even where it is larger than what the targets alone say."""
    guard, variance = guard_of(), torch.full((2, 1), 40.0).double()
    found = guard.grown(variance, torch.tensor([1.0, 1.0 + 1e-9]), torch.zeros(2, 1))
    torch.testing.assert_close(found, variance, rtol=1e-6, atol=0)


def test_beyond_the_limit_the_larger_fit_counts() -> None:
    variance, without = torch.tensor([[[0.2], [0.2], [0.2]], [[0.6], [0.6], [0.1]]], dtype=torch.float64)
    novelty = torch.tensor([0.9, 1.001, 1.001], dtype=torch.float64)
    found = guard_of().grown(variance, novelty, torch.zeros(3, 1), without)
    expected = torch.tensor([0.2, 1.001 * 0.6 + 0.0005, 1.001 * 0.2 + 0.0005], dtype=torch.float64)
    assert_same_doubles(found[:, 0], expected)


def test_a_guard_is_fitted_to_usual_rows() -> None:
    torch.manual_seed(0)
    leverage, error, target = torch.rand(1000, 2, 3), torch.randn(50, 2), 3 + torch.randn(50, 2)
    guard = Guard.fit(leverage, error, target)
    assert_same_doubles(guard.limits, leverage.double().quantile(0.95, 0))
    assert_same_doubles(guard.constants, error.double().square().mean(0))
    assert_same_doubles(guard.spreads, target.double().var(0, correction=0))
    assert_same_doubles(guard.novelty(leverage), (leverage / guard.limits).flatten(1).amax(1))
