"""Trees as plain arrays: scikit-learn fits them, torch evaluates them.

The value of a row is the sum over trees of what the leaf adds that it falls into. A row goes to the first child unless
`x[feature] > threshold`, in float32 as scikit-learn compares; the second child stands behind the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import DataError, LatedropError
from latedrop.records import match, record
from latedrop.stored_tensors import StoredTensor
from latedrop.torch_private import being_traced

__all__ = ["Trees", "require_sklearn"]

_CELLS = 2**17  # rows times trees at once on a CPU: they stay in its cache
_DEEPEST = 64


@record
@dataclass(frozen=True, eq=False)
class Trees:
    """Trees one after the other in the same arrays.

    Attributes:
        nodes: `(nodes, 3)`, for each node the input that it looks at, its threshold, and its first child; a leaf is its
            own child and has an infinite threshold.
        leaves: `(nodes, K)`, what a leaf adds to K values; 0 elsewhere.
        roots: `(trees,)`, the nodes that trees begin with.
        depth: steps from a root to the deepest leaf.
        inputs: how many numbers of a row they look at.
    """

    nodes: StoredTensor = field(repr=False)
    leaves: StoredTensor = field(repr=False)
    roots: StoredTensor = field(repr=False)
    depth: int
    inputs: int

    @classmethod
    def joined(cls, trees: Sequence[Any], factor: Any, inputs: int) -> Trees:
        """Join scikit-learn's `tree_` objects; their leaf values are multiplied by `factor`, `(K,)` or a number."""
        orders = [_by_level(tree.children_left, tree.children_right) for tree in trees]
        roots = np.cumsum([0, *(len(order) for order in orders[:-1])])
        nodes, leaves = [], []
        for tree, order, root in zip(trees, orders, roots, strict=True):
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            first = tree.children_left[order]
            leaf = first < 0
            feature = np.where(leaf, 0, tree.feature[order])
            threshold = np.where(leaf, np.inf, _rounded_down(tree.threshold[order]))
            nodes.append(np.stack([feature, threshold, root + np.where(leaf, place[order], place[first])], 1))
            leaves.append(np.where(leaf[:, None], tree.value[order, :, 0], 0) * factor)
        arrays = (np.concatenate(nodes), np.concatenate(leaves), roots)
        first, values, starts = (torch.from_numpy(part.astype(np.float32)) for part in arrays)
        return cls(first, values, starts, max(int(tree.max_depth) for tree in trees), inputs)

    def sums(self, x: Tensor) -> Tensor:
        """Return `(n, K)` in double precision, from rows `(n, inputs)` in float32."""
        if x.shape[1] != self.inputs:
            raise DataError(
                f"expected rows of {self.inputs} numbers for trees; found {x.shape[1]}. Calibrate again with inputs "
                "like these."
            )
        at_once = len(x) if being_traced() or not x.is_cpu else max(1, _CELLS // len(self.roots))
        parts = [self._some(part) for part in x.split(max(1, at_once))]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _some(self, x: Tensor) -> Tensor:
        feature, threshold, child, roots, *leaves = self._on(x.device)
        node = roots.expand(len(x), -1)
        for _ in range(self.depth):
            node = child.take(node) + (x.gather(1, feature.take(node)) > threshold.take(node))
        return torch.stack([column.take(node).sum(1) for column in leaves], 1)

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the arrays on a device, where they are copied once."""
        if device.type == "cpu" or being_traced():
            return tuple(part.to(device) for part in self._arrays)
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = tuple(part.to(device) for part in self._arrays)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[Tensor, ...]]:
        return {}

    @cached_property
    def _arrays(self) -> tuple[Tensor, ...]:
        feature, threshold, child = self.nodes.unbind(1)
        columns = (column.double().contiguous() for column in self.leaves.unbind(1))
        return feature.long(), threshold.contiguous(), child.long(), self.roots.long(), *columns

    def checked(self) -> Trees:
        """Check the places that nodes name, after reading."""
        count = len(self.nodes) if self.nodes.dim() == 2 else 0
        match(count > 0 and self.nodes.shape[1] == 3, "nodes", "three numbers for each node", tuple(self.nodes.shape))
        fits = self.leaves.dim() == 2 and self.leaves.shape[0] == count and self.leaves.shape[1] > 0
        match(fits and bool(self.leaves.isfinite().all()), "leaves", f"numbers of {count} nodes", self.leaves.shape)
        match(self.roots.dim() == 1 and len(self.roots) > 0, "roots", "one for each tree", tuple(self.roots.shape))
        feature, threshold, child = self.nodes.unbind(1)
        whole = all(bool((part == part.round()).all()) for part in (feature, child, self.roots))
        known = bool((feature >= 0).all() & (feature < self.inputs).all())
        match(whole and known, "nodes", f"places among {self.inputs} inputs", "others")
        last = child + threshold.isfinite()
        inside = bool((child >= 0).all() & (last < count).all() & (self.roots >= 0).all() & (self.roots < count).all())
        match(inside and 0 <= self.depth <= _DEEPEST, "nodes", "children and roots that exist", "others")
        return self


def require_sklearn(purpose: str) -> None:
    """Raise `LatedropError` where scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise LatedropError(
            f"expected scikit-learn, which fits {purpose}; it is not installed. Run: pip install scikit-learn"
        ) from error


def _by_level(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the nodes of a tree level by level, so that a second child follows the first."""
    levels = [np.zeros(1, np.int64)]
    while len(levels[-1]):
        inner = levels[-1][left[levels[-1]] >= 0]
        levels.append(np.stack([left[inner], right[inner]], 1).ravel())
    return np.concatenate(levels)


def _rounded_down(threshold: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return the largest float32 not above: inputs are float32, so that comparisons come out as in double precision."""
    near = threshold.astype(np.float32)
    below = np.nextafter(near, np.float32(-np.inf))
    return np.where(near.astype(np.float64) > threshold, below, near)
