"""Data sets as batches: those of torch, those of Hugging Face's `datasets`, and batches that are mappings.

A batch that is a mapping holds the inputs by the names of `forward`'s parameters, and the targets under one of
`LABELS`, or under the name that the user gives. Entries that the model does not take are left out, as Hugging Face's
`Trainer` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from latedrop.errors import DataError
from latedrop.model.wrappers import bare

__all__ = ["LABELS", "Columns", "dataset_batches", "is_dataset", "is_loader", "labels_apart", "named_inputs"]

LABELS = ("labels", "label", "targets", "target", "y")
"""Names that targets have in a batch that is a mapping, unless the user says another."""


class Columns(dict[str, Any]):
    """A batch of columns by their names, which is nobody's own kind of input."""


def is_loader(data: Any) -> bool:
    """Whether something gives batches of rows, and is no rows itself: a `DataLoader`, or a data set."""
    return isinstance(data, DataLoader) or is_dataset(data)


def is_dataset(data: Any) -> bool:
    """Whether something is a data set of torch or of Hugging Face, which is cut into batches here."""
    return isinstance(data, Dataset) or _is_hugging_face(data)


def _is_hugging_face(data: Any) -> bool:
    return all(hasattr(data, name) for name in ("with_format", "column_names"))


def dataset_batches(data: Any, batch_size: int) -> Iterator[Any]:
    """The rows of a data set in batches: as torch's `DataLoader` makes them, or columns of tensors by their names."""
    if not _is_hugging_face(data):
        return iter(DataLoader(data, batch_size=batch_size))
    if isinstance(data, Mapping):
        raise DataError(
            f"expected one data set; found a mapping of {list(data)}. Pass one of them: data[{next(iter(data), '')!r}]."
        )
    kind = (getattr(data, "format", None) or {}).get("type")
    found = data.with_format("torch") if kind in (None, "python", "numpy", "arrow", "pandas", "polars") else data
    return (Columns((k, _stacked(v)) for k, v in batch.items()) for batch in found.iter(batch_size=batch_size))


def _stacked(values: Any) -> Any:
    """Rows that came one by one as one tensor, where they are of one shape."""
    if not isinstance(values, list) or not values or not all(isinstance(value, Tensor) for value in values):
        return values
    return torch.stack(values) if len({value.shape for value in values}) == 1 else values


def labels_apart(batch: Mapping[str, Any], model: nn.Module, name: str | None = None) -> tuple[Any, Any]:
    """Inputs and targets of a batch that is a mapping; the targets are called `name`, or one of `LABELS`."""
    found = [key for key in (LABELS if name is None else (name,)) if batch.get(key) is not None]
    if len(found) != 1:
        wanted = f"one of {', '.join(LABELS)}" if name is None else repr(name)
        raise DataError(
            f"expected the targets of a batch under {wanted}; found {found or 'none'} among its keys {list(batch)}. "
            "Pass unpack=, the name of the targets, or a function from a batch to (inputs, targets)."
        )
    return named_inputs(batch, model, found[0]), batch[found[0]]


def named_inputs(batch: Mapping[str, Any], model: nn.Module, name: str | None = None) -> Any:
    """The inputs in a batch that is a mapping, without the targets: those that the model knows, or the only one.

    A model that knows none of several takes the mapping as it is, as one argument; of columns that is an error.
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
        f"expected keys of a batch among the inputs of the model, {sorted(known)}; found {list(rest)}. Pass unpack=, a "
        "function that takes the inputs out of a batch, or name the columns as forward does."
    )
