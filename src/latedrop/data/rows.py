"""Count, select and repeat rows: examples along the first axis of every input and of the output.

A tuple or list holds several positional inputs; a mapping holds keyword inputs, or is one input. If rows are objects
(molecules, sequences of any length), `Items` holds them as a list with the function that collates a batch.

`Graphs` holds graphs of PyTorch Geometric, which is imported only when it is used: a row is a graph, or a node if there
is one target per node. The model is called with the batch itself, or with the attributes that `forward` names, as in
`forward(x, edge_index, batch)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.data.arrays import all_finite, check_inputs, floating, is_table, map_values, place
from latedrop.errors import DataError
from latedrop.torch_private import bare

__all__ = [
    *("Collate", "Graphs", "Items", "as_graphs", "as_items", "batch_of", "copied", "distinct_rows", "is_graph"),
    *("map_rows", "operands", "reordered", "reordering", "repeated", "row_count", "rows_are_nodes", "single_graphs"),
    *("some_rows", "stand_in", "take_rows", "tensors"),
]

Collate: TypeAlias = Callable[[list[Any]], Any] | None

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_WHOLE = ("batch", "data", "graph", "graphs", "inputs")
"""Parameter names that mean the whole batch of graphs, even if it has an attribute of that name."""
_INPUTS = ("x", "pos", "edge_attr", "edge_weight")
"""Attributes of graphs that are inputs by convention; others may be targets, which are NaN where they are unknown."""


class Items:
    """Hold a list of items, one for each row, and the function that collates a batch of them."""

    def __init__(self, items: Iterable[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.items, self.collate = list(items), collate
        self._batch: Any = None

    def __len__(self) -> int:
        return len(self.items)

    def at(self, index: slice | Iterable[int]) -> Items:
        """Return the items at a slice or at indices."""
        chosen = self.items[index] if isinstance(index, slice) else [self.items[i] for i in index]
        return Items(chosen, self.collate)

    def repeated(self, times: int) -> Items:
        """Return all items `times` times, one copy after the other."""
        return self.at([*range(len(self))] * times)

    def batch(self, model: nn.Module) -> Any:
        """Collate all items to a batch on the model's device; return a copy, because a model may write into it."""
        if self._batch is None:
            try:
                batch = self.collate(list(self.items))
            except Exception as error:
                raise DataError(
                    f"expected collate= to make a batch of {len(self)} items; it raised {type(error).__name__}: "
                    f"{error}. It is given a list of items, as a DataLoader's collate_fn is."
                ) from error
            batch = place(batch, model)
            if not _is_plain(batch):  # an object of an unknown class, which we cannot copy
                return _moved(batch, model)
            self._batch = batch
        return map_values(self._batch, lambda tensor: tensor.clone())


