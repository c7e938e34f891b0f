"""Correct the mean: predict the validation residuals, and add this prediction to the model's output.

The first step is linear: ridge regression of the residuals on the mask gradients, in the metric of the reference rows.
Its answer is the mean of a Gaussian process whose variance is the leverage. The penalty is the one with the smallest
leave-one-out error. The second step fits boosted trees to the remaining residuals. Both weight rows by 1 / variance.

Corrections are cross-fitted: each validation row gets one from the other folds. All are multiplied by a factor in
[0, 1], the coefficient of a regression of residuals on cross-fitted corrections. The correction is used only if it
lowers the weighted squared error by more than two standard errors. For rows unlike the reference rows it is divided by
their novelty.

References: Friedman (2001), boosting; Qiu et al. (2020), residuals as a second model's target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop.records import Limits, match, record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.forest import LEAST_ROWS, Trees

__all__ = ["Correction", "fit_correction"]

_ROUNDS, _LEAVES, _RATE = 80, 8, 0.05
_ERRORS = 2.0  # standard errors by which a correction has to be better
_PENALTIES = tuple(10.0 ** (i / 2) for i in range(9))
_TREE_ROWS = 4_000  # maximum subsample of a tree
_FOLDS = 5
_Floats: TypeAlias = npt.NDArray[np.float64]


@record
@dataclass(frozen=True, eq=False)
class Correction:
    """Add `directions @ slope + trees(inputs)` to the prediction.

    Attributes:
        slopes: coefficients of the mask gradients, `(K, D)`; 0 for outputs that are not corrected.
        trees: boosted trees of each corrected output; None for the others.
        gains: cross-fitted share of the weighted mean squared error that the correction removes, for each output.
        gain_errors: standard errors of `gains`.
    """

    slopes: StoredTensor = field(repr=False)
    trees: Annotated[tuple[Trees | None, ...], Limits(1)]
    gains: Annotated[tuple[float, ...], Limits(1)]
    gain_errors: tuple[Annotated[float, Limits(0)], ...]

    @property
    def used(self) -> bool:
        """Return True if any output is corrected."""
        return any(trees is not None for trees in self.trees)

    def values(self, inputs: Tensor, directions: Tensor) -> Tensor:
        """Return the correction of rows, `(n, K)`, from tree inputs `(n, F)` and scaled mask gradients `(K, n, D)`."""
        total = torch.einsum("knd,kd->nk", directions, self.slopes.to(directions))
        columns = [0 * total[:, 0] if trees is None else trees.sums(inputs)[:, 0] for trees in self.trees]
        return total + torch.stack(columns, 1)

    def checked(self) -> Correction:
        """Check lengths against each other after reading."""
        outputs = len(self.trees)
        match(self.slopes.dim() == 2 and len(self.slopes) == outputs, "slopes", f"{outputs} rows", self.slopes.shape)
        match(len(self.gains) == outputs, "gains", f"{outputs} numbers, as trees", self.gains)
        match(len(self.gain_errors) == outputs, "gain_errors", f"{outputs} numbers, as trees", self.gain_errors)
        return self

    def __str__(self) -> str:
        each = zip(self.gains, self.gain_errors, self.trees, strict=True)
        gains = [f"{100 * g:.0f} % (± {100 * e:.0f}){'' if t is not None else ', so not used'}" for g, e, t in each]
        return f"on rows of other folds squared errors are smaller by {'; '.join(gains)}"


def fit_correction(
    inputs: Tensor, directions: Tensor, error: Tensor, variance: Tensor, weights: Tensor | None = None
) -> tuple[Correction, Tensor]:
    """Fit a correction; return it and its cross-fitted values on the same rows, `(n, K)`.

    Args:
        inputs: inputs of the error forest, `(n, F)`.
        directions: mask gradients in the metric of the reference rows, `(K, n, D)`.
        error: target minus prediction, `(n, K)`.
        variance: error variance fitted without a correction, `(n, K)`; rows are weighted by its inverse.
        weights: row weights of the user, `(n,)`, which multiply these.
    """
    count, outputs = error.shape
    if count < LEAST_ROWS:
        raise DataError(
            f"expected at least {LEAST_ROWS} validation rows for a corrected mean; found {count}. Pass more rows, or "
            "leave mean='corrected' out."
        )
    x, residual, spread = (part.double().cpu().numpy() for part in (inputs, error, variance))
    counts = np.ones(count) if weights is None else weights.double().cpu().numpy()
    fold = np.random.default_rng(0).permutation(count) % _FOLDS
    added, slopes = np.zeros_like(residual), np.zeros((outputs, directions.shape[2]))
    trees: list[Trees | None] = []
    gains, errors = [], []
    for k in range(outputs):
        phi, y, weight = directions[k].double().cpu().numpy(), residual[:, k], counts / spread[:, k]
        raw = np.zeros(count)
        for number in range(_FOLDS):
            out = fold == number
            slope, grown = _fit(x[~out], phi[~out], y[~out], weight[~out])
            raw[out] = phi[out] @ slope + grown.sums(torch.from_numpy(x[out]).float())[:, 0].numpy()
        factor, gain, deviation = _worth(raw, y, weight)
        factor = factor if gain > _ERRORS * deviation else 0.0
        added[:, k] = factor * raw
        if factor:
            slopes[k], grown = _fit(x, phi, y, weight, factor)
        trees.append(grown if factor else None)
        gains.append(gain)
        errors.append(deviation)
    correction = Correction(torch.from_numpy(slopes), tuple(trees), tuple(gains), tuple(errors))
    return correction, torch.from_numpy(added)


def _fit(
    x: npt.NDArray[Any], phi: _Floats, residual: _Floats, counts: _Floats, factor: float = 1.0
) -> tuple[_Floats, Trees]:
    """Fit slope `(D,)` and trees to residuals of one output, and multiply both by `factor`."""
    slope, left_out = _ridge(phi, residual, counts)
    return factor * slope, _boosted(x, residual - left_out, counts, factor)


def _worth(raw: _Floats, residual: _Floats, counts: _Floats) -> tuple[float, float, float]:
    """Return the best factor for corrections `raw`, the share of squared error removed, and its standard error."""
    weight = counts / counts.mean()
    size = float(np.mean(weight * raw**2))
    factor = float(np.clip(np.mean(weight * raw * residual) / size, 0, 1)) if size > 0 else 0.0
    better = weight * (residual**2 - (residual - factor * raw) ** 2)
    whole = max(float(np.mean(weight * residual**2)), float(np.finfo(np.float64).tiny))
    return factor, float(better.mean()) / whole, float(better.std()) / np.sqrt(len(raw)) / whole


def _ridge(phi: _Floats, target: _Floats, weight: _Floats) -> tuple[_Floats, _Floats]:
    """Fit ridge regression with the best leave-one-out penalty; return slope `(D,)` and leave-one-out predictions."""
    weight = weight / weight.mean()
    root = np.sqrt(weight)
    rows, wanted = phi * root[:, None], target * root
    values, axes = np.linalg.eigh(rows.T @ rows)
    values, turned = np.maximum(values, 0), rows @ axes
    moment = turned.T @ wanted
    best, lowest = (np.zeros(phi.shape[1]), np.zeros(len(target))), np.mean(wanted**2)
    for penalty in _PENALTIES:
        coefficients = moment / (values + penalty)
        leverage = np.minimum(np.square(turned) @ (1 / (values + penalty)), 1 - 1e-9)
        left = (wanted - turned @ coefficients) / (1 - leverage)
        if (cost := np.mean(left**2)) < lowest:
            lowest, best = cost, (axes @ coefficients, target - left / np.where(root > 0, root, 1))
    return best


def _boosted(inputs: npt.NDArray[Any], target: _Floats, counts: _Floats, factor: float) -> Trees:
    """Fit boosted trees to weighted targets, and multiply their values by `factor`."""
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(
        n_estimators=_ROUNDS,
        max_leaf_nodes=_LEAVES,
        max_depth=None,
        learning_rate=_RATE,
        min_samples_leaf=max(5, len(target) // 200),
        subsample=min(0.7, _TREE_ROWS / len(target)),
        max_features=min(1.0, 16 / inputs.shape[1]),
        init="zero",
        random_state=0,
    ).fit(inputs, target, counts / counts.mean())
    return Trees.joined([each.tree_ for each in model.estimators_[:, 0]], factor * _RATE, inputs.shape[1])
