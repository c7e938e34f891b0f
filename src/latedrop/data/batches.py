"""Read data: pairs of arrays or tables, batches, and data sets of torch or Hugging Face, with or without targets.

A batch may be a mapping with inputs under the parameter names of `forward` and targets under one of `LABELS`, or under
a name that the user gives. Entries that the model does not take are ignored, as in Hugging Face's `Trainer`.

A calibration stores the names of its input and target columns. Later tables are reordered to this order; missing or
additional columns are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from latedrop.data.arrays import from_array, from_table, is_table, place
from latedrop.data.rows import (
    Collate,
    Graphs,
    as_graphs,
    as_items,
    is_graph,
    row_count,
    single_graphs,
    take_rows,
)
from latedrop.errors import ArgumentError, DataError
from latedrop.options import check_options, shown
from latedrop.terminal import listed
from latedrop.torch_private import bare

__all__ = [
    *("Batches", "Columns", "Labelled", "Names", "Unpack", "as_target", "dataset_batches", "first_inputs"),
    *("gives_batches", "in_order", "inputs_in", "inputs_loaded", "inputs_of", "is_dataset", "is_loader", "is_pair"),
    *("names_of", "row_batches", "row_total"),
]

Unpack = Callable[[Any], "tuple[Any, Any]"] | str
"""Function from a batch to (inputs, targets); if batches are mappings, the key of the targets is enough."""

LABELS = ("labels", "label", "targets", "target", "y")
"""Keys under which the targets of a mapping are looked up by default."""

Names = Mapping[str, Sequence[str]]
"""Column names under the keys `inputs` and `targets`; a key is missing if its names are unknown."""

_SHOWN = 6


@dataclass(frozen=True)
class Batches:
    """Set how validation data are read, batch by batch.

    Attributes:
        size: number of rows that run at once, for a pair of arrays or a data set.
        unpack: function from one batch of an iterable to `(inputs, targets)`, also used for reference batches; if
            batches are mappings, the key of the targets is enough.
        collate: function from a list of items (such as graphs) to the model's input batch. The predictor then takes
            lists of items, too.
    """

    size: int = 256
    unpack: Unpack | None = None
    collate: Collate = None

    def __post_init__(self) -> None:
        _check_size(self.size)
        check_options(self)

    def read(self, data: Any, model: nn.Module) -> Labelled:
        """Read batches of inputs on the model's device, with their targets.

        `data` is a pair `(x, y)` with y a tensor, array or table, a data set of torch or Hugging Face, or an iterable
        of batches, each a pair, a mapping, or an object that `unpack` turns into a pair. With `collate`, inputs
        are lists of items.
        """
        return Labelled(data, model, self)


class Labelled:
    """Yield `(inputs, targets)` of data batch by batch, once, with the inputs on the model's device.

    Attributes:
        row_total: number of rows, or None if the data do not say it.
    """

    def __init__(self, data: Any, model: nn.Module, how: Batches) -> None:
        alone = isinstance(data, Tensor) or hasattr(data, "__array__")
        if not is_dataset(data) and (alone or isinstance(data, (str, Mapping)) or not isinstance(data, Iterable)):
            remedy = "inputs and targets together, (x, y)" if alone else "one batch as a list of one, [batch]"
            raise DataError(
                f"expected a pair (x, y) or an iterable of batches, such as a DataLoader; found a "
                f"{type(data).__name__}. Pass {remedy}."
            )
        self.row_total = row_total(data)
        self._size = how.size if how.unpack is None and is_pair(data) else None
        self._first: tuple[Any, Tensor] | None = None
        self._rest = self._read(data, model, how)

    def _read(self, data: Any, model: nn.Module, how: Batches) -> Iterator[tuple[Any, Tensor]]:
        for batch in dataset_batches(data, how.size) if self._size is None else [data]:
            x, y = batch if self._size is not None else _unpacked(batch, how.unpack, model)
            x, y = place(as_items(x, how.collate), model), as_target(y)
            _check_rows(x, y)
            yield x, y

    def first(self, most: int) -> tuple[Any, Tensor] | None:
        """Return at most `most` inputs of a pair or of the first batch with rows, and all its targets; None if empty.

        They are yielded later all the same.
        """
        if self._first is None:
            self._first = next((batch for batch in self._rest if len(batch[1])), None)
        return None if self._first is None else (take_rows(self._first[0], slice(most)), self._first[1])

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        first, self._first = self._first, None
        for x, y in self._rest if first is None else chain([first], self._rest):
            start = 0
            for part in [x] * bool(len(y)) if self._size is None else row_batches(x, self._size):
                yield part, y[start : start + row_count(part)]
                start += row_count(part)


def row_batches(x: Any, batch_size: int) -> Iterator[Any]:
    """Cut inputs with N rows into parts of at most `batch_size` rows."""
    if type(batch_size) is not int or batch_size < 1:
        _check_size(batch_size)
    rows = x.count if isinstance(x, Graphs) else row_count(x)  # a graph stays in one piece
    if 0 < rows <= batch_size:
        yield x
    else:
        for start in range(0, rows, batch_size):
            yield take_rows(x, slice(start, start + batch_size))


def row_total(data: Any) -> int | None:
    """Return the largest number of rows that `data` can yield, or None if it is not known beforehand.

    For a `DataLoader` it is the length of its `dataset`; other iterables may have an attribute `row_total`.
    """
    try:
        return len(data[1] if is_pair(data) else data if is_dataset(data) else data.dataset)
    except (TypeError, AttributeError):
        return getattr(data, "row_total", None)


def is_pair(data: Any) -> bool:
    """Return True if `data` is one pair (x, y), not two batches; y may still be a list, which is refused later."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and any(hasattr(part, "__array__") for part in data)


