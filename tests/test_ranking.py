"""Metrics of ranking against scipy, scikit-learn, and loops that follow their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

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


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_is_scikit_learns(ties: bool) -> None:
    mean, variance, target = made(ties=ties)
    strange = np.abs(target - mean) > 1
    # The result is a float32.
    assert_same_up_to_rounding(float(metrics.auroc(variance, strange)), roc_auc_score(strange, variance), terms=1)


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(DataError, match="entries of both kinds; found 2 positive and 0 others"):
        metrics.auroc([0.1, 0.2], [True, True])
    with pytest.raises(DataError, match="one bool for each of 2 scores"):
        metrics.auroc([0.1, 0.2], [0, 1])
    with pytest.raises(DataError, match="finite scores"):
        metrics.auroc([0.1, float("nan")], [False, True])
