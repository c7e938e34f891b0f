"""The fit that is shrunk to a typical shape, and the guard, against known variances and a general optimiser."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from latedrop.calibration import fitted_terms as shape
from latedrop.calibration.fitted_terms import Block, blocks_of, fit_terms
from latedrop.calibration.guard import Guard
from latedrop.terms import Dropout, ErrorForest, Leverage
from rounding import assert_same_doubles

BLOCKS = [Block([0], 0.2), Block([1], 0.1)]
SHARES = torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64) / 0.8


def rows_of(count: int, truth: tuple[float, ...] = (0.5, 2.0, 0.0), seed: int = 0) -> tuple[Tensor, Tensor]:
    """Errors `(n, 1)` and columns `(n, 1, J)`, the variance being `truth` of a one and of the columns."""
    rng = np.random.default_rng(seed)
    columns = rng.gamma(1.0, 1.0, (count, len(truth) - 1))
    variance = truth[0] + columns @ np.array(truth[1:])
    error = rng.normal(size=count) * np.sqrt(variance)
    return torch.from_numpy(error)[:, None], torch.from_numpy(columns)[:, None]


def test_terms_have_their_typical_shares() -> None:
    names = ["dropout:a", "dropout:b", "leverage", "forest"]
    assert blocks_of(Dropout(), names) == [Block([0, 1], 0.1)]
    assert blocks_of(Leverage(), names) == [Block([2], 0.2)]
    assert blocks_of(ErrorForest(), names) == [Block([3], 1.0, True)]


def test_few_rows_have_the_typical_shape_and_their_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "_TYPICAL_ROWS", 1e9)
    error, columns = rows_of(5)
    fit = fit_terms(error, columns, BLOCKS, torch.ones(1, 2))
    constants = torch.cat([fit.floors[:, None], fit.coefficients], 1)[0]
    scale = (error[:, 0].square() / (SHARES[0] + columns[:, 0] @ SHARES[1:])).mean()
    torch.testing.assert_close(constants, scale * SHARES, rtol=1e-4, atol=0)


def test_many_rows_have_their_way() -> None:
    error, columns = rows_of(40_000)
    fit = fit_terms(error, columns, BLOCKS, torch.ones(1, 2))
    assert float(fit.floors) == pytest.approx(0.5, abs=0.05)
    assert float(fit.coefficients[0, 0]) == pytest.approx(2, abs=0.1)
    assert float(fit.coefficients[0, 1]) < 0.05


def test_no_other_coefficients_are_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "_TYPICAL_ROWS", 30.0)
    error, columns = rows_of(80, (1.0, 0.2, 1.0), seed=1)
    sizes = columns.mean(0)
    fit = fit_terms(error, columns, BLOCKS, sizes)
    e2 = error[:, 0].square()
    units = torch.cat([torch.ones(80, 1), columns[:, 0] / sizes], 1)

    def cost(logs: np.ndarray) -> float:
        v = units @ torch.from_numpy(logs).exp()
        off = torch.from_numpy(logs) - SHARES.log()
        off = off - SHARES @ off
        return float((e2 / v + v.log()).sum() / 2 + 30 / 4 * SHARES @ off.square())

    logs_of_fit = torch.cat([fit.floors, fit.coefficients[0] * sizes[0]]).log().numpy()
    best = minimize(cost, logs_of_fit + 0.3, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10})
    assert cost(logs_of_fit) == pytest.approx(best.fun, abs=1e-5)
    np.testing.assert_allclose(logs_of_fit, best.x, atol=5e-3)


def test_units_of_errors_and_columns_cancel() -> None:
    error, columns = rows_of(60)
    units = torch.tensor([1e-4, 1e5]).double()
    one = fit_terms(error, columns, BLOCKS)
    other = fit_terms(1e3 * error, columns * units, BLOCKS)
    torch.testing.assert_close(1e6 * one.variance(columns), other.variance(columns * units), rtol=1e-5, atol=0)


def test_a_forest_has_a_fit_without_it_beside() -> None:
    error, columns = rows_of(60)
    blocks = [BLOCKS[0], Block([1], 1.0, True)]
    fit = fit_terms(error, columns, blocks)
    assert_same_doubles(fit.without.variance(columns), fit_terms(error, columns, blocks[:1]).variance(columns))
    assert fit_terms(error, columns, BLOCKS).without is None


def guard_of(limit: float = 4.0) -> Guard:
    return Guard(("leverage", "gradients"), ((limit,), (limit,)), (0.5,), (0.0,), (9.0,))


def ratio(leverage: Tensor) -> Tensor:
    return guard_of().ratio(leverage.unbind(1))


def test_usual_rows_keep_their_variance() -> None:
    variance, mean = torch.rand(20, 1).double(), torch.zeros(20, 1)
    novelty = ratio(torch.linspace(0, 4, 20)[:, None, None].expand(20, 2, 1))
    assert_same_doubles(guard_of().grown(variance, novelty, mean, 10 * variance), variance)


def test_strange_rows_grow_in_proportion_up_to_the_ceiling() -> None:
    lev = torch.tensor([[[8.0], [0.0]], [[1.0], [40.0]], [[4e9], [4.0]], [[4e9], [4e9]]])
    mean = torch.tensor([[0.0], [0.0], [0.0], [4.0]])
    variance = torch.full((4, 1), 0.25).double()
    grown = guard_of().grown(variance, ratio(lev), mean)
    assert_same_doubles(grown[:, 0], torch.tensor([2 * 0.25 + 0.5, 10 * 0.25 + 9 * 0.5, 9.0, 25.0]).double())


def test_the_variance_does_not_jump_at_the_limit() -> None:
    """Not even where it is larger than what the targets alone say."""
    guard, variance = guard_of(), torch.full((2, 1), 40.0).double()
    grown = guard.grown(variance, torch.tensor([1.0, 1.0 + 1e-9]), torch.zeros(2, 1))
    torch.testing.assert_close(grown, variance, rtol=1e-6, atol=0)


def test_beyond_the_limit_the_larger_fit_counts() -> None:
    variance, without = torch.tensor([[[0.2], [0.2], [0.2]], [[0.6], [0.6], [0.1]]], dtype=torch.float64)
    novelty = torch.tensor([0.9, 1.001, 1.001], dtype=torch.float64)
    grown = guard_of().grown(variance, novelty, torch.zeros(3, 1), without)
    expected = torch.tensor([0.2, 1.001 * 0.6 + 0.0005, 1.001 * 0.2 + 0.0005], dtype=torch.float64)
    assert_same_doubles(grown[:, 0], expected)
