"""Read graphs of PyTorch Geometric: the arguments of the model, the targets, and batches of several graphs.

    calibrate(model, DataLoader(graphs, 64), reference=DataLoader(train_graphs, 64))

A row is a graph, or a node if there is one target per node. The model is called with the batch itself, or with the
attributes that `forward` names: `forward(x, edge_index, batch)`. PyTorch Geometric is imported only when it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.data.arrays import all_finite, check_inputs, floating
from latedrop.errors import DataError
from latedrop.torch_private import bare

__all__ = [
    *("arguments", "as_batch", "batches", "check_finite", "copies", "is_graph", "place_signs", "some", "stand_in"),
    "target_of",
]

_WHOLE = ("batch", "data", "graph", "graphs", "inputs")
"""Parameter names that mean the whole batch, even if the batch has an attribute of that name."""

_INPUTS = ("x", "pos", "edge_attr", "edge_weight")
"""Attributes that are inputs by convention; others may be targets, which are NaN where they are unknown."""


def is_graph(x: Any) -> bool:
    """Return True for a graph, or a batch of graphs, of PyTorch Geometric."""
    return any(kind.__module__.startswith("torch_geometric.data.") for kind in type(x).__mro__) and hasattr(x, "keys")


def as_batch(x: Any) -> Any:
    """Return a graph, a batch of graphs or a list of graphs as a batch; None for any other object."""
    one = is_graph(x)
    graphs = [x] if one else x if isinstance(x, (list, tuple)) else ()
    if not graphs or not all(map(is_graph, graphs)):
        return None
    if hasattr(graphs[0], "node_types"):
        raise DataError(
            "expected graphs with one type of nodes; found HeteroData. Pass a list of them with "
            "batches=Batches(collate=...), a function from the list to the model's input."
        )
    return x if one and _is_batch(x) else _joined(_each(graphs))


def batches(data: Any, size: int) -> Any:
    """Return a graph, a batch or a list of graphs as a list of batches of at most `size`; all else as it is."""
    listed = [data] if is_graph(data) else data
    if not isinstance(listed, (list, tuple)) or not listed or not all(map(is_graph, listed)):
        return data
    if any(hasattr(graph, "node_types") for graph in listed) or (listed is data and all(map(_is_batch, listed))):
        return data
    each = _each(listed)
    return [_joined(each[start : start + size]) for start in range(0, len(each), size)]


def copies(batch: Any, times: int) -> Any:
    """Return one batch that holds `times` copies of a batch, one after the other."""
    joined, count = _joined([batch] * times), batch.num_graphs
    nodes, starts = int(batch.num_nodes), torch.arange(times, device=batch.batch.device)[:, None]
    joined.batch = (batch.batch + count * starts).flatten()
    joined.ptr = torch.cat([(batch.ptr[:-1] + nodes * starts).flatten(), batch.ptr[-1:] * times])
    joined._num_graphs = count * times
    return joined


def check_finite(batch: Any, given: Any) -> None:
    """Raise `DataError` where inputs have NaN or inf; `given` is what the model is called with, see `arguments`."""
    names = [name for name in list(given.keys()) if given is not batch or name in _INPUTS]
    values = {name: value for name in names for value in floating(batch[name])}
    if values and not all_finite(*values.values()):
        each = _each([batch])
        bad = sum(not all_finite(*(graph[name] for name in values)) for graph in each)
        check_inputs([*values.values()], f" in {bad} of {len(each)} graphs", "graphs")


def stand_in(batch: Any) -> Any:
    """Return the first graph of a batch with moderate numbers in place of its own."""
    graph = batch.get_example(0)
    for name in list(graph.keys()):
        for values in floating(graph[name]):
            graph[name] = torch.arange(1.0, values.numel() + 1).sin().abs().reshape(values.shape).to(values)
    return _joined([graph])


def arguments(batch: Any, model: nn.Module) -> Any:
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


def target_of(batch: Any, name: str | Callable[[Any], Any] | None) -> Tensor:
    """Return the targets of a batch: `y`, or the attribute that `unpack=` names."""
    name = name if isinstance(name, str) else "y"
    y = batch[name] if name in set(batch.keys()) else None
    if not isinstance(y, Tensor):
        raise DataError(
            f"expected targets of graphs as their attribute {name!r}; found {sorted(batch.keys())}. Pass "
            "batches=Batches(unpack=name), the name of the targets, or a pair (list of graphs, targets)."
        )
    if y.dim() == 0 or len(y) not in (batch.num_graphs, batch.num_nodes):
        raise DataError(
            f"expected one target for each of {batch.num_graphs} graphs or of their {batch.num_nodes} nodes; found "
            f"shape {tuple(y.shape)}. Several targets of one graph are stored in the shape (1, targets)."
        )
    return y


def place_signs(batch: Any) -> Tensor:
    """Return a pseudo-random sign per node, `(nodes,)`, from its position in its graph; the sum is close to 0."""
    position: Tensor = torch.arange(int(batch.num_nodes), device=batch.batch.device) - batch.ptr[batch.batch]
    return 1.0 - 2.0 * (((position * 2654435761) >> 15) & 1)


def _is_batch(graph: Any) -> bool:
    return hasattr(graph, "num_graphs") and hasattr(graph, "ptr")


def _each(graphs: Iterable[Any]) -> list[Any]:
    """Return single graphs, also those inside of batches."""
    return [each for graph in graphs for each in (graph.to_data_list() if _is_batch(graph) else [graph])]


def _joined(graphs: Iterable[Any]) -> Any:
    library = import_module("torch_geometric.data")
    return library.Batch.from_data_list(list(graphs))


def some(batch: Any, index: slice | Sequence[int]) -> Any:
    """Return a batch of the graphs at `index`, which may repeat."""
    positions = range(batch.num_graphs)[index] if isinstance(index, slice) else index
    return _joined([batch.get_example(i) for i in positions])