def _check_size(batch_size: Any) -> None:
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
        raise ArgumentError(f"expected a batch size of at least 1; found {shown(batch_size)}.")


def as_target(y: Any) -> Tensor:
    """Convert targets to a tensor of finite real numbers, or raise `DataError`."""
    if not isinstance(y, (Tensor, np.ndarray)) and not is_table(y):
        raise DataError(
            f"expected targets as a tensor, array or table; found {type(y).__name__}. Convert them, or pass unpack= to "
            "do it."
        )
    if not isinstance(y, Tensor):
        y = from_table(y, "targets", whole=True) if is_table(y) else from_array(y, "targets")
    if y.is_complex():
        raise DataError(f"expected real targets; found {y.dtype}.")
    if not bool(torch.isfinite(y).all()):
        raise DataError(
            f"expected finite targets; found {int((~torch.isfinite(y)).sum())} NaN or inf among {y.numel()}. "
            "Drop or impute these rows."
        )
    target: Tensor = y.detach()
    return target.long() if target.dtype == torch.bool else target


def _check_rows(x: Any, y: Tensor) -> None:
    if isinstance(x, Graphs) and y.dim():
        x.match(len(y))
    rows = row_count(x)
    if y.dim() == 0 or len(y) != rows:
        raise DataError(
            f"expected one target for each of the {rows} input rows; found targets of shape {tuple(y.shape)}. If a "
            "row is not one entry of a tensor, such as a graph of several nodes, pass a list of items and collate=."
        )


class Columns(dict[str, Any]):
    """Hold a batch of columns by name; the class marks mappings that were made here, not by the user."""


def is_loader(data: Any) -> bool:
    """Return True for a `DataLoader` or a data set, which yield batches of rows."""
    return not isinstance(data, Tensor) and (isinstance(data, DataLoader) or is_dataset(data))


def gives_batches(data: Any) -> bool:
    """Return True for a loader, a data set or an iterator (which yields its batches only once)."""
    return is_loader(data) or isinstance(data, Iterator)


def is_dataset(data: Any) -> bool:
    """Return True for a data set of torch or Hugging Face, which has to be cut into batches."""
    return isinstance(data, Dataset) or hasattr(data, "with_format")


