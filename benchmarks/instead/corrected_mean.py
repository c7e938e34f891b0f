"""A corrected mean: what can be predicted of the validation residuals is added to the prediction.

First a step of the linearised network towards the validation rows: ridge regression of the residuals on the mask
gradients in the metric of the reference rows, which is the mean of a Gaussian process whose variance is the leverage.
Its penalty has the smallest leave-one-out error. Then boosted trees on what is left. Rows count by the inverse of their
variance.

The correction of a validation row comes from rows of other folds. It is multiplied by `a`, the coefficient of the
regression of residuals on such corrections, between 0 and 1, and is left out unless it lowers the weighted squared
error by more than two standard errors. Where rows are unlike all validation rows it fades, divided by their novelty.

References: Friedman (2001), boosting; Qiu et al. (2020), residuals as a second model's target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.instead.trees import Floats, Trees, require_sklearn
from latedrop.errors import DataError

__all__ = ["LEAST_ROWS", "Correction", "fit_correction"]

LEAST_ROWS = 60
ROUNDS, LEAVES, RATE = 80, 8, 0.05
STANDARD_ERRORS = 2.0
"""By which a correction has to be better."""
PENALTIES = tuple(10.0 ** (i / 2) for i in range(0, 9))
_TREE_ROWS = 4_000  # drawn for each tree at most
_FOLDS = 5


@dataclass(frozen=True)
class Correction:
    """What is added to the prediction: `factor · (directions @ slope + trees(inputs))`.

    Attributes:
        slopes: `(K, D)`, already multiplied by the factor.
        trees: one for each output that is corrected; None for others.
        factors: `(K,)`, 0 for outputs that are not corrected.
        gain: `(K,)`, share of the weighted mean squared error that it removes, on rows of other folds.
        gain_error: `(K,)`, standard error of that.
    """

    slopes: Floats
    trees: tuple[Trees | None, ...]
    factors: Floats
    gain: Floats
    gain_error: Floats

    @property
    def used(self) -> bool:
        """Whether any output is corrected."""
        return bool(self.factors.any())

    def predict(self, inputs: npt.ArrayLike, directions: Floats, novelty: npt.ArrayLike | None = None) -> Floats:
        """Return what is to be added, `(n, K)`.

        Args:
            inputs: `(n, F)`, as those of the error model.
            directions: `(n, K, D)`, mask gradients in the metric of the reference rows.
            novelty: `(n,)`; None where the correction shall not fade.
        """
        rows = np.asarray(inputs)
        found: Floats = np.einsum("nkd,kd->nk", directions, self.slopes)
        for k, (trees, factor) in enumerate(zip(self.trees, self.factors, strict=True)):
            if trees is not None:
                found[:, k] += factor * trees.predict(rows)[:, 0]
        if novelty is not None:
            found /= np.maximum(1, np.asarray(novelty, np.float64))[:, None]
        return found

    def state(self) -> dict[str, Any]:
        """Return what a record has to hold."""
        trees = [None if each is None else each.state() for each in self.trees]
        return {**vars(self), "trees": trees}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Correction:
        """Return the inverse of `state`."""
        names = ("slopes", "factors", "gain", "gain_error")
        arrays = {name: np.asarray(state[name], np.float64) for name in names}
        return cls(trees=tuple(None if each is None else Trees.from_state(each) for each in state["trees"]), **arrays)


def fit_correction(
    inputs: Floats,
    directions: Floats,
    error: npt.ArrayLike,
    variance: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    seed: int = 0,
    linear: bool = True,
    boosted: bool = True,
) -> tuple[Correction, Floats]:
    """Return the correction, and what it adds to the rows that it learned from, out of fold `(n, K)`.

    Args:
        inputs: `(n, F)`, as those of the error model.
        directions: `(n, K, D)`, mask gradients in the metric of the reference rows, from `Leverage.directions`.
        error: `(n, K)`, target minus prediction.
        variance: `(n, K)`, of the errors, as fitted without a correction; rows count by its inverse.
        weights: `(n,)`, what else each row counts.
        seed: of the folds, and of the rows that trees are shown.
        linear: step of the linearised network.
        boosted: trees.
    """
    require_sklearn("the corrected mean")
    residual, spread = np.asarray(error, np.float64), np.asarray(variance, np.float64)
    count, outputs = residual.shape
    if count < LEAST_ROWS:
        raise DataError(
            f"expected at least {LEAST_ROWS} validation rows for a corrected mean; found {count}. Pass more rows, or "
            "leave mean='corrected' out."
        )
    counts = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    fold = np.random.default_rng(seed).permutation(count) % _FOLDS
    added = np.zeros_like(residual)
    slopes = np.zeros((outputs, directions.shape[2]))
    trees: list[Trees | None] = []
    figures = []

    def fit(rows: npt.NDArray[np.bool_], k: int) -> tuple[Floats, Trees | None]:
        phi, rest, each = directions[rows, k], residual[rows, k], weight[rows]
        slope = np.zeros(phi.shape[1])
        if linear:
            slope, left = _ridge(phi, rest, each)
            rest = rest - left
        return slope, _boosted(inputs[rows], rest, each, seed) if boosted else None

    for k in range(outputs):
        target = residual[:, k]
        weight = counts / spread[:, k]
        weight = weight / weight.mean()
        raw = np.zeros(count)
        for number in range(_FOLDS):
            out = fold == number
            slope, grown = fit(~out, k)
            raw[out] = directions[out, k] @ slope + (0 if grown is None else grown.predict(inputs[out])[:, 0])
        size = np.average(raw**2, weights=weight)
        factor = float(np.clip(np.average(raw * target, weights=weight) / size, 0, 1)) if size > 0 else 0.0
        better = weight * (target**2 - (target - factor * raw) ** 2)
        gain, deviation = better.mean(), better.std() / np.sqrt(count)
        factor = factor if gain > STANDARD_ERRORS * deviation else 0.0
        added[:, k] = factor * raw
        slope, grown = fit(np.ones(count, bool), k) if factor else (slopes[k], None)
        slopes[k] = factor * slope
        trees.append(grown)
        whole = max(np.average(target**2, weights=weight), np.finfo(np.float64).tiny)
        figures.append((factor, gain / whole, deviation / whole))
    factors, gains, errors = np.array(figures).T
    return Correction(slopes, tuple(trees), factors, gains, errors), added


def _ridge(phi: Floats, target: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return the slope `(D,)` whose penalty has the smallest leave-one-out error, and its leave-one-out predictions."""
    root = np.sqrt(weight)
    rows, wanted = phi * root[:, None], target * root
    values, axes = np.linalg.eigh(rows.T @ rows)
    values, turned = np.maximum(values, 0), rows @ axes
    moment = turned.T @ wanted
    best, lowest = (np.zeros(phi.shape[1]), np.zeros(len(target))), np.mean(wanted**2)
    for penalty in PENALTIES:
        coefficients = moment / (values + penalty)
        own = np.minimum(np.square(turned) @ (1 / (values + penalty)), 1 - 1e-9)
        left = (wanted - turned @ coefficients) / (1 - own)
        if (cost := np.mean(left**2)) < lowest:
            lowest, best = cost, (axes @ coefficients, target - left / root)
    return best


def _boosted(inputs: Floats, target: Floats, counts: Floats, seed: int) -> Trees:
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(
        n_estimators=ROUNDS,
        max_leaf_nodes=LEAVES,
        max_depth=None,
        learning_rate=RATE,
        min_samples_leaf=max(5, len(target) // 200),
        subsample=min(0.7, _TREE_ROWS / len(target)),
        max_features=min(1.0, 16 / inputs.shape[1]),
        init="zero",
        random_state=seed,
    ).fit(inputs, target, counts)
    trees = [each.tree_ for each in model.estimators_[:, 0]]
    return Trees.joined(trees, RATE, np.zeros(1), inputs.shape[1])
