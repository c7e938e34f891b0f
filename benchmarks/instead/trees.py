"""Trees as plain arrays: fitted by scikit-learn, evaluated with numpy alone.

A prediction is the sum over trees of the value of the leaf that a row falls into, `offset + sum_t value[leaf_t(x)]`. A
row goes to the first child unless `x[feature] > threshold`, in float32 as scikit-learn compares. The second child
stands behind the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError

__all__ = ["Floats", "Trees", "require_sklearn"]

Floats: TypeAlias = npt.NDArray[np.float64]

_CELLS = 2**17  # rows times trees at once: they stay in the cache of a core


@dataclass(frozen=True)
class Trees:
    """Trees one after the other in the same arrays.

    Attributes:
        feature: `(nodes,)` int32, the input that a node looks at; 0 for leaves.
        threshold: `(nodes,)` float32; infinite for leaves.
        child: `(nodes,)` int32, the first child, for rows up to the threshold; a leaf is its own child.
        value: `(nodes, K)` float32, what a leaf adds; 0 elsewhere.
        roots: `(trees,)` int32.
        depth: steps from a root to the deepest leaf.
        offset: `(K,)` float64.
        inputs: number of inputs.
    """

    feature: npt.NDArray[np.int32]
    threshold: npt.NDArray[np.float32]
    child: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32]
    roots: npt.NDArray[np.int32]
    depth: int
    offset: Floats
    inputs: int

    @classmethod
    def joined(cls, trees: Sequence[Any], factor: float, offset: Floats, inputs: int) -> Trees:
        """Join scikit-learn's `tree_` objects; their leaf values are multiplied by `factor`."""
        orders = [_by_level(tree.children_left, tree.children_right) for tree in trees]
        roots = np.concatenate([[0], np.cumsum([len(order) for order in orders])[:-1]])
        columns: dict[str, list[Any]] = {"feature": [], "threshold": [], "child": [], "value": []}
        for tree, order, root in zip(trees, orders, roots, strict=True):
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            first = tree.children_left[order]
            leaf = first < 0
            columns["feature"].append(np.where(leaf, 0, tree.feature[order]))
            columns["threshold"].append(np.where(leaf, np.inf, _rounded_down(tree.threshold[order])))
            columns["child"].append(root + np.where(leaf, place[order], place[first]))
            columns["value"].append(np.where(leaf[:, None], factor * tree.value[order, :, 0], 0))
        return cls(
            feature=np.concatenate(columns["feature"]).astype(np.int32),
            threshold=np.concatenate(columns["threshold"]).astype(np.float32),
            child=np.concatenate(columns["child"]).astype(np.int32),
            value=np.concatenate(columns["value"]).astype(np.float32),
            roots=roots.astype(np.int32),
            depth=max(int(tree.max_depth) for tree in trees),
            offset=np.asarray(offset, np.float64),
            inputs=inputs,
        )

    def predict(self, x: npt.ArrayLike) -> Floats:
        """Return the sums `(n, K)` for rows `(n, inputs)`."""
        rows = np.ascontiguousarray(x, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.inputs:
            raise DataError(f"expected rows of {self.inputs} inputs; found shape {rows.shape}. Calibrate again.")
        step = max(1, _CELLS // len(self.roots))
        feature, child, roots = (each.astype(np.int64) for each in (self.feature, self.child, self.roots))
        total = np.empty((len(rows), len(self.offset)))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            flat, place = part.ravel(), np.arange(len(part)) * self.inputs
            node = np.repeat(roots[:, None], len(part), 1)
            for _ in range(self.depth):
                beyond = flat.take(place + feature.take(node)) > self.threshold.take(node)
                node = child.take(node) + beyond
            total[start : start + step] = self.value[node].sum(0, dtype=np.float64)
        return total + self.offset

    def state(self) -> dict[str, Any]:
        """Return what a record has to hold: arrays and numbers."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trees:
        """Return the inverse of `state`, after a look at the places that arrays name."""
        kinds = {"feature": np.int32, "threshold": np.float32, "child": np.int32, "value": np.float32}
        arrays = {name: np.asarray(state[name], kind) for name, kind in kinds.items()}
        roots, offset = np.asarray(state["roots"], np.int32), np.asarray(state["offset"], np.float64)
        nodes, inputs, depth = len(arrays["feature"]), int(state["inputs"]), int(state["depth"])
        shapes = (arrays["threshold"].shape, arrays["child"].shape, arrays["value"].shape)
        inside = [
            shapes == ((nodes,), (nodes,), (nodes, len(offset))),
            all(len(each) and each.min() >= 0 and each.max() < nodes for each in (roots, arrays["child"])),
            nodes > 0 and arrays["feature"].min() >= 0 and arrays["feature"].max() < inputs,
            0 <= depth < max(nodes, 1),
        ]
        # A node with a finite threshold has a second child behind the first.
        inside.append(all(inside) and bool((arrays["child"] + np.isfinite(arrays["threshold"]) < nodes).all()))
        if not all(inside):
            raise DataError("expected trees whose nodes and inputs exist; found others. Calibrate again.")
        return cls(**arrays, roots=roots, depth=depth, offset=offset, inputs=inputs)  # type: ignore[arg-type]


def require_sklearn(purpose: str) -> None:
    """Raise `DataError` where scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"expected scikit-learn, which fits {purpose}; it is not installed. Run pip install scikit-learn."
        ) from error


def _by_level(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the nodes of a tree level by level, so that a second child follows the first."""
    levels = [np.zeros(1, np.int64)]
    while len(levels[-1]):
        inner = levels[-1][left[levels[-1]] >= 0]
        levels.append(np.stack([left[inner], right[inner]], 1).ravel())
    return np.concatenate(levels)


def _rounded_down(threshold: Floats) -> npt.NDArray[np.float32]:
    """Return the largest float32 not above: inputs are float32, so that comparisons come out as in double precision."""
    near = threshold.astype(np.float32)
    below = np.nextafter(near, np.float32(-np.inf))
    return np.where(near.astype(np.float64) > threshold, below, near)
