"""Items: rows that are objects (graphs, molecules, sequences of any length), and what makes a batch of them.

    find_sites(model, graphs, collate=batch_of_graphs)

calls `model(batch_of_graphs(some_graphs))`. The rows are the items of the list; what `collate` returns is given to the
model as any other inputs are: a tuple is several of them, a mapping those of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.data import graphs
from latedrop.data.arrays import is_table, map_values, place
from latedrop.errors import DataError

__all__ = ["Collate", "Graphs", "Items", "as_items", "batch_of", "rows_are_nodes"]

Collate: TypeAlias = Callable[[list[Any]], Any] | None

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, np.generic)


class Items:
    """A list of items, one for each row, and how a batch is made of them."""

    def __init__(self, items: Iterable[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.items, self.collate = list(items), collate
        self._batch: Any = None

    def __len__(self) -> int:
        return len(self.items)

    def at(self, index: slice | Iterable[int]) -> Items:
        """Some of them."""
        found = self.items[index] if isinstance(index, slice) else [self.items[i] for i in index]
        return Items(found, self.collate)

    def repeated(self, times: int) -> Items:
        """All of them, one time after the other."""
        return self.at([*range(len(self))] * times)

    def batch(self, model: nn.Module) -> Any:
        """What `collate` makes of all, on the model's device; a model may write into it."""
        if self._batch is None:
            try:
                made = self.collate(list(self.items))
            except Exception as error:
                raise DataError(
                    f"expected collate= to make a batch of {len(self)} items; it raised {type(error).__name__}: "
                    f"{error}. It is given a list of items, as a DataLoader's collate_fn is."
                ) from error
            made = place(made, model)
            if not _is_plain(made):  # an object of somebody's own, which we cannot copy
                return _moved(made, model)
            self._batch = made
        return map_values(self._batch, lambda tensor: tensor.clone())


class Graphs(Items):
    """A batch of graphs of PyTorch Geometric. A row is a graph; or a node, where `nodes` is True."""

    def __init__(self, batch: Any, *, nodes: bool | None = None) -> None:
        self.graphs, self.nodes = batch, nodes

    def __len__(self) -> int:
        return int(self.graphs.num_nodes if self.nodes else self.graphs.num_graphs)

    def at(self, index: slice | Iterable[int]) -> Graphs:
        """Some of the graphs, also where rows are nodes: then a slice of them."""
        if self.nodes and not isinstance(index, slice):
            raise DataError(
                "expected all nodes of a graph, as these act on each other; found some of them. Leave out whole "
                "graphs, and give no node the weight 0."
            )
        chosen = index if isinstance(index, slice) else list(index)
        return Graphs(graphs.some(self.graphs, chosen), nodes=self.nodes)

    def parts(self, size: int) -> Iterable[Graphs]:
        """The same in parts of at most `size` graphs."""
        count = int(self.graphs.num_graphs)
        return [self] if count <= size else [self.at(slice(i, i + size)) for i in range(0, count, size)]

    def repeated(self, times: int) -> Graphs:
        """See `Items`."""
        return self if times == 1 else Graphs(graphs.copies(self.graphs, times), nodes=self.nodes)

    def batch(self, model: nn.Module) -> Any:
        """What the model is called with, on its device; it may write into it."""
        parameter = next(model.parameters(), None)
        batch = self.graphs.clone()
        return graphs.arguments(batch if parameter is None else batch.to(parameter.device), model)

    def with_rows(self, sites: Iterable[Any]) -> Graphs:
        """The same, with the rows that the sites were found for: nodes, if their rows belong together."""
        return Graphs(self.graphs, nodes=all(site.coupled and site.batch_axis == 0 for site in sites))

    def match(self, rows: int) -> None:
        """Let nodes be the rows, if there are so many of these, and not so many graphs."""
        self.nodes = rows != self.graphs.num_graphs and rows == self.graphs.num_nodes

    def owners(self, device: torch.device) -> dict[str, Tensor]:
        """Return the graph of every node, and of every edge where there is one list of edges."""
        batch = self.graphs.batch.to(device)
        edges = getattr(self.graphs, "edge_index", None)
        return {"nodes": batch} if edges is None else {"nodes": batch, "edges": batch[edges[0].to(device)]}

    @property
    def signs(self) -> Tensor:
        """A sign for each node; see `graphs.place_signs`."""
        return graphs.place_signs(self.graphs)


def rows_are_nodes(x: Any) -> bool:
    """Whether each row is a node of a graph: these run together."""
    return isinstance(x, Graphs) and bool(x.nodes)


def as_items(x: Any, collate: Collate, sites: Iterable[Any] | None = None) -> Any:
    """`x` as it is without `collate`; with it, `x` is a list of items, or what can be read like one.

    Graphs of PyTorch Geometric become `Graphs`, whose rows are those of the sites.
    """
    if collate is None:
        batch = None if isinstance(x, (Tensor, Items)) else graphs.as_batch(x)
        x = x if batch is None else Graphs(batch)
        return x.with_rows(sites) if sites is not None and isinstance(x, Graphs) else x
    if isinstance(x, Items):
        return x
    if not callable(collate):
        raise DataError(f"expected collate= to be a function from a list of items to a batch; found {collate!r}.")
    if isinstance(x, Mapping) or not (hasattr(x, "__iter__") or hasattr(x, "__getitem__")):
        raise DataError(
            f"expected a list of items with collate=, one for each row; found {type(x).__name__}. Pass a list, or a "
            "data set with a length."
        )
    if hasattr(x, "__len__") and hasattr(x, "__getitem__") and not is_table(x):
        return Items((x[i] for i in range(len(x))), collate)
    return Items(x, collate)


def batch_of(x: Any, model: nn.Module) -> Any:
    """What the model is given: the batch that items make, all else as it is."""
    return x.batch(model) if isinstance(x, Items) else x


def _is_plain(value: Any) -> bool:
    """Whether something consists of tensors, numbers and words in tuples, lists and dicts."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, *_PLAIN))


def _moved(value: Any, model: nn.Module) -> Any:
    """An object on the model's device, where it can be moved there."""
    if type(value) is tuple:
        return tuple(_moved(item, model) for item in value)
    parameter = next(model.parameters(), None)
    if parameter is None or isinstance(value, Tensor) or not callable(getattr(value, "to", None)):
        return value
    moved = value.to(parameter.device)
    return value if moved is None else moved  # some move themselves in place
