"""Metrics of ranking against scipy, scikit-learn, and loops that follow their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import auc, roc_auc_score

from latedrop import metrics
from latedrop.errors import DataError
from rounding import assert_same_doubles, assert_same_up_to_rounding


def made(rows: int = 300, *, ties: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    variance = rng.integers(1, 6, rows).astype(float) if ties else rng.uniform(0.1, 5, rows)
    mean = rng.normal(size=rows)
    return mean, variance, mean + np.sqrt(variance) * rng.normal(size=rows)


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_scipys(ties: bool) -> None:
    mean, variance, target = made(ties=ties)
    expected = stats.spearmanr(variance, np.abs(target - mean)).statistic
    assert_same_doubles(float(metrics.rank_correlation(mean, variance, target)), expected)


def test_a_constant_ranks_nothing() -> None:
    mean, variance, target = made(ties=False)
    assert float(metrics.rank_correlation(mean, np.ones_like(variance), target)) == 0
    whole = float(metrics.mae(mean, None, target))
    assert_same_doubles(float(metrics.aurc(mean, np.ones_like(variance), target)), whole)


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_is_scikit_learns(ties: bool) -> None:
    mean, variance, target = made(ties=ties)
    strange = np.abs(target - mean) > 1
    # The result is a float32.
    assert_same_up_to_rounding(float(metrics.auroc(variance, strange)), roc_auc_score(strange, variance), terms=1)


def test_aurc_is_the_area_under_risk_and_coverage() -> None:
    mean, variance, target = made(ties=False)
    error, order = np.abs(target - mean), np.argsort(variance)
    risks = [error[order[: i + 1]].mean() for i in range(len(error))]
    assert_same_doubles(float(metrics.aurc(mean, variance, target)), np.mean(risks))
    coverages = np.arange(1, len(error) + 1) / len(error)
    np.testing.assert_allclose(float(metrics.aurc(mean, variance, target)), auc(coverages, risks), rtol=0.02)


def test_aurc_of_ties_is_the_mean_over_their_orders() -> None:
    rng = np.random.default_rng(0)
    mean, variance, target = made(40, ties=True)
    error, areas = np.abs(target - mean), []
    for _ in range(4000):
        order = np.lexsort((rng.random(40), variance))
        areas.append(np.mean(np.cumsum(error[order]) / np.arange(1, 41)))
    standard_error = np.std(areas) / len(areas) ** 0.5
    assert abs(float(metrics.aurc(mean, variance, target)) - np.mean(areas)) < 4 * standard_error


def test_ause_is_the_area_between_the_sparsification_curves() -> None:
    mean, variance, target = made(ties=False)
    error = np.abs(target - mean)

    def curve(score: np.ndarray) -> np.ndarray:
        order = np.argsort(-score)
        return np.array([error[order[removed:]].mean() for removed in range(len(error))])

    expected = (curve(variance) - curve(error)).mean() / error.mean()
    assert_same_doubles(float(metrics.ause(mean, variance, target)), expected)
    assert float(metrics.ause(mean, error**2, target)) == 0


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(DataError, match="expected errors to rank"):
        metrics.ause(torch.zeros(3), torch.ones(3), torch.zeros(3))
    with pytest.raises(DataError, match="entries of both kinds; found 2 positive and 0 others"):
        metrics.auroc([0.1, 0.2], [True, True])
    with pytest.raises(DataError, match="one bool for each of 2 scores"):
        metrics.auroc([0.1, 0.2], [0, 1])
    with pytest.raises(DataError, match="finite scores"):
        metrics.auroc([0.1, float("nan")], [False, True])
