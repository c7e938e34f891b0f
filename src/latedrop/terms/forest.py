"""The error forest: a random forest that predicts squared errors, learned from the validation rows.

It looks at the row itself (or at principal components of its features), at the prediction, and at the logarithms of
other terms. Its values of validation rows are out of bag: from trees that did not see the row. It is one column of the
variance beside others and is never used alone far from the validation rows, where trees answer with what they saw last.

Reference: Breiman (2001).

Trees are plain arrays: scikit-learn fits them, torch evaluates them. The value of a row is the sum over trees of what
the leaf adds that it falls into. A row goes to the first child unless `x[feature] > threshold`, in float32 as
scikit-learn compares; the second child stands behind the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.data.arrays import constants
from latedrop.data.rows import tensors
from latedrop.errors import ArgumentError, DataError
from latedrop.records import Limits, match, record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.term import BatchContext, OnDevices, Term
from latedrop.torch_private import being_traced

__all__ = ["LEAST_ROWS", "ErrorForest", "Trees", "grow"]

_CELLS = 2**17  # rows times trees at once on a CPU: they stay in its cache
_MOST_NODES = 10_000
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
        if being_traced() == "file":  # `onnx_files.writing` makes one operator of it
            arrays = x, *(part.to(x.device) for part in (self.nodes, self.leaves, self.roots))
            shape = len(x), self.leaves.shape[1]
            return torch.onnx.ops.symbolic("latedrop::Trees", arrays, dtype=torch.float64, shape=shape).to(x.device)
        at_once = len(x) if being_traced() or not x.is_cpu else max(1, _CELLS // len(self.roots))
        parts = [self._some(part) for part in x.split(max(1, at_once))]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _some(self, x: Tensor) -> Tensor:
        feature, threshold, child, roots, *leaves = self._arrays.on(x.device)
        node = roots.expand(len(x), -1)
        if len(x) == 1 and len(threshold) <= _MOST_NODES and not being_traced():  # quicker: compare at all nodes
            after = child + (x[0].take(feature) > threshold)
            for _ in range(self.depth):
                node = after.take(node)
        else:
            for _ in range(self.depth):
                node = child.take(node) + (x.gather(1, feature.take(node)) > threshold.take(node))
        return torch.stack([column.take(node).sum(1) for column in leaves], 1)

    @cached_property
    def _arrays(self) -> OnDevices:
        feature, threshold, child = self.nodes.unbind(1)
        columns = (column.double().contiguous() for column in self.leaves.unbind(1))
        return OnDevices(feature.long(), threshold.contiguous(), child.long(), self.roots.long(), *columns)

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


LEAST_ROWS = 60
"""With fewer rows a forest gains nothing."""
_LEAF, _LEAF_SHARE = 5, 0.01  # a leaf has at least so many rows, and at least that share of the rows of its tree
_DEPTH = 8
_TREE_ROWS = 5_000  # drawn for each tree at most
_SPLIT_INPUTS = 16  # tried for each split at most
_MANY_ROWS = 500  # from which on trees grow on several threads
_COMPONENTS = 32
_SMALLEST = 1e-3  # share of the largest component's size below which one is rounding of single precision
_MOST_OUTPUTS = 16
_LEAST = 1e-6  # of the mean squared error
_GRAIN = 2.0**-16  # of squared errors of mean 1: their sums are exact, whatever the order
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
        spread: `(inputs,)`, what the numbers that it looks at are divided by.
        grown: the trees, whose sum is the squared error of each output.
        least: the least squared error that it gives, one per output.
    """

    trees: int = 100
    seed: int = 0
    _: KW_ONLY
    beside: tuple[str, ...] = ()
    center: StoredTensor | None = field(default=None, repr=False)
    basis: StoredTensor | None = field(default=None, repr=False)
    spread: StoredTensor | None = field(default=None, repr=False)
    grown: Trees | None = field(default=None, repr=False)
    least: tuple[Annotated[float, Limits(0, 1e300)], ...] = ()
    name: Literal["forest"] = "forest"
    needs_errors: ClassVar[bool] = True
    out_of_bag: ClassVar[Tensor | None] = None
    """`(N, ...)`, squared errors of the validation rows by trees that did not see them."""

    def __post_init__(self) -> None:
        for name, least in (("trees", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**32:
                raise ArgumentError(f"expected {name} to be a whole number of at least {least}; found {value!r}.")

    def prepared(self, rows: BatchContext) -> ErrorForest:
        """Return the forest, or raise where outputs are too many or nothing is to be looked at."""
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
        """Return the forest after it has grown on squared errors, with its values out of bag."""
        if len(error) < LEAST_ROWS:
            raise DataError(
                f"expected at least {LEAST_ROWS} validation rows for an error forest; found {len(error)}. Leave "
                "'forest' out."
            )
        forest = self.looking_at(rows)
        # Columns of spread 1 in steps of 1/4096: splits then do not follow the last bit of a number.
        inputs = np.round(forest.numbers(rows).cpu().numpy() * np.float32(4096)) / np.float32(4096)
        squares = error.reshape(len(error), -1).double().square().cpu().numpy()
        weights = None if rows.weights is None else rows.weights.double().cpu().numpy()
        size = np.average(squares, 0, weights)
        grown, bag = grow(inputs, squares / np.where(size > 0, size, 1), weights, self.trees, self.seed)
        grown = replace(grown, leaves=(grown.leaves * torch.from_numpy(size)).float())
        forest = replace(forest, grown=grown, least=tuple((_LEAST * size).tolist()))
        forest.out_of_bag = torch.from_numpy(np.maximum(bag, _LEAST) * size).reshape(error.shape)  # type: ignore[misc]
        return forest

    def looking_at(self, rows: BatchContext) -> ErrorForest:
        """Return a forest that looks at the table of rows, or components of features, and at terms before it."""
        forest = replace(self, beside=tuple(rows.totals), spread=None)
        if rows.table is None:
            features = rows.features.double()
            center = features.mean(0)
            sizes, basis = torch.linalg.svd(features - center, full_matrices=False)[1:]
            count = min(_COMPONENTS, max(1, int((sizes > _SMALLEST * sizes[0]).sum())))
            forest = replace(forest, center=center, basis=basis[:count].T.contiguous())
        plain = forest.numbers(rows, narrow=False)
        spread = (plain / plain.abs().amax(0).clamp_min(1e-300)).std(0, correction=0) * plain.abs().amax(0)
        return replace(forest, spread=torch.where(spread > 0, spread, 1.0))

    def numbers(self, rows: BatchContext, *, narrow: bool = True) -> Tensor:
        """Return the inputs of trees, `(n, inputs)` in float32, in units of their spread over the validation rows."""
        mean = rows.mean.reshape(len(rows.mean), -1).double()
        own = rows.table
        if self.basis is not None and self.center is not None:
            features = rows.features.double()
            own = (features - self.center.to(features)) @ self.basis.to(features)
        if own is None:
            kinds = ", ".join(f"{value.dtype} {tuple(value.shape)}" for value in tensors(rows.x))
            raise DataError(
                f"expected inputs as one table of floating-point numbers, as calibrated with; found {kinds}. Convert "
                "whole numbers to float32; for inputs of another kind calibrate again."
            )
        totals = [rows.totals[name].reshape(len(mean), -1).double() for name in self.beside]
        logs = [total.clamp_min(_TINY).log() for total in totals]
        joined = torch.cat([own.double(), mean, *logs], 1)
        if self.spread is not None:
            if joined.shape[1] != len(self.spread):
                raise DataError(
                    f"expected rows of {len(self.spread)} numbers for trees; found {joined.shape[1]}. Calibrate again "
                    "with inputs like these."
                )
            joined = joined / self.spread.to(joined)
        return joined.clamp(-_HUGE, _HUGE).float() if narrow else joined

    def values(self, rows: BatchContext) -> Tensor:
        """Return the predicted squared errors; of the validation rows themselves out of bag."""
        if rows.index is not None and self.out_of_bag is not None:
            return self.out_of_bag[rows.index].to(rows.mean)
        if self.grown is None:
            raise DataError("expected a term that has seen the validation errors; found one that has not.")
        squares = self.grown.sums(self.numbers(rows))
        squares = torch.maximum(squares, constants(self.least).to(squares))
        return squares.to(rows.mean.dtype).reshape(rows.mean.shape)

    def checked(self) -> ErrorForest:
        """Check fields against each other after reading."""
        if self.grown is not None:
            outputs = self.grown.leaves.shape[1]
            match(len(self.least) == outputs, "least", f"{outputs} numbers, as outputs of the trees", self.least)
            match(bool((self.grown.leaves >= 0).all()), "grown.leaves", "squared errors", "some below 0")
            count, spread = self.grown.inputs, self.spread
            fits = spread is not None and spread.shape == (count,) and bool((spread > 0).all())
            match(fits, "spread", f"{count} numbers above 0", "others")
        both = None if self.center is None else self.center.shape, None if self.basis is None else self.basis.shape
        fits = both == (None, None) or (None not in both and len(both[1]) == 2 and both[1][:1] == both[0])  # type: ignore
        match(fits, "basis", "one row for each number of center", both)
        return self

    @property
    def needs_features(self) -> bool:  # type: ignore[override]
        """Return True if it looks at components of features."""
        return self.basis is not None


def grow(
    inputs: npt.NDArray[np.float32],
    squares: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | None = None,
    trees: int = 100,
    seed: int = 0,
) -> tuple[Trees, npt.NDArray[np.float64]]:
    """Fit trees to squares `(n, K)` of about 1; also return their predictions out of bag."""
    from sklearn import config_context
    from sklearn.tree import DecisionTreeRegressor

    count, outputs = squares.shape
    squares = np.round(squares / _GRAIN) * _GRAIN
    drawn = min(count, _TREE_ROWS)
    least, share = max(_LEAF, round(_LEAF_SHARE * drawn)), min(1.0, _SPLIT_INPUTS / inputs.shape[1])
    odds = None if weights is None else weights / weights.sum()

    def tree_of(number: int) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Return a tree, and which rows it did not see."""
        bag = np.bincount(np.random.RandomState(number).choice(count, drawn, p=odds), minlength=count)
        with config_context(skip_parameter_validation=True):  # a third of the time where rows are few
            tree = DecisionTreeRegressor(
                min_samples_leaf=least, max_features=share, max_depth=_DEPTH, random_state=number
            )
            return tree.fit(inputs, squares, bag, check_input=False).tree_, bag == 0

    numbers = np.random.RandomState(seed).randint(np.iinfo(np.int32).max, size=trees).tolist()
    with ThreadPoolExecutor(torch.get_num_threads() if count >= _MANY_ROWS else 1) as pool:
        grown = list(pool.map(tree_of, numbers))
    total, times = np.zeros_like(squares), np.zeros((count, 1))
    for tree, unseen in grown:
        total[unseen] += tree.predict(inputs[unseen]).reshape(-1, outputs)
        times[unseen] += 1
    joined = Trees.joined([tree for tree, _ in grown], 1 / trees, inputs.shape[1])
    return joined, total / np.maximum(times, 1)  # some rows may be in every bag where trees are few