class Graphs(Items):
    """Hold a batch of graphs of PyTorch Geometric. A row is a graph, or a node if `nodes` is True."""

    def __init__(self, batch: Any, *, nodes: bool | None = None) -> None:
        self.graphs, self.nodes, self._checked = batch, nodes, False

    @property
    def count(self) -> int:
        """The number of graphs."""
        return int(self.graphs.num_graphs)

    def __len__(self) -> int:
        return int(self.graphs.num_nodes) if self.nodes else self.count

    def at(self, index: slice | Iterable[int]) -> Graphs:
        """Return some of the graphs: a slice of them, or those of the rows with these places."""
        places = range(self.count)[index] if isinstance(index, slice) else list(index)
        if self.nodes and not isinstance(index, slice):
            batch = self.graphs.batch.cpu()
            rows = torch.zeros(len(batch), dtype=torch.bool).index_fill(0, torch.tensor(places, dtype=torch.long), True)
            if not torch.equal(self.whole(rows), rows):
                raise DataError(
                    "expected all nodes of a graph, as these act on each other; found some of them. Leave out whole "
                    "graphs, and give no node the weight 0."
                )
            places = batch[rows].unique().tolist()
        return Graphs(_one_batch(self.graphs.get_example(i) for i in places), nodes=self.nodes)

    def repeated(self, times: int) -> Graphs:
        """Return all graphs `times` times, one copy after the other."""
        if times == 1:
            return self
        batch, joined = self.graphs, _one_batch([self.graphs] * times)
        starts = torch.arange(times, device=batch.batch.device)[:, None]
        joined.batch = (batch.batch + self.count * starts).flatten()
        joined.ptr = torch.cat([(batch.ptr[:-1] + int(batch.num_nodes) * starts).flatten(), batch.ptr[-1:] * times])
        joined._num_graphs = self.count * times
        return Graphs(joined, nodes=self.nodes)

    def batch(self, model: nn.Module) -> Any:
        """Return the model's arguments on its device; they are a copy, because a model may write into them."""
        parameter = next(model.parameters(), None)
        batch = self.graphs.clone()
        batch = batch if parameter is None else batch.to(parameter.device)
        given = _arguments(batch, model)
        if not self._checked:
            names = [name for name in list(given.keys()) if given is not batch or name in _INPUTS]
            values = {name: value for name in names for value in floating(batch[name])}
            if values and not all_finite(*values.values()):
                each = single_graphs([batch])
                bad = sum(not all_finite(*(graph[name] for name in values)) for graph in each)
                check_inputs([*values.values()], f" in {bad} of {len(each)} graphs", "graphs")
            self._checked = True
        return given

    def moderated(self, rows: Tensor) -> Graphs:
        """Return all graphs, those of some rows, `(N,)` of bool, with moderate numbers in place of their own."""
        graphs = self.graphs.to_data_list()
        for i in (self.graphs.batch.cpu()[rows].unique() if self.nodes else rows.nonzero()[:, 0]).tolist():
            for name in list(graphs[i].keys()):
                for values in floating(graphs[i][name]):
                    graphs[i][name] = torch.arange(1.0, values.numel() + 1).sin().abs().reshape(values.shape).to(values)
        return Graphs(_one_batch(graphs), nodes=self.nodes)

    def whole(self, rows: Tensor) -> Tensor:
        """Return some rows, `(N,)` of bool, with all others of their graphs."""
        batch = self.graphs.batch.cpu()
        return torch.isin(batch, batch[rows]) if self.nodes else rows

    def with_rows(self, sites: Sequence[Any]) -> Graphs:
        """Return the batch with the kind of rows of the sites: nodes if every site couples its rows along axis 0."""
        coupled = [site.coupled and site.batch_axis == 0 for site in sites]
        return Graphs(self.graphs, nodes=bool(coupled) and all(coupled))

    def match(self, rows: int) -> None:
        """Treat nodes as rows if `rows` is the number of nodes and not that of graphs."""
        self.nodes = rows != self.graphs.num_graphs and rows == self.graphs.num_nodes

    def owners(self, device: torch.device) -> dict[str, Tensor]:
        """Return the graph of every node, and of every edge where there is one list of edges."""
        batch = self.graphs.batch.to(device)
        edges = getattr(self.graphs, "edge_index", None)
        return {"nodes": batch} if edges is None else {"nodes": batch, "edges": batch[edges[0].to(device)]}

    @property
    def signs(self) -> Tensor:
        """A pseudo-random sign for each node, `(nodes,)`, from its place in its graph; their sum is close to 0."""
        batch = self.graphs
        place = torch.arange(int(batch.num_nodes), device=batch.batch.device) - batch.ptr[batch.batch]
        signs: Tensor = 1.0 - 2.0 * (((place * 2654435761) >> 15) & 1)
        return signs


def is_graph(x: Any) -> bool:
    """Return True for a graph, or a batch of graphs, of PyTorch Geometric."""
    return any(kind.__module__.startswith("torch_geometric.data.") for kind in type(x).__mro__) and hasattr(x, "keys")


