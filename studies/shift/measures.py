"""How good a variance is on shifted rows, and how it differs from that of rows inside.

With `e` the errors and `v` the variances of one cut, the growth from the rows inside to the shifted rows is

    error growth = log( mean e^2 shifted / mean e^2 inside ),   variance growth = log( mean v shifted / mean v inside ).

A variance that knows of the shift grows as the squared error does: variance growth equals error growth. All measures
are in the standardised unit of the cut's training targets, so that cuts and sets can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latedrop.metrics import auroc
from studies.uci.measures import Predicted, scores

__all__ = ["MEASURES", "shift_scores"]

_SCORES = ("coverage", "nll", "crps", "width", "rmse", "ranking")
MEASURES = (*_SCORES, "auroc", "error_growth", "variance_growth", *(f"inside_{name}" for name in _SCORES))


def shift_scores(shifted: Predicted, inside: Predicted) -> dict[str, float]:
    """The measures of one method on one cut, whose rows are `(1, n)`."""
    found = {name: float(values) for name, values in scores(shifted).items()}
    usual = {name: float(values) for name, values in scores(inside).items()}
    strange = torch.zeros(shifted.mean.shape[1] + inside.mean.shape[1], dtype=torch.bool)
    strange[: shifted.mean.shape[1]] = True
    variance = torch.cat([shifted.variance[0], inside.variance[0]])
    return {
        **{name: found[name] for name in _SCORES},
        "auroc": float(auroc(variance, strange.to(variance.device))),
        "error_growth": _growth(*((part.target - part.mean).square() for part in (shifted, inside))),
        "variance_growth": _growth(shifted.variance, inside.variance),
        **{f"inside_{name}": usual[name] for name in _SCORES},
    }


def _growth(shifted: Tensor, inside: Tensor) -> float:
    return float((shifted.mean() / inside.mean()).log())
