"""What a probe pass follows: what weights made, what was picked by value, what was read, which parameters were reached.

A tensor is *given* where it was computed from the inputs, and *drawn* where from the output of a weight layer: dropout
changes it. It is *picked* where its size depends on given values, as that of `x[mask]` does: its entries are no rows,
however many there are. What is written to given places of another tensor (`index_add`, `out[mask] = ...`) has the size
of that tensor, and is not picked. A model *branches* where it picks, or reads given values into Python: another batch
may take another way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from latedrop.model.storages import address, placed, stretch
from latedrop.torch_inside import Operator, inmost

__all__ = ["Following", "Marks"]

_PICKS = {
    *("nonzero", "nonzero_numpy", "repeat_interleave", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("to_sparse", "_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"),
}
_PACKS, _PADS = "_pack_padded_sequence", "_pad_packed_sequence"
_MOVES = {"index", "index_select", "gather", "take"}
_BY_SECOND = {"index", "masked_select", _PACKS}
_MASKS = (torch.bool, torch.uint8)
_PLACES = {  # what comes out has the size of the first argument
    *("index_put", "_index_put_impl", "_unsafe_index_put", "index_add", "index_copy", "index_reduce", "index_fill"),
    *("scatter", "scatter_add", "scatter_reduce", "masked_scatter", "put", "copy", "__setitem__"),
}
_SIZED = {  # what comes out has a size of its own
    *("segment_reduce", "_segment_reduce", "_embedding_bag", "_embedding_bag_forward_only", _PADS),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
}
_READS = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("equal", "allclose", "is_nonzero"),
}


class Marks:
    """Tensors that are known by their storages."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}  # holding a storage keeps its address from being used again

    def add(self, value: Any) -> None:
        """Mark the tensors in something."""
        self.put(placed(value))

    def put(self, found: Iterable[tuple[int, Tensor]]) -> None:
        """The same of tensors that were found, with their addresses."""
        for where, tensor in found:
            if where and where not in self._kept:
                inner = inmost(tensor)
                self._kept[where] = inner.untyped_storage() if where > 0 else inner

    def drop(self, value: Any) -> None:
        """Take their marks off."""
        for where, _ in placed(value):
            self._kept.pop(where, None)

    def on(self, value: Any) -> bool:
        """Whether one of them has a mark."""
        return self.at(placed(value)) if self._kept else False

    def at(self, found: Iterable[tuple[int, Tensor]]) -> bool:
        """The same of tensors that were found, with their addresses."""
        return any(where in self._kept for where, _ in found)


class Following(TorchFunctionMode):
    """Follows a pass: `seen` is told of operators; as a mode, it sees values that Python reads.

    Attributes:
        given: what depends on the inputs.
        drawn: what depends on a weight.
        picked: what has a size that depends on values.
        branches: whether values decide what runs, or on how much.
        drawn_branches: whether drawn values do.
        counts: whether whole numbers of the inputs were read: they may be sizes.
        moves: whether given values say which entry goes where, so that rows may come in another order.
        reached: stretches of parameters, `(address, start, end)`, that met at least one entry.
    """

    def __init__(self, inputs: Any, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.given, self.drawn, self.picked = Marks(), Marks(), Marks()
        self.given.add(inputs)
        self.branches, self.drawn_branches, self.moves, self.counts = False, False, False, False
        self.reached: set[tuple[int, int, int]] = set()
        self._known = {address(parameter) for parameter in parameters}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._read(placed((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def seen(self, operator: Operator | None, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run: marks go from its arguments to its results."""
        name = operator.name.rstrip("_") if operator is not None else ""
        values, made = placed((args, kwargs)), placed(result)
        if all(value.numel() for _, value in values):  # a view of a parameter has not met anything yet
            met = self._known.intersection(where for where, _ in values).difference(where for where, _ in made)
            self.reached.update(stretch(value) for where, value in values if where in met)
        if name == "_local_scalar_dense":
            self._read(values)
        changed = [*made, *placed(args[:1])] if operator is not None and operator.written else made
        if name == _PACKS:
            changed, counts = placed(result[0]), placed(result[1])  # steps are neither read nor any weight's doing
            if self.picked.at(values):
                self.picked.put(counts)
        if self.given.at(values):
            self.given.put(changed)
        if self.drawn.at(values):
            self.drawn.put(changed)
        if operator is not None and operator.seeded:  # random numbers of rows: as if somebody had given them
            self.given.put((where, value) for where, value in made if not value.is_floating_point())
        self.moves |= name in _MOVES and self.given.at(values[:1]) and self.given.at(values[1:])
        self.moves |= name in _PLACES and self.given.at(_whole(values[1:]))
        by = values[1:] if name in _BY_SECOND else values if name in _PICKS else []
        if self.given.at(by) and (name != "index" or any(index.dtype in _MASKS for _, index in by)):
            if name != _PACKS:
                self._read(by)
            self.picked.put(changed)
        elif name not in _SIZED and self.picked.at(placed(args[:1]) if name in _PLACES else values):
            self.picked.put(changed)

    def _read(self, values: list[tuple[int, Tensor]]) -> None:
        self.branches |= self.given.at(values)
        self.counts |= self.given.at(_whole(values))
        self.drawn_branches |= self.drawn.at(values)


def _whole(values: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Those of whole numbers."""
    return [(at, value) for at, value in values if not value.is_floating_point() and value.dtype != torch.bool]