def dataset_batches(data: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches: those that data are; of a data set as torch's `DataLoader` makes them, or tensors by column."""
    if not is_dataset(data):
        return iter(_graph_batches(data, batch_size))
    if not hasattr(data, "with_format"):
        return iter(DataLoader(data, batch_size=batch_size, collate_fn=_collated))
    if isinstance(data, Mapping):
        raise DataError(
            f"expected one data set; found a mapping of {list(data)}. Pass one of them: data[{next(iter(data), '')!r}]."
        )
    kind = (getattr(data, "format", None) or {}).get("type")
    plain = (None, "python", "numpy", "arrow", "pandas", "polars")
    rows = data.with_format("torch") if kind in plain else data
    return (Columns((k, _stacked(v)) for k, v in batch.items()) for batch in rows.iter(batch_size=batch_size))


def _collated(items: list[Any]) -> Any:
    return as_graphs(items) if is_graph(items[0]) else default_collate(items)


def _graph_batches(data: Any, size: int) -> Any:
    """Return a graph, a batch or a list of graphs as a list of batches of at most `size`; all else as it is."""
    graphs = [data] if is_graph(data) else data
    if not isinstance(graphs, (list, tuple)) or not graphs or not all(map(is_graph, graphs)):
        return data
    if any(hasattr(g, "node_types") for g in graphs) or (graphs is data and all(hasattr(g, "ptr") for g in graphs)):
        return data
    each = single_graphs(graphs)
    return [as_graphs(each[start : start + size]) for start in range(0, len(each), size)]


def _graphs_and_targets(batch: Any, name: str | None) -> tuple[Graphs, Tensor]:
    """Return graphs with their targets: `y`, or the attribute that `unpack=` names."""
    x, name = Graphs(as_graphs(batch)), name or "y"
    y = batch[name] if name in set(batch.keys()) else None
    if not isinstance(y, Tensor):
        raise DataError(
            f"expected targets of graphs as their attribute {name!r}; found {sorted(batch.keys())}. Pass "
            "batches=Batches(unpack=name), the name of the targets, or a pair (list of graphs, targets)."
        )
    if y.dim() == 0 or len(y) not in (x.count, x.graphs.num_nodes):
        raise DataError(
            f"expected one target for each of {x.count} graphs or of their {x.graphs.num_nodes} nodes; found "
            f"shape {tuple(y.shape)}. Several targets of one graph are stored in the shape (1, targets)."
        )
    return x, y


def _stacked(values: Any) -> Any:
    """Stack a list of tensors if they have the same shape; return other values unchanged."""
    if not isinstance(values, list) or not values or not all(isinstance(value, Tensor) for value in values):
        return values
    return torch.stack(values) if len({value.shape for value in values}) == 1 else values


def _named_inputs(batch: Mapping[str, Any], model: nn.Module, name: str | None = None) -> Any:
    """Return the inputs of a mapping, without targets: the entries that `forward` names, or the only entry.

    If `forward` names none of several entries, the mapping itself is the input; for `Columns` this is an error.
    """
    parameters = inspect.signature(bare(model).forward).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty}
    labels = {*LABELS, name} - required
    rest = {key: value for key, value in batch.items() if key not in labels}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return rest
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if set(batch) <= known - labels:
        return batch
    if known & set(rest):
        return {key: value for key, value in rest.items() if key in known}
    if len(rest) == 1 and (len(batch) > 1 or isinstance(batch, Columns)):
        return next(iter(rest.values()))
    if not isinstance(batch, Columns):
        return rest if len(rest) < len(batch) else batch
    raise DataError(
        f"expected keys of a batch among the inputs of the model, {sorted(known)}; found {list(rest)}. Rename "
        "the columns to these names, or pass a function as unpack= to calibrate and predict_batches."
    )


