"""Compute quantiles from a mean and a standard deviation: Gaussian, isotonic or split-conformal.

Each kind has a standardised quantile function `z(q)`; the quantile of a prediction is `mean + z(q) · std`, and the
central interval at a level `a` runs from `q = (1 - a)/2` to `q = (1 + a)/2`.

- Gaussian: `z(q) = Phi^{-1}(q)`.
- Isotonic (Kuleshov, Fenner, Ermon 2018): `z(q) = Phi^{-1}(R^{-1}(q))`, where `R(p)` is the observed frequency of
  targets below the predicted p-quantile, fitted by isotonic regression.
- Split-conformal: `z((1 ± a)/2) = ± s`, where `s` is the `ceil((n + 1) a)`-th smallest of the n scores
  `|target - mean| / std` on rows that are not used for anything else. The target of a new exchangeable row is in its
  interval with probability at least `a` (Vovk, Gammerman, Shafer 2005; Lei et al. 2018).

Isotonic and conformal intervals store the scale and floor that they were fitted with, and are valid only for these.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop.metrics.entries import by_output
from latedrop.quantiles import ConformalScores, IsotonicKnots
from latedrop.records import Tagged

__all__ = ["Intervals", "conformal", "isotonic", "residuals"]

Intervals: TypeAlias = Annotated[IsotonicKnots | ConformalScores, Tagged()] | None
"""Fitted quantile function; None means Gaussian or Student t."""
_KNOTS = 200


def isotonic(residuals: list[Tensor], scale: tuple[float, ...], floor: tuple[float, ...]) -> IsotonicKnots:
    """Fit isotonic quantiles to standardised residuals `(target - mean) / std`, one flat tensor per output."""
    from sklearn.isotonic import IsotonicRegression

    all_knots, all_observed = [], []
    for residual in _finite(residuals):
        z = np.sort(residual.double().cpu().numpy())
        rank = np.arange(1, len(z) + 1) / (len(z) + 1)
        # Fitted in z, not in p: float64 rounds p to 0 or 1 beyond 8 standard deviations.
        model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(z, rank)
        knots = np.unique(np.quantile(z, np.linspace(0, 1, _KNOTS + 2)[1:-1]))
        all_knots.append(tuple(knots.tolist()))
        all_observed.append(tuple(model.predict(knots).tolist()))
    return IsotonicKnots(tuple(all_knots), tuple(all_observed), scale, floor)


def conformal(residuals: list[Tensor], scale: tuple[float, ...], floor: tuple[float, ...]) -> ConformalScores:
    """Sort the conformal scores `|z|` of standardised residuals, one flat tensor per output."""
    scores = (z.double().abs().sort().values for z in _finite(residuals))
    return ConformalScores(tuple(tuple(values.tolist()) for values in scores), scale, floor)


def residuals(mean: Tensor, variance: Tensor, target: Tensor, per_output: bool) -> list[Tensor]:
    """Return standardised residuals `(target - mean) / std`, flat: one tensor, or one per index of axis 1."""
    z = (target.to(mean) - mean) / variance.sqrt()
    return [column.flatten() for column in by_output(z, per_output)]


def _finite(residuals: list[Tensor]) -> list[Tensor]:
    """Return the residuals; raise `DataError` if one is NaN or inf."""
    bad = sum(int((~torch.isfinite(z)).sum()) for z in residuals)
    if bad:
        raise DataError(
            f"expected finite standardised residuals; found {bad} NaN or inf, as the predicted variance is 0. "
            "Use more draws or floor=True."
        )
    return residuals
