"""Validation data as a stream of (inputs, targets): a pair of arrays, or any iterable of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, DataError
from latedrop.forward import from_array, place, row_count, take_rows

__all__ = ["Unpack", "batch_count", "batches", "row_batches"]

Unpack = Callable[[Any], "tuple[Any, Any]"]


def batches(
    data: Any, model: nn.Module, *, batch_size: int = 256, unpack: Unpack | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """Yield `(inputs, targets)` with the inputs on the model's device.

    `data` is a pair `(x, y)` with y a tensor or array, or an iterable of batches, each a pair or what `unpack`
    turns into one.
    """
    if unpack is None and _is_pair(data):
        x, y = place(data[0], model), _target(data[1])
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
        x, y = place(x, model), _target(y)
        _check_rows(x, y)
        if len(y):
            yield x, y


def row_batches(x: Any, batch_size: int) -> Iterator[Any]:
    """Cut inputs with N rows into parts of at most `batch_size` rows."""
    _check_batch_size(batch_size)
    for start in range(0, row_count(x), batch_size):
        yield take_rows(x, slice(start, start + batch_size))


def batch_count(data: Any, batch_size: int) -> int | None:
    """How many batches `batches` will yield, or None where that is not known beforehand."""
    _check_batch_size(batch_size)
    try:
        return -(-len(data[1]) // batch_size) if _is_pair(data) else len(data)
    except TypeError:
        return None


def _is_pair(data: Any) -> bool:
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
    if not isinstance(y, (Tensor, np.ndarray)):
        raise DataError(
            f"expected targets as a tensor or array; found {type(y).__name__}. Convert them, or pass unpack= to do it."
        )
    if isinstance(y, np.ndarray):
        y = from_array(y, "targets")
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
            f"expected one target for each of the {rows} input rows; found targets of shape {tuple(y.shape)}."
        )
