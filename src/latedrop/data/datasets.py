"""Read torch and Hugging Face data sets in batches, and split batches into inputs and targets.

A batch may be a mapping with inputs under the parameter names of `forward` and targets under one of `LABELS`, or under
a name that the user gives. Entries that the model does not take are ignored, as in Hugging Face's `Trainer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from latedrop.data import graphs
from latedrop.data.rows import Collate, Graphs
from latedrop.errors import DataError
from latedrop.torch_private import bare

__all__ = [
    *("LABELS", "Columns", "Unpack", "dataset_batches", "first_inputs", "gives_batches", "inputs_in", "inputs_loaded"),
    *("inputs_of", "is_dataset", "is_loader", "named_inputs", "unpacked"),
]

Unpack = Callable[[Any], "tuple[Any, Any]"] | str
"""Function from a batch to (inputs, targets); if batches are mappings, the key of the targets is enough."""

LABELS = ("labels", "label", "targets", "target", "y")
"""Keys under which the targets of a mapping are looked up by default."""

_ROWS = 256


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
    return isinstance(data, Dataset) or _is_hugging_face(data)


def _is_hugging_face(data: Any) -> bool:
    """Return True for a data set of Hugging Face, or a dict of them."""
    return all(hasattr(data, name) for name in ("with_format", "column_names"))


def dataset_batches(data: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches: those that data are; of a data set as torch's `DataLoader` makes them, or tensors by column."""
    if not is_dataset(data):
        return iter(graphs.batches(data, batch_size))
    if not _is_hugging_face(data):

        def collated(items: list[Any]) -> Any:
            return graphs.as_batch(items) if graphs.is_graph(items[0]) else default_collate(items)

        return iter(DataLoader(data, batch_size=batch_size, collate_fn=collated))
    if isinstance(data, Mapping):
        raise DataError(
            f"expected one data set; found a mapping of {list(data)}. Pass one of them: data[{next(iter(data), '')!r}]."
        )
    kind = (getattr(data, "format", None) or {}).get("type")
    plain = (None, "python", "numpy", "arrow", "pandas", "polars")
    rows = data.with_format("torch") if kind in plain else data
    return (Columns((k, _stacked(v)) for k, v in batch.items()) for batch in rows.iter(batch_size=batch_size))


def _stacked(values: Any) -> Any:
    """Stack a list of tensors if they have the same shape; return other values unchanged."""
    if not isinstance(values, list) or not values or not all(isinstance(value, Tensor) for value in values):
        return values
    return torch.stack(values) if len({value.shape for value in values}) == 1 else values


def named_inputs(batch: Mapping[str, Any], model: nn.Module, name: str | None = None) -> Any:
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


def unpacked(batch: Any, unpack: Unpack | None, model: nn.Module) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; in a mapping, targets are under the key `unpack` or one of `LABELS`."""
    if graphs.is_graph(batch) and not callable(unpack):
        return Graphs(graphs.as_batch(batch)), graphs.target_of(batch, unpack)
    if isinstance(batch, Mapping) and not callable(unpack):
        labels = [key for key in (LABELS if unpack is None else (unpack,)) if batch.get(key) is not None]
        if len(labels) != 1:
            wanted = f"one of {', '.join(LABELS)}" if unpack is None else repr(unpack)
            raise DataError(
                f"expected the targets of a batch under {wanted}; found {labels or 'none'} among its keys "
                f"{list(batch)}. Pass the key of the targets, or a function from a batch to (inputs, "
                "targets), as unpack=."
            )
        return named_inputs(batch, model, labels[0]), batch[labels[0]]
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
    if graphs.is_graph(batch) and not callable(unpack) and collate is None:
        return Graphs(graphs.as_batch(batch))
    if isinstance(unpack, str) and isinstance(batch, Mapping):
        return named_inputs(batch, model, unpack)
    if unpack is not None:
        return unpacked(batch, unpack, model)[0]
    if type(batch) in (dict, Columns) and collate is None:
        return named_inputs(batch, model)
    if collate is not None:
        return batch[0] if isinstance(batch, tuple) and len(batch) == 2 else batch
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return batch
    parameters = inspect.signature(bare(model).forward).parameters.values()
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in taken)
    first, second = batch
    inputs = isinstance(first, (tuple, list)) and all(isinstance(part, Tensor) for part in first)
    if inputs and isinstance(second, Tensor) and len(first) == needed > 1:
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
    loader: Any,
    model: nn.Module,
    batch_size: int,
    take: Callable[[Any], Any] | str | None = None,
    collate: Collate = None,
) -> Iterator[Any]:
    """Yield the inputs of every batch; `take` is a function from a batch to inputs, or the key of the targets."""
    for batch in dataset_batches(loader, batch_size) if is_dataset(loader) else loader:
        if isinstance(take, str) or take is None:
            yield inputs_of(batch, model, take, collate)
        else:
            yield take(batch)


def inputs_loaded(loader: Any, model: nn.Module) -> Iterator[Any]:
    """Yield the inputs of every batch of a loader or data set; raise `DataError` if it is empty."""
    batches = inputs_in(loader, model, _ROWS)
    first = list(islice(batches, 1))
    if not first:
        raise DataError("expected a loader or a data set with at least one batch of rows; found none. Pass more rows.")
    yield from chain(first, batches)


def first_inputs(x: Any, model: nn.Module, collate: Collate = None) -> Any:
    """Return the inputs of the first batch of a loader or data set; return any other `x` unchanged."""
    return next(inputs_loaded(x, model)) if is_loader(x) and collate is None else x