def as_graphs(x: Any) -> Any:
    """Return a graph, a batch of graphs or a list of graphs as one batch; None for any other object."""
    one = is_graph(x)
    graphs = [x] if one else x if isinstance(x, (list, tuple)) else ()
    if not graphs or not all(map(is_graph, graphs)):
        return None
    if hasattr(graphs[0], "node_types"):
        raise DataError(
            "expected graphs with one type of nodes; found HeteroData. Pass a list of them with "
            "batches=Batches(collate=...), a function from the list to the model's input."
        )
    return x if one and _is_batch(x) else _one_batch(single_graphs(graphs))


def single_graphs(graphs: Iterable[Any]) -> list[Any]:
    """Return single graphs, also those inside of batches."""
    return [each for graph in graphs for each in (graph.to_data_list() if _is_batch(graph) else [graph])]


def _is_batch(graph: Any) -> bool:
    return hasattr(graph, "num_graphs") and hasattr(graph, "ptr")


def _one_batch(graphs: Iterable[Any]) -> Any:
    return import_module("torch_geometric.data").Batch.from_data_list(list(graphs))


def _arguments(batch: Any, model: nn.Module) -> Any:
    """Return the model's arguments: a dict of the batch attributes that `forward` names, or the batch itself."""
    parameters = inspect.signature(bare(model).forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required, known = [p.name for p in named if p.default is p.empty], set(batch.keys())
    if len(required) < 2 and (not required or required[0] in _WHOLE or required[0] not in known):
        return batch
    missing = [name for name in required if name not in known]
    if missing:
        raise DataError(
            f"expected forward() to take a batch of graphs, or parameters named as its attributes {sorted(known)}; "
            f"found {missing}. Rename the parameters, or put the model into a module whose forward takes the batch."
        )
    return {p.name: batch[p.name] for p in named if p.name in known and (p.name != "y" or p.default is p.empty)}


def rows_are_nodes(x: Any) -> bool:
    """Return True if rows are nodes of graphs, which have to run together."""
    return isinstance(x, Graphs) and bool(x.nodes)


def as_items(x: Any, collate: Collate, sites: Sequence[Any] | None = None) -> Any:
    """Wrap a list of items with `collate` as `Items`, and graphs as `Graphs`; return any other `x` unchanged.

    `sites` decide whether the rows of `Graphs` are graphs or nodes, see `Graphs.with_rows`.
    """
    if collate is None:
        batch = None if isinstance(x, (Tensor, Items)) else as_graphs(x)
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
    """Return the model's input: the collated batch of `Items`, or `x` unchanged."""
    return x.batch(model) if isinstance(x, Items) else x


def _is_plain(value: Any) -> bool:
    """Return True if a value consists of tensors, numbers and text in tuples, lists and dicts."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, *_PLAIN))


def _moved(value: Any, model: nn.Module) -> Any:
    """Move an object to the model's device if it has a method `to`."""
    if type(value) is tuple:
        return tuple(_moved(item, model) for item in value)
    parameter = next(model.parameters(), None)
    if parameter is None or isinstance(value, Tensor) or not callable(getattr(value, "to", None)):
        return value
    moved = value.to(parameter.device)
    return value if moved is None else moved  # some objects move in place and return None


def tensors(value: Any, around: tuple[Any, ...] = ()) -> list[Tensor]:
    """Return every tensor inside nested tuples, lists, mappings and dataclasses, in order.

    `around` are the containers that hold the value; a container that holds itself is skipped.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in fields(value))
    else:
        return []
    if any(value is outer for outer in around):
        return []
    return [tensor for item in items for tensor in tensors(item, (*around, value))]


def operands(args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, in order."""
    result: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, (tuple, list, dict)):
            result += tensors(value)
    return result


