"""Metrics of classes against outside references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latedrop.errors import DataError
from latedrop.metrics import classes as metrics
from rounding import assert_same_doubles, rounding

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def _case(n: int = 400, k: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(n, k, generator=generator, dtype=torch.float64), 1)
    return p, torch.multinomial(p, 1, generator=generator)[:, 0]


@pytest.mark.parametrize("k", [2, 5])
def test_likelihood_accuracy_and_brier(k: int) -> None:
    p, y = _case(k=k)
    assert_same_doubles(float(metrics.cross_entropy(p, y)), sklearn_metrics.log_loss(y, p))
    assert float(metrics.accuracy(p, y)) == pytest.approx(sklearn_metrics.accuracy_score(y, p.argmax(1)))
    if k == 2:
        expected = 2 * sklearn_metrics.brier_score_loss(y, p[:, 1])  # of one class: half of the sum over both
        assert float(metrics.brier(p, y)) == pytest.approx(expected)


@pytest.mark.parametrize("norm", ["l1"])
def test_calibration_error(norm: str) -> None:
    torchmetrics = pytest.importorskip("torchmetrics.functional.classification")
    p, y = _case()
    expected = torchmetrics.multiclass_calibration_error(p, y, num_classes=5, n_bins=15, norm=norm)
    assert float(metrics.ece(p, y)) == pytest.approx(float(expected), rel=rounding(terms=1))


def test_bins_of_equal_mass_by_hand() -> None:
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 0])
    # two bins of two rows: confidences .65 and .85, accuracies 1 and .5
    assert float(metrics.ece(p, y, bins=2, mass=True)) == pytest.approx((0.35 + 0.35) / 2)
    confidence, share, count = metrics.reliability(p, y, bins=2, mass=True)
    assert confidence.tolist() == pytest.approx([0.65, 0.85])
    assert share.tolist() == [1.0, 0.5]
    assert count.tolist() == [2.0, 2.0]


def test_area_under_risk_coverage_is_the_mean_risk() -> None:
    p, y = _case()
    doubt, wrong = 1 - p.amax(1), (p.argmax(1) != y).double()
    order = np.argsort(doubt.numpy())
    expected = np.mean(np.cumsum(wrong.numpy()[order]) / np.arange(1, len(order) + 1))
    assert float(metrics.selective_risk(doubt, wrong)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        ([[0.5, 0.6]], [0], "sum to 1"),
        ([[0.5, 0.5]], [2], "whole numbers from 0 to 1"),
        ([[0.5, 0.5]], [0.0], "whole numbers"),
        ([0.5, 0.5], [0, 1], r"probabilities \(N, K\)"),
        ([[2.0, -1.0]], [0], "sum to 1"),
    ],
)
def test_bad_input(p: list, y: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        metrics.accuracy(p, y)
