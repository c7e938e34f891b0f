"""A corrected mean: what boosted trees can predict of the validation residuals is added to the prediction.

The correction of a validation row comes from trees of other folds. It is multiplied by `a`, the coefficient of the
regression of residuals on such corrections, between 0 and 1, and it is left out unless it lowers the squared error by
more than two standard errors. Where rows are unlike all validation rows it fades, divided by their novelty.

References: Friedman (2001), boosting; Qiu et al. (2020), residuals as a second model's target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop.calibration.trees import Floats, Trees, require_sklearn
from latedrop.errors import DataError

__all__ = ["LEAST_ROWS", "Correction", "fit_correction"]

LEAST_ROWS = 60
ROUNDS, LEAVES, RATE = 80, 8, 0.05
_TREE_ROWS = 4_000  # drawn for each tree at most
_MOST_ROWS = 20_000
_FOLDS = 5
_ERRORS = 2.0  # standard errors by which a correction has to be better


@dataclass(frozen=True)
class Correction:
    """What is added to the prediction.

    Attributes:
        trees: one for each output that is corrected; None for others.
        factors: `(K,)`, 0 for outputs that are not corrected.
        gain: `(K,)`, share of the mean squared error that it removes, on rows of other folds.
        gain_error: `(K,)`, standard error of that.
    """

    trees: tuple[Trees | None, ...]
    factors: Floats
    gain: Floats
    gain_error: Floats

    @property
    def used(self) -> bool:
        """Whether any output is corrected."""
        return bool(self.factors.any())

    def predict(self, inputs: npt.ArrayLike, novelty: npt.ArrayLike | None = None) -> Floats:
        """Return what is to be added, `(n, K)`, from the error model's inputs and the novelty `(n,)` of the rows."""
        rows = np.asarray(inputs)
        found = np.zeros((len(rows), len(self.factors)))
        for k, (trees, factor) in enumerate(zip(self.trees, self.factors, strict=True)):
            if trees is not None:
                found[:, k] = factor * trees.predict(rows)[:, 0]
        if novelty is not None:
            found /= np.maximum(1, np.asarray(novelty, np.float64))[:, None]
        return found

    def state(self) -> dict[str, Any]:
        """Return what a record has to hold."""
        trees = [None if each is None else each.state() for each in self.trees]
        return {"trees": trees, "factors": self.factors, "gain": self.gain, "gain_error": self.gain_error}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Correction:
        """Return the inverse of `state`."""
        trees = tuple(None if each is None else Trees.from_state(each) for each in state["trees"])
        return cls(trees, *(np.asarray(state[name], np.float64) for name in ("factors", "gain", "gain_error")))


def fit_correction(
    inputs: Floats, error: npt.ArrayLike, weights: npt.ArrayLike | None = None, *, seed: int = 0
) -> tuple[Correction, Floats]:
    """Return the correction, and what it adds to the rows that it learned from, out of fold `(n, K)`.

    Args:
        inputs: `(n, D)`, as those of the error model.
        error: `(n, K)`, target minus prediction.
        weights: `(n,)`, what each row counts.
        seed: of the folds, and of the rows that trees are shown.
    """
    require_sklearn("the corrected mean")
    residual = np.asarray(error, np.float64)
    residual = residual[:, None] if residual.ndim == 1 else residual
    count = len(residual)
    if count < LEAST_ROWS:
        raise DataError(
            f"expected at least {LEAST_ROWS} validation rows for a corrected mean; found {count}. Pass more rows, or "
            "leave mean='corrected' out."
        )
    counts = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    fold = np.random.default_rng(seed).permutation(count) % _FOLDS
    added = np.zeros_like(residual)
    trees: list[Trees | None] = []
    figures = []
    for k, target in enumerate(residual.T):
        raw = np.zeros(count)
        for number in range(_FOLDS):
            out = fold == number
            raw[out] = _boosted(inputs[~out], target[~out], counts[~out], seed).predict(inputs[out])[:, 0]
        size = np.average(raw**2, weights=counts)
        factor = float(np.clip(np.average(raw * target, weights=counts) / size, 0, 1)) if size > 0 else 0.0
        better = target**2 - (target - factor * raw) ** 2
        gain = np.average(better, weights=counts)
        deviation = np.sqrt(np.sum(counts**2 * (better - gain) ** 2)) / counts.sum()
        factor = factor if gain > _ERRORS * deviation else 0.0
        added[:, k] = factor * raw
        trees.append(_boosted(inputs, target, counts, seed) if factor else None)
        whole = max(np.average(target**2, weights=counts), np.finfo(np.float64).tiny)
        figures.append((factor, gain / whole, deviation / whole))
    factors, gains, errors = np.array(figures).T
    return Correction(tuple(trees), factors, gains, errors), added


def _boosted(inputs: Floats, target: Floats, counts: Floats, seed: int) -> Trees:
    from sklearn.ensemble import GradientBoostingRegressor

    learned = np.arange(len(target))
    if len(learned) > _MOST_ROWS:
        learned = np.sort(np.random.default_rng(seed).permutation(len(target))[:_MOST_ROWS])
    model = GradientBoostingRegressor(
        n_estimators=ROUNDS,
        max_leaf_nodes=LEAVES,
        max_depth=None,
        learning_rate=RATE,
        min_samples_leaf=max(5, len(learned) // 200),
        subsample=min(0.7, _TREE_ROWS / len(learned)),
        max_features=min(1.0, 16 / inputs.shape[1]),
        init="zero",
        random_state=seed,
    ).fit(inputs[learned], target[learned], counts[learned])
    trees = [each.tree_ for each in model.estimators_[:, 0]]
    return Trees.joined(trees, RATE, np.zeros(1), inputs.shape[1])
