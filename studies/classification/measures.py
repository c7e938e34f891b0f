"""How good probabilities are on one set of rows, and how well a score tells strange rows."""

from __future__ import annotations

import torch
from torch import Tensor

from latedrop.metrics import auroc
from latedrop.metrics.classes import accuracy, brier, cross_entropy, ece, fpr_at, selective_risk

__all__ = ["MEASURES", "scores", "told_apart"]

MEASURES = ("nll", "brier", "ece", "accuracy", "aurc")


def scores(logs: Tensor, labels: Tensor) -> dict[str, float]:
    """NLL in nats, Brier score, calibration error (15 bins of equal mass), accuracy, area under risk-coverage.

    Args:
        logs: log probabilities `(N, K)`.
        labels: `(N,)`.
    """
    p = logs.exp()
    wrong = p.argmax(1) != labels
    found = (
        cross_entropy(p.clamp_min(1e-300), labels),
        brier(p, labels),
        ece(p, labels, mass=True),
        accuracy(p, labels),
        selective_risk(-p.amax(1), wrong),
    )
    return dict(zip(MEASURES, map(float, found), strict=True))


def told_apart(strange: Tensor, usual: Tensor) -> tuple[float, float]:
    """AUROC of strange against usual rows by a score, and the share of usual rows above what 95 % of strange ones are.

    >>> told_apart(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]))
    (1.0, 0.0)
    """
    positive = torch.arange(len(strange) + len(usual)) < len(strange)
    return float(auroc(torch.cat([strange, usual]), positive)), float(fpr_at(strange, usual))
