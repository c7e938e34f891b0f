"""Controls that know nothing of dropout: a constant variance, and one that is a multiple of the count plus a constant.

Errors of counts grow with the count, and so does any variance that dropout gives; what it says beyond that shows beside
`variance = a · count + b`, fitted on the validation frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from latedrop.calibration.fit_terms import fit_terms
from latedrop.studies.crowd.measures import Fit, Predicted, judge

__all__ = ["SIZE", "control", "size_control"]

Counted: TypeAlias = tuple[Tensor, Tensor]
"""Counts of the plain network and true ones, `(N,)` each."""

SIZE = "a · count + b"
"""What the control is called in tables."""


def size_control(parts: Mapping[str, Counted]) -> dict[str, Any]:
    """`a · count + b` as the variance of the count, fitted to the validation frames; measures of every part."""
    count, truth = (part.double().cpu() for part in parts["validation"])
    fitted = fit_terms((truth - count)[:, None], count.clamp_min(0)[:, None, None], [[0]])
    a, b = float(fitted.coefficients), float(fitted.floors)
    found: dict[str, Any] = {"a": a, "b": b}
    for name, (mean, target) in parts.items():
        variance = a * mean.double().cpu().clamp_min(0) + b
        found[name] = control(Predicted(mean.cpu(), variance, target.cpu(), len(variance)), intervals=True)
    return found


def control(part: Predicted, *, intervals: bool) -> dict[str, Any]:
    """The measures of a variance that is taken as it is."""
    measures = judge(part, Fit(1.0, 1.0, 1.0, 0.0, float(torch.finfo(torch.float64).tiny)), intervals=intervals)
    kept = {key: measures[key] for key in ("rmse", "mae", "nll_ideal")}
    kept |= {"nll": measures["nll_unscaled"], "ma": measures["ma_unscaled"]}
    kept["curve"] = measures["curves"]["unscaled"]
    kept["blocks"] = {"mae": measures["blocks"]["mae"], "nll": measures["blocks"]["nll_unscaled"]}
    if intervals:
        kept |= {key: measures[key]["unscaled"] for key in ("coverage", "width")}
    return kept