def row_count(x: Any) -> int:
    """Return the number of examples in `x`: the length of the first tensor that has an axis.

    >>> row_count({"a": torch.zeros(5, 2)})
    5
    """
    if isinstance(x, Items):
        return len(x)
    if isinstance(x, PackedSequence) or (
        isinstance(x, (tuple, list)) and any(isinstance(part, PackedSequence) for part in x)
    ):
        raise DataError(
            "expected inputs whose first axis counts the examples; found a PackedSequence, in which it counts steps. "
            "Pass a list of sequences and collate=: a function from such a list to the model's input."
        )
    for tensor in (x,) if isinstance(x, Tensor) else tensors(x):
        if tensor.dim() > 0:
            return tensor.shape[0]
    if isinstance(x, Iterator):
        raise DataError(
            f"expected inputs that can be read more than once; found a {type(x).__name__}. Pass a DataLoader, a data "
            "set, or arrays."
        )
    if isinstance(x, (list, tuple)) and not x:
        raise DataError("expected inputs with at least one row; found none. Leave out what has no rows.")
    raise DataError(
        "expected inputs with at least one tensor whose first axis counts the examples; "
        f"found {type(x).__name__}. Pass a tensor, a tuple of tensors or a dict of tensors; for a list of objects, "
        "such as graphs, pass collate= too."
    )


def some_rows(x: Any) -> int:
    """Return the number of rows, or raise `DataError` where there is none."""
    count = row_count(x)
    if count == 0:
        raise DataError("expected inputs with at least one row; found none. Leave empty inputs out.")
    return count


def map_rows(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every input in `x` that has as many rows as the first one."""
    count = row_count(x)
    return map_values(x, lambda t: change(t) if t.dim() > 0 and t.shape[0] == count else t)


def take_rows(x: Any, index: slice | list[int]) -> Any:
    """Return the rows at `index` of every input in `x` that has as many rows as the first one."""
    if isinstance(x, Items):
        return x.at(index)
    return map_rows(x, lambda t: t[index])


def stand_in(x: Any, rows: Tensor) -> Any:
    """Replace some rows, `(N,)` of bool, by the first other one, or by zeros where there is none; items stay then."""
    if isinstance(x, Graphs):
        return x.moderated(rows)
    if bool(rows.all()):
        return map_rows(x, torch.zeros_like)
    first = int((~rows).nonzero()[0])
    return take_rows(x, torch.arange(len(rows)).masked_fill(rows, first).tolist())


def repeated(x: Any, times: int) -> Any:
    """Return all rows `times` times in new memory, because a model may write into its inputs."""
    if type(x) is Tensor and times > 1:
        return torch.cat([x] * times)
    if isinstance(x, Items):
        return x if times == 1 else x.repeated(times)
    return map_rows(copied(x) if times == 1 else x, lambda t: torch.cat([t] * times) if times > 1 else t)


def copied(x: Any) -> Any:
    """Return a copy of inputs, which a model may write into."""
    if type(x) is Tensor:
        return x.clone()
    return map_values(x, lambda t: t.clone() if isinstance(t, Tensor) else t)


def distinct_rows(x: Any, count: int) -> Any:
    """Return `count` rows of `x`; if it has fewer, repeat them at half the size, so that they differ."""
    rows = row_count(x)
    index = [i % rows for i in range(count)]
    if isinstance(x, Items):
        return x.at(index)
    halvings = torch.tensor([0.5 ** (i // rows) for i in range(count)])

    def take(tensor: Tensor) -> Tensor:
        taken = tensor[index]
        if not tensor.is_floating_point() or rows >= count:
            return taken
        return taken * halvings.to(taken).reshape(-1, *[1] * (taken.dim() - 1))

    return map_rows(x, take)


def reordering(rows: int) -> list[int]:
    """Return a permutation of rows; with three or more it is neither the reversed order nor a shift by one.

    >>> reordering(3), reordering(5)
    ([1, 0, 2], [3, 4, 2, 1, 0])
    """
    order = list(range(rows)) if rows <= 3 else list(range(rows))[::-1]
    return [*order[1::-1], *order[2:]]


def reordered(x: Any) -> Any:
    """Return all rows in the order of `reordering`."""
    return take_rows(x, reordering(row_count(x)))
