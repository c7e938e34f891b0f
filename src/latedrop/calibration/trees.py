"""Trees as plain arrays: fitted by scikit-learn, evaluated with numpy alone.

A prediction is the sum over trees of the value of the leaf that a row falls into, `offset + sum_t value[leaf_t(x)]`. A
row goes to the first child where `x[feature] <= threshold`, in float32 as scikit-learn compares.
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

_CELLS = 2**22  # rows times trees at once


@dataclass(frozen=True)
class Trees:
    """Trees one after the other in the same arrays.

    Attributes:
        feature: `(nodes,)` int32, the input that a node looks at; 0 for leaves.
        threshold: `(nodes,)` float32; infinite for leaves.
        children: `(nodes, 2)` int32, for rows up to the threshold and beyond; a leaf is its own child.
        value: `(nodes, K)` float32, what a leaf adds; 0 elsewhere.
        roots: `(trees,)` int32.
        depth: steps from a root to the deepest leaf.
        offset: `(K,)` float64.
        inputs: number of inputs.
    """

    feature: npt.NDArray[np.int32]
    threshold: npt.NDArray[np.float32]
    children: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32]
    roots: npt.NDArray[np.int32]
    depth: int
    offset: Floats
    inputs: int

    @classmethod
    def joined(cls, trees: Sequence[Any], factor: float, offset: Floats, inputs: int) -> Trees:
        """Join scikit-learn's `tree_` objects; their leaf values are multiplied by `factor`."""
        sizes = [tree.node_count for tree in trees]
        roots = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        leaf = np.concatenate([tree.children_left < 0 for tree in trees])
        places = np.arange(len(leaf))
        sides = [
            np.concatenate([getattr(tree, side) + root for tree, root in zip(trees, roots, strict=True)])
            for side in ("children_left", "children_right")
        ]
        children = np.stack([np.where(leaf, places, side) for side in sides], 1)
        value = np.concatenate([tree.value[:, :, 0] for tree in trees]) * factor
        threshold = np.concatenate([tree.threshold for tree in trees])
        return cls(
            feature=np.where(leaf, 0, np.concatenate([tree.feature for tree in trees])).astype(np.int32),
            threshold=np.where(leaf, np.inf, _rounded_down(threshold)).astype(np.float32),
            children=children.astype(np.int32),
            value=np.where(leaf[:, None], value, 0).astype(np.float32),
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
        parts = [self._sums(rows[start : start + step]) for start in range(0, len(rows), step)]
        return np.concatenate([np.zeros((0, len(self.offset))), *parts]) + self.offset

    def _sums(self, rows: npt.NDArray[np.float32]) -> Floats:
        node = np.repeat(self.roots[:, None], len(rows), 1)  # trees first: a tree's nodes lie together
        flat, place = rows.ravel(), np.arange(len(rows)) * self.inputs
        first, second = self.children.T
        for _ in range(self.depth):
            # A number that is none goes to the second child.
            left = flat[place + self.feature[node]] <= self.threshold[node]
            node = np.where(left, first[node], second[node])
        total: Floats = self.value[node].sum(0, dtype=np.float64)
        return total

    def state(self) -> dict[str, Any]:
        """Return what a record has to hold: arrays and numbers."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trees:
        """Return the inverse of `state`, after a look at the places that arrays name."""
        kinds = {"feature": np.int32, "threshold": np.float32, "children": np.int32, "value": np.float32}
        arrays = {name: np.asarray(state[name], kind) for name, kind in kinds.items()}
        roots, offset = np.asarray(state["roots"], np.int32), np.asarray(state["offset"], np.float64)
        nodes, inputs, depth = len(arrays["feature"]), int(state["inputs"]), int(state["depth"])
        shapes = (arrays["threshold"].shape, arrays["children"].shape, arrays["value"].shape)
        inside = [
            shapes == ((nodes,), (nodes, 2), (nodes, len(offset))),
            all(len(each) and each.min() >= 0 and each.max() < nodes for each in (roots, arrays["children"])),
            nodes > 0 and arrays["feature"].min() >= 0 and arrays["feature"].max() < inputs,
            0 <= depth < max(nodes, 1),
        ]
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


def _rounded_down(threshold: Floats) -> npt.NDArray[np.float32]:
    """Return the largest float32 not above: inputs are float32, so that comparisons come out as in double precision."""
    near = threshold.astype(np.float32)
    below = np.nextafter(near, np.float32(-np.inf))
    return np.where(near.astype(np.float64) > threshold, below, near)
