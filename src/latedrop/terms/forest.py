"""The error forest: a random forest that predicts squared errors, learned from the validation rows.

It looks at the row itself (or at principal components of its features), at the prediction, and at the logarithms of
other terms. Its values of validation rows are out of bag: from trees that did not see the row. It is one column of the
variance beside others and is never used alone far from the validation rows, where trees answer with what they saw last.

scikit-learn fits the trees; they are kept as arrays and evaluated by torch: a row goes to the first child unless
`x[feature] > threshold`, in float32 as scikit-learn compares, and the second child stands behind the first.

Reference: Breiman (2001).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.records import match, record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.term import BatchContext, Term
from latedrop.torch_private import being_traced

__all__ = ["LEAST_ROWS", "ErrorForest"]

LEAST_ROWS = 60
"""With fewer rows a forest gains nothing."""
_LEAF, _LEAF_SHARE = 5, 0.01  # a leaf has at least so many rows, and at least that share of the rows of its tree
_DEPTH = 8
_TREE_ROWS = 5_000  # drawn for each tree at most
_SPLIT_INPUTS = 16  # tried for each split at most
_COMPONENTS = 32
_MOST_OUTPUTS = 16
_LEAST = 1e-6  # of the mean squared error
_CELLS = 2**17  # rows times trees at once on a CPU: they stay in its cache
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@record
@dataclass(eq=False)
class ErrorForest(Term):
    """A forest of squared errors.

    Args:
        trees: how many.
        seed: of the draws of rows.
        beside: the terms whose logarithms it looks at.
        center, basis: of the principal components `(features - center) @ basis`; None where it looks at the row itself.
        nodes: `(nodes, 3)`, for each node the input that it looks at, its threshold, and its first child; a leaf is its
            own child and has an infinite threshold.
        leaves: `(nodes, K)`, what a leaf adds to the squared errors of K outputs; 0 elsewhere.
        roots: `(trees,)`, the nodes that trees begin with.
        depth: steps from a root to the deepest leaf.
        inputs: how many numbers it looks at.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> method = latedrop.Terms(["dropout", ErrorForest(trees=20)])
    >>> latedrop.calibrate(net, (x, x**2), method=method).predict(x).std.shape
    torch.Size([64, 1])
    """

    trees: int = 100
    seed: int = 0
    _: KW_ONLY
    beside: tuple[str, ...] = ()
    center: StoredTensor | None = field(default=None, repr=False)
    basis: StoredTensor | None = field(default=None, repr=False)
    nodes: StoredTensor | None = field(default=None, repr=False)
    leaves: StoredTensor | None = field(default=None, repr=False)
    roots: StoredTensor | None = field(default=None, repr=False)
    depth: int = 0
    inputs: int = 0
    name: Literal["forest"] = "forest"
    needs_errors: ClassVar[bool] = True
    out_of_bag: ClassVar[Tensor | None] = None
    """`(N, ...)`, squared errors of the validation rows by trees that did not see them."""

    def __post_init__(self) -> None:
        for name, least in (("trees", 1), ("seed", 0), ("depth", 0), ("inputs", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**32:
                raise ArgumentError(f"expected {name} to be a whole number of at least {least}; found {value!r}.")

    def prepared(self, rows: BatchContext) -> ErrorForest:
        """See `Term`."""
        _require_sklearn()
        shape = tuple(rows.mean.shape[1:])
        if len(shape) > 1 or rows.mean[0].numel() > _MOST_OUTPUTS:
            raise ArgumentError(
                f"expected at most {_MOST_OUTPUTS} outputs for an error forest; found {shape}. Leave 'forest' out."
            )
        if rows.table is None and not rows.has_features:
            raise ArgumentError(
                "expected inputs in one table, or a site whose inputs are features of a row, for an error forest; "
                "found neither. Leave 'forest' out."
            )
        return self

    def learned_from_errors(self, rows: BatchContext, error: Tensor) -> ErrorForest:
        """See `Term`."""
        if len(error) < LEAST_ROWS:
            raise DataError(
                f"expected at least {LEAST_ROWS} validation rows for an error forest; found {len(error)}. Leave "
                "'forest' out."
            )
        found = replace(self, beside=tuple(rows.totals))
        if rows.table is None:
            features = rows.features.double()
            center = features.mean(0)
            basis = torch.linalg.svd(features - center, full_matrices=False)[2][:_COMPONENTS].T.contiguous()
            found = replace(found, center=center, basis=basis)
        inputs = found._inputs(rows).cpu().numpy()
        squares = error.reshape(len(error), -1).double().square().cpu().numpy()
        weights = None if rows.weights is None else rows.weights.double().cpu().numpy()
        forest, bag = _fitted(inputs, squares, weights, self.trees, self.seed)
        nodes, leaves, roots, depth = _joined([tree.tree_ for tree in forest.estimators_])
        size = np.average(squares, 0, weights)
        leaves = leaves * (size / self.trees)
        found = replace(
            found,
            nodes=torch.from_numpy(nodes.astype(np.float32)),
            leaves=torch.from_numpy(leaves.astype(np.float32)),
            roots=torch.from_numpy(roots.astype(np.float32)),
            depth=depth,
            inputs=inputs.shape[1],
        )
        found.out_of_bag = torch.from_numpy(np.maximum(bag, _LEAST) * size).reshape(error.shape)  # type: ignore[misc]
        return found

    def values(self, rows: BatchContext) -> Tensor:
        """See `Term`."""
        if rows.index is not None and self.out_of_bag is not None:
            return self.out_of_bag[rows.index].to(rows.mean)
        inputs = self._inputs(rows)
        if self.leaves is None or inputs.shape[1] != self.inputs:
            raise DataError(
                f"expected rows of {self.inputs} numbers for the error forest; found {inputs.shape[1]}. Calibrate "
                "again with inputs like these."
            )
        at_once = len(inputs) if being_traced() or inputs.device.type != "cpu" else _CELLS // self.trees
        parts = [self._sums(part) for part in inputs.split(max(1, at_once))]
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
        return found.clamp_min(self._least.to(found)).to(rows.mean.dtype).reshape(rows.mean.shape)

    def checked(self) -> ErrorForest:
        """Check the places that nodes name, after reading."""
        match(self.trees >= 1, "trees", "1 or more", self.trees)
        if self.nodes is None or self.leaves is None or self.roots is None:
            return self
        count = len(self.nodes)
        match(self.nodes.shape == (count, 3) and count > 0, "nodes", "three numbers for each node", self.nodes.shape)
        match(self.leaves.dim() == 2 and len(self.leaves) == count, "leaves", f"{count} rows", self.leaves.shape)
        match(bool(self.leaves.isfinite().all() & (self.leaves >= 0).all()), "leaves", "numbers from 0 on", "others")
        match(self.roots.shape == (self.trees,), "roots", f"{self.trees} of them", self.roots.shape)
        feature, threshold, child = self.nodes.unbind(1)
        last = child + threshold.isfinite()
        whole = all(bool((part == part.round()).all()) for part in (feature, child, self.roots))
        match(whole and bool((feature >= 0).all() & (feature < self.inputs).all()), "nodes", "inputs that exist", "no")
        inside = bool((child >= 0).all() & (last < count).all() & (self.roots >= 0).all() & (self.roots < count).all())
        match(inside and self.depth <= 64, "nodes", "children that exist", "others")
        both = None if self.center is None else self.center.shape, None if self.basis is None else self.basis.shape
        fits = both == (None, None) or (None not in both and len(both[1]) == 2 and both[1][:1] == both[0])  # type: ignore
        match(fits, "basis", "one row for each number of center", both)
        return self

    @property
    def needs_features(self) -> bool:  # type: ignore[override]
        """Whether it looks at components of features."""
        return self.basis is not None

    @cached_property
    def _arrays(self) -> tuple[Tensor, ...]:
        if self.nodes is None or self.leaves is None or self.roots is None:
            raise DataError("expected a term that has seen the validation errors; found one that has not.")
        feature, threshold, child = self.nodes.unbind(1)
        return feature.long(), threshold.contiguous(), child.long(), self.leaves.double(), self.roots.long()

    @cached_property
    def _least(self) -> Tensor:
        """Return the least squared error of each output `(K,)`: the smallest leaf of all."""
        leaves = self._arrays[3]
        return leaves.where(leaves > 0, leaves.max()).amin(0)

    def _sums(self, x: Tensor) -> Tensor:
        """Return `(n, K)`, the sum over trees of what the leaf of each row adds."""
        feature, threshold, child, leaves, roots = (part.to(x.device) for part in self._arrays)
        node = roots.expand(len(x), -1)
        for _ in range(self.depth):
            node = child.take(node) + (x.gather(1, feature.take(node)) > threshold.take(node))
        return torch.stack([column.take(node).sum(1) for column in leaves.unbind(1)], 1)

    def _inputs(self, rows: BatchContext) -> Tensor:
        """Return `(n, inputs)` in float32."""
        mean = rows.mean.reshape(len(rows.mean), -1).double()
        own = rows.table
        if self.basis is not None and self.center is not None:
            features = rows.features.double()
            own = (features - self.center.to(features)) @ self.basis.to(features)
        assert own is not None
        totals = [rows.totals[name].reshape(len(mean), -1).double() for name in self.beside]
        logs = [total.clamp_min(_TINY).log() for total in totals]
        return torch.cat([own.double(), mean, *logs], 1).clamp(-_HUGE, _HUGE).float()


def _fitted(
    inputs: npt.NDArray[np.float32],
    squares: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | None,
    trees: int,
    seed: int,
) -> tuple[Any, npt.NDArray[np.float64]]:
    """Fit squares in units of their mean; also return the predictions out of bag `(n, K)`."""
    from sklearn.ensemble import RandomForestRegressor

    size = np.average(squares, 0, weights)
    unit = squares / np.where(size > 0, size, 1)
    count = len(unit)
    drawn = min(count, _TREE_ROWS)
    forest = RandomForestRegressor(
        trees,
        min_samples_leaf=max(_LEAF, round(_LEAF_SHARE * drawn)),
        max_features=min(1.0, _SPLIT_INPUTS / inputs.shape[1]),
        max_depth=_DEPTH,
        max_samples=None if drawn == count else drawn,
        oob_score=True,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some rows may be in every bag where trees are few
        forest.fit(inputs, unit if unit.shape[1] > 1 else unit[:, 0], weights)
    return forest, forest.oob_prediction_.reshape(count, -1)


def _joined(
    trees: Sequence[Any],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64], int]:
    """Join scikit-learn's trees in the same arrays: nodes, leaves, roots, depth."""
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
        leaves.append(np.where(leaf[:, None], tree.value[order, :, 0], 0))
    return np.concatenate(nodes), np.concatenate(leaves), roots, max(int(tree.max_depth) for tree in trees)


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


def _require_sklearn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise LatedropError(
            "expected scikit-learn, which fits the error forest; it is not installed. Run: pip install scikit-learn"
        ) from error
