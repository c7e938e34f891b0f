"""Validation data as a stream of (inputs, targets): a pair of arrays, or any iterable of batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, DataError
from latedrop.model.arrays import from_array, from_table, is_table, map_values, place
from latedrop.model.items import Collate, Items, as_items
from latedrop.model.rows import row_count, take_rows
from latedrop.model.wrappers import bare

__all__ = ["Unpack", "batch_count", "batches", "first_rows", "inputs_of", "is_pair", "row_batches"]

Unpack = Callable[[Any], "tuple[Any, Any]"]


def batches(
    data: Any, model: nn.Module, *, batch_size: int = 256, unpack: Unpack | None = None, collate: Collate = None
) -> Iterator[tuple[Any, Tensor]]:
    """Yield `(inputs, targets)` with the inputs on the model's device.

    `data` is a pair `(x, y)` with y a tensor, array or table, or an iterable of batches, each a pair or what `unpack`
    turns into one. With `collate`, inputs are lists of items.
    """
    if isinstance(data, Tensor) or hasattr(data, "__array__"):
        raise DataError(
            f"expected a pair (x, y) or an iterable of batches; found a {type(data).__name__} alone. "
            "Pass inputs and targets together: calibrate(model, (x, y))."
        )
    if unpack is None and is_pair(data):
        x, y = place(as_items(data[0], collate), model), _target(data[1])
        _check_rows(x, y)
        start = 0
        for part in row_batches(x, batch_size):
            yield part, y[start : start + row_count(part)]
            start += row_count(part)
        return
    if not isinstance(data, Iterable):
        raise DataError(
            f"expected a pair (x, y) or an iterable of batches such as a DataLoader; found {type(data).__name__}."
        )
    for batch in data:
        x, y = _unpacked(batch, unpack)
        x, y = place(as_items(x, collate), model), _target(y)
        _check_rows(x, y)
        if len(y):
            yield x, y


def row_batches(x: Any, batch_size: int) -> Iterator[Any]:
    """Cut inputs with N rows into parts of at most `batch_size` rows."""
    _check_batch_size(batch_size)
    rows = row_count(x)
    if 0 < rows <= batch_size:
        yield x
        return
    for start in range(0, rows, batch_size):
        yield take_rows(x, slice(start, start + batch_size))


def first_rows(pair: Any, model: nn.Module, most: int, collate: Collate = None) -> Any:
    """At most so many of the first inputs of a pair (x, y), placed."""
    x, rows = as_items(pair[0], collate), len(pair[1])
    if isinstance(x, Items):
        return x.at(slice(most))
    return place(map_values(x, lambda v: v[:most] if getattr(v, "ndim", 2) and len(v) == rows else v), model)


def inputs_of(batch: Any, model: nn.Module, unpack: Unpack | None = None, collate: Collate = None) -> Any:
    """The inputs in a batch: all of it, or the first part where it can only be a pair (inputs, targets).

    With `unpack`, the first part of what it gives; with `collate`, a list of items, or a tuple of it and targets.

    A pair is two inputs where `forward` needs two, and inputs with targets where it takes but one. In between, which is
    meant cannot be seen, and guessing wrong would go unnoticed.
    """
    if unpack is not None:
        return _unpacked(batch, unpack)[0]
    if collate is not None:
        return batch[0] if isinstance(batch, tuple) and len(batch) == 2 else batch
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return batch
    parameters = inspect.signature(bare(model).forward).parameters.values()
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or sum(p.default is p.empty for p in taken) > 1:
        return batch
    if len(taken) < 2:
        return batch[0]
    raise DataError(
        f"expected batches of inputs; found a pair, and the model's second input, {taken[1].name!r}, may be left out: "
        "the second part could be an input or a target. Pass unpack=lambda batch: batch[0] if it is a target, "
        "unpack=lambda batch: batch if it is an input; or batches of inputs alone."
    )


def batch_count(data: Any, batch_size: int) -> int | None:
    """How many batches `batches` will yield, or None where that is not known beforehand."""
    _check_batch_size(batch_size)
    try:
        return -(-len(data[1]) // batch_size) if is_pair(data) else len(data)
    except TypeError:
        return None


def is_pair(data: Any) -> bool:
    """Whether `data` is one pair (x, y), and not two batches; y may still be a list or a table, to be refused later."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and any(hasattr(part, "__array__") for part in data)


def _check_batch_size(batch_size: Any) -> None:
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
        raise ArgumentError(f"expected a batch size of at least 1; found {batch_size!r}.")


def _unpacked(batch: Any, unpack: Unpack | None) -> tuple[Any, Any]:
    pair = unpack(batch) if unpack is not None else batch
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        found = f"{type(pair).__name__} of {len(pair)}" if hasattr(pair, "__len__") else type(pair).__name__
        raise DataError(
            f"expected every batch to be a pair (inputs, targets); found {found}. "
            "Pass unpack=, a function from a batch to such a pair."
        )
    return pair[0], pair[1]


def _target(y: Any) -> Tensor:
    if not isinstance(y, (Tensor, np.ndarray)) and not is_table(y):
        raise DataError(
            f"expected targets as a tensor, array or table; found {type(y).__name__}. Convert them, or pass unpack= to "
            "do it."
        )
    if not isinstance(y, Tensor):
        y = from_table(y, "targets") if is_table(y) else from_array(y, "targets")
    if y.is_complex():
        raise DataError(f"expected real targets; found {y.dtype}.")
    if not bool(torch.isfinite(y).all()):
        raise DataError(
            f"expected finite targets; found {int((~torch.isfinite(y)).sum())} NaN or inf among {y.numel()}. "
            "Drop or impute these rows."
        )
    target: Tensor = y.detach()
    return target


def _check_rows(x: Any, y: Tensor) -> None:
    rows = row_count(x)
    if y.dim() == 0 or len(y) != rows:
        raise DataError(
            f"expected one target for each of the {rows} input rows; found targets of shape {tuple(y.shape)}. Where a "
            "row is no entry of a tensor, as a graph of several nodes, pass a list of items and collate=."
        )
