"""The error model: a random forest that predicts squared errors from validation rows.

Its inputs are the row itself (or principal components of its features), the prediction, and the logarithms of leverage
and dropout variance. Its predictions of validation rows are out of bag: from trees that did not see the row. It is one
column of the variance beside others and is never used alone under shift, where trees answer with what they saw last.

Reference: Breiman (2001).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.instead.trees import Floats, Trees, require_sklearn
from latedrop.errors import DataError

__all__ = ["LEAST_ROWS", "Components", "ErrorModel", "error_inputs"]

LEAST_ROWS = 60
"""With fewer rows a forest gains nothing."""
TREES = 200
LEAF, LEAF_SHARE = 5, 0.01
"""A leaf has at least so many rows, and at least that share of the rows of its tree."""
_DEPTH = 8
_TREE_ROWS = 5_000  # drawn for each tree at most
_SPLIT_INPUTS = 16  # tried for each split at most
_LEAST = 1e-6  # of the mean squared error


@dataclass(frozen=True)
class Components:
    """Principal components of features: `(x - centre) @ basis`.

    Attributes:
        centre: `(F,)`.
        basis: `(F, C)`.
    """

    centre: Floats
    basis: Floats

    @classmethod
    def fit(cls, features: npt.ArrayLike, most: int = 32) -> Components:
        """Find at most `most` directions of `(n, F)` in which rows vary most."""
        x = np.asarray(features, np.float64)
        centre = x.mean(0)
        _, _, directions = np.linalg.svd(x - centre, full_matrices=False)
        return cls(centre, np.ascontiguousarray(directions[:most].T))

    def of(self, features: npt.ArrayLike) -> Floats:
        """Return `(n, C)`."""
        return np.asarray((np.asarray(features, np.float64) - self.centre) @ self.basis)


def error_inputs(x: npt.ArrayLike, mean: npt.ArrayLike, *positive: npt.ArrayLike) -> Floats:
    """Join the forest's inputs: `x` `(n, D)`, the prediction `(n, K)` and logarithms of columns such as leverage."""
    parts = [np.asarray(part, np.float64).reshape(len(np.asarray(part)), -1) for part in (x, mean, *positive)]
    tiny = np.finfo(np.float32).tiny
    logs = [np.log(np.maximum(part, tiny)) for part in parts[2:]]
    largest = np.finfo(np.float32).max
    joined: Floats = np.clip(np.concatenate([*parts[:2], *logs], 1), -largest, largest)
    return joined


@dataclass(frozen=True)
class ErrorModel:
    """A forest of squared errors.

    Attributes:
        trees: whose sum is the squared error `(n, K)`, divided by `size`.
        size: `(K,)`, mean squared errors.
    """

    trees: Trees
    size: Floats

    @classmethod
    def fit(
        cls,
        inputs: Floats,
        error: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
        *,
        trees: int = TREES,
        seed: int = 0,
    ) -> tuple[ErrorModel, Floats]:
        """Return the model, and its predictions of the rows that it learned from, out of bag `(n, K)`.

        Args:
            inputs: `(n, D)`, from `error_inputs`.
            error: `(n, K)`, target minus prediction.
            weights: `(n,)`, what each row counts.
            trees: how many.
            seed: of the draws of rows.
        """
        require_sklearn("the error model")
        from sklearn.ensemble import RandomForestRegressor

        squares = np.square(np.asarray(error, np.float64))
        squares = squares[:, None] if squares.ndim == 1 else squares
        count = len(squares)
        if count < LEAST_ROWS:
            raise DataError(f"expected at least {LEAST_ROWS} rows for an error model; found {count}. Leave it out.")
        counts = None if weights is None else np.asarray(weights, np.float64)
        size = np.average(squares, 0, counts)
        unit = squares / np.where(size > 0, size, 1)
        drawn = min(count, _TREE_ROWS)
        forest = RandomForestRegressor(
            trees,
            min_samples_leaf=max(LEAF, round(LEAF_SHARE * drawn)),
            max_features=min(1.0, _SPLIT_INPUTS / inputs.shape[1]),
            max_depth=_DEPTH,
            max_samples=None if drawn == count else drawn,
            oob_score=True,
            random_state=seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some rows may be in every bag where trees are few
            forest.fit(inputs, unit if unit.shape[1] > 1 else unit[:, 0], counts)
        arrays = [each.tree_ for each in forest.estimators_]
        model = cls(Trees.joined(arrays, 1 / trees, np.zeros(unit.shape[1]), inputs.shape[1]), size)
        return model, np.maximum(forest.oob_prediction_.reshape(count, -1), _LEAST) * size

    def predict(self, inputs: npt.ArrayLike) -> Floats:
        """Return squared errors `(n, K)`."""
        return np.maximum(self.trees.predict(inputs), _LEAST) * self.size

    def state(self) -> dict[str, Any]:
        """Return what a record has to hold."""
        return {**self.trees.state(), "size": self.size}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ErrorModel:
        """Return the inverse of `state`."""
        rest = {name: value for name, value in state.items() if name != "size"}
        return cls(Trees.from_state(rest), np.asarray(state["size"], np.float64))
