"""A corrected mean: what can be predicted of the validation residuals is added to the prediction.

First a step of the linearised network towards the validation rows: ridge regression of the residuals on the mask
gradients in the metric of the reference rows, which is the mean of a Gaussian process whose variance is the leverage.
Its penalty has the smallest leave-one-out error. Then boosted trees on what is left. Rows count by the inverse of their
variance.

The correction of a validation row comes from rows of other folds. It is multiplied by `a`, the coefficient of the
regression of residuals on such corrections, between 0 and 1, and is left out unless it lowers the weighted squared
error by more than two standard errors. Where rows are unlike all reference rows it fades, divided by their novelty.

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
_TREE_ROWS = 4_000  # drawn for each tree at most
_FOLDS = 5
_Floats: TypeAlias = npt.NDArray[np.float64]
_Bools: TypeAlias = npt.NDArray[np.bool_]


@record
@dataclass(frozen=True, eq=False)
class Correction:
    """Adds to the prediction `directions @ slope + trees(inputs)`.

    Attributes:
        slopes: `(K, D)`; 0 for outputs that are not corrected.
        trees: one for each output that is corrected; None for others.
        gains: for each output the share of the weighted mean squared error that it removes, on rows of other folds.
        gain_errors: standard errors of that.
    """

    slopes: StoredTensor = field(repr=False)
    trees: Annotated[tuple[Trees | None, ...], Limits(1)]
    gains: Annotated[tuple[float, ...], Limits(1)]
    gain_errors: tuple[Annotated[float, Limits(0)], ...]

    @property
    def used(self) -> bool:
        """Whether any output is corrected."""
        return any(trees is not None for trees in self.trees)

    def values(self, inputs: Tensor, directions: Tensor) -> Tensor:
        """Return what is added to rows, `(n, K)`, from the inputs of trees and mask gradients in their metric."""
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
        said = [f"{100 * g:.0f} % (± {100 * e:.0f}){'' if t is not None else ', so not used'}" for g, e, t in each]
        return f"on rows of other folds squared errors are smaller by {'; '.join(said)}"


def fit_correction(
    inputs: Tensor, directions: Tensor, error: Tensor, variance: Tensor, weights: Tensor | None = None
) -> tuple[Correction, Tensor]:
    """Return the correction, and what it adds to the rows that it learned from, out of fold `(n, K)`.

    Args:
        inputs: `(n, F)`, what the error forest looks at.
        directions: `(K, n, D)`, mask gradients in the metric of the reference rows.
        error: `(n, K)`, target minus prediction.
        variance: `(n, K)`, of the errors, as fitted without a correction; rows count by its inverse.
        weights: `(n,)`, what else each row counts.
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
        one = _Residuals(x, directions[k].double().cpu().numpy(), residual[:, k], counts / spread[:, k])
        raw = np.zeros(count)
        for number in range(_FOLDS):
            out = fold == number
            slope, grown = one.fit(~out)
            raw[out] = one.phi[out] @ slope + grown.sums(torch.from_numpy(x[out]).float())[:, 0].numpy()
        factor, gain, deviation = one.worth(raw)
        factor = factor if gain > _ERRORS * deviation else 0.0
        added[:, k] = factor * raw
        if factor:
            slopes[k], grown = one.fit(np.ones(count, bool), factor)
        trees.append(grown if factor else None)
        gains.append(gain)
        errors.append(deviation)
    correction = Correction(torch.from_numpy(slopes), tuple(trees), tuple(gains), tuple(errors))
    return correction, torch.from_numpy(added)


@dataclass(frozen=True)
class _Residuals:
    """The residuals `(n,)` of one output, with what may predict them and what each counts."""

    x: npt.NDArray[Any]
    phi: _Floats
    residual: _Floats
    counts: _Floats

    def fit(self, rows: _Bools, factor: float = 1.0) -> tuple[_Floats, Trees]:
        """Return the slope `(D,)` and the trees of some rows, multiplied by a factor."""
        slope, left_out = _ridge(self.phi[rows], self.residual[rows], self.counts[rows])
        return factor * slope, _boosted(self.x[rows], self.residual[rows] - left_out, self.counts[rows], factor)

    def worth(self, raw: _Floats) -> tuple[float, float, float]:
        """Return the best factor, and the share of the squared error that it then removes, with its standard error."""
        weight = self.counts / self.counts.mean()
        size = float(np.mean(weight * raw**2))
        factor = float(np.clip(np.mean(weight * raw * self.residual) / size, 0, 1)) if size > 0 else 0.0
        better = weight * (self.residual**2 - (self.residual - factor * raw) ** 2)
        whole = max(float(np.mean(weight * self.residual**2)), float(np.finfo(np.float64).tiny))
        return factor, float(better.mean()) / whole, float(better.std()) / np.sqrt(len(raw)) / whole


def _ridge(phi: _Floats, target: _Floats, weight: _Floats) -> tuple[_Floats, _Floats]:
    """Return the slope `(D,)` whose penalty has the smallest leave-one-out error, and its leave-one-out predictions."""
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