def _unpacked(batch: Any, unpack: Unpack | None, model: nn.Module) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; in a mapping, targets are under the key `unpack` or one of `LABELS`."""
    if is_graph(batch) and not callable(unpack):
        return _graphs_and_targets(batch, unpack)
    if isinstance(batch, Mapping) and not callable(unpack):
        labels = [key for key in (LABELS if unpack is None else (unpack,)) if batch.get(key) is not None]
        if len(labels) != 1:
            wanted = f"one of {', '.join(LABELS)}" if unpack is None else repr(unpack)
            raise DataError(
                f"expected the targets of a batch under {wanted}; found {labels or 'none'} among its keys "
                f"{list(batch)}. Pass the key of the targets, or a function from a batch to (inputs, "
                "targets), as unpack=."
            )
        return _named_inputs(batch, model, labels[0]), batch[labels[0]]
    if isinstance(unpack, str):
        raise DataError(
            f"expected batches that are mappings, with the targets under {unpack!r}; found {type(batch).__name__}. "
            "Pass a function as unpack=."
        )
    pair = unpack(batch) if unpack is not None else batch
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        shape = f"{type(pair).__name__} of {len(pair)}" if hasattr(pair, "__len__") else type(pair).__name__
        raise DataError(
            f"expected every batch to be a pair (inputs, targets); found {shape}. "
            "Pass unpack=, a function from a batch to such a pair."
        )
    return pair[0], pair[1]


def inputs_of(batch: Any, model: nn.Module, unpack: Unpack | None = None, collate: Collate = None) -> Any:
    """Return the inputs of a batch: the whole batch, or its first part if it must be a pair (inputs, targets).

    For a mapping, return the entries that the model takes; with `unpack`, the first part of its result. With `collate`,
    the batch is a list of items, or a tuple of such a list and targets.

    A pair is two inputs if `forward` requires two or more, and inputs with targets if it takes only one. Raise
    `DataError` if the second input is optional, because a wrong guess would go unnoticed.
    """
    if collate is None and not callable(unpack) and is_graph(batch):
        return as_items(batch, None)
    name = unpack if isinstance(unpack, str) else None
    plain = type(batch) in (dict, Columns) and collate is None and unpack is None
    if plain or (isinstance(batch, Mapping) and name is not None):
        return _named_inputs(batch, model, name)
    if unpack is not None:
        return _unpacked(batch, unpack, model)[0]
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return batch
    if collate is not None:
        return batch[0] if isinstance(batch, tuple) else batch
    parameters = inspect.signature(bare(model).forward).parameters.values()
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in taken)
    first, second = batch
    several = isinstance(first, (tuple, list)) and all(isinstance(part, Tensor) for part in first)
    if several and isinstance(second, Tensor) and len(first) == needed > 1:
        return tuple(first)  # ((a, b), targets)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or needed > 1:
        return batch
    if len(taken) < 2:
        return first
    raise DataError(
        f"expected batches of inputs; found a pair, and the model's second input, {taken[1].name!r}, is optional, so "
        "the second part could be an input or a target. Pass batches of inputs alone, or pass to "
        "predict_batches unpack=lambda batch: batch[0] for a target, unpack=lambda batch: batch for an input."
    )


def inputs_in(
    loader: Any, model: nn.Module, size: int, take: Callable[[Any], Any] | str | None = None, collate: Collate = None
) -> Iterator[Any]:
    """Yield the inputs of every batch; `take` is a function from a batch to inputs, or the key of the targets."""
    for batch in dataset_batches(loader, size) if is_dataset(loader) else loader:
        yield take(batch) if callable(take) else inputs_of(batch, model, take, collate)


def inputs_loaded(loader: Any, model: nn.Module) -> Iterator[Any]:
    """Yield the inputs of every batch of a loader or data set; raise `DataError` if it is empty."""
    empty = True
    for inputs in inputs_in(loader, model, Batches.size):
        empty = False
        yield inputs
    if empty:
        raise DataError("expected a loader or a data set with at least one batch of rows; found none. Pass more rows.")


def first_inputs(x: Any, model: nn.Module, collate: Collate = None) -> Any:
    """Return the inputs of the first batch of a loader or data set; return any other `x` unchanged."""
    return next(inputs_loaded(x, model)) if is_loader(x) and collate is None else x


def names_of(data: Any) -> dict[str, tuple[str, ...]] | None:
    """Return the column names of a pair `(x, y)`; None if neither has any. Names with duplicates are ignored.

    >>> import pandas
    >>> names_of((pandas.DataFrame({"a": [1.0], "b": [2.0]}), pandas.Series([3.0], name="price")))
    {'inputs': ('a', 'b'), 'targets': ('price',)}
    """
    if not is_pair(data):
        return None
    named = {key: _columns(part) for key, part in zip(("inputs", "targets"), data, strict=True)}
    return {key: names for key, names in named.items() if names and len(set(names)) == len(names)} or None


def in_order(x: Any, names: Names | None, key: str = "inputs") -> Any:
    """Return a data frame with its columns in the order of `names`; return any other `x` unchanged.

    Raise `DataError` if columns are missing, or if there are others.

    >>> import pandas
    >>> list(in_order(pandas.DataFrame({"b": [2.0], "a": [1.0]}), {"inputs": ("a", "b")}).columns)
    ['a', 'b']
    """
    known, given = list((names or {}).get(key, ())), list(_columns(x) if hasattr(x, "columns") else ())
    if not known or not given or given == known:
        return x
    missing, more = [name for name in known if name not in given], [name for name in given if name not in known]
    if missing or more or len(given) != len(known):
        wrong = [f"without {listed(map(repr, missing), _SHOWN)}"] if missing else []
        wrong += [f"with {listed(map(repr, more), _SHOWN)} besides"] if more else []
        raise DataError(
            f"expected the {key} in the columns that the calibration was made with, "
            f"{listed(map(repr, known), _SHOWN)}; found a table {' and '.join(wrong) or 'with columns twice'}. Select "
            "these columns; their order does not matter."
        )
    return x[known]


def _columns(table: Any) -> tuple[str, ...]:
    """Return the column names of a table or the name of a series; empty if one is not a non-empty string."""
    if not is_table(table):
        return ()
    names = tuple(table.columns) if hasattr(table, "columns") else (getattr(table, "name", None),)
    return names if all(isinstance(name, str) and name for name in names) else ()
