"""Read validation data as a stream of (inputs, targets): a pair of arrays, a data set, or an iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.data.arrays import (
    from_array,
    from_table,
    is_table,
    map_values,
    place,
)
from latedrop.data.datasets import Unpack, dataset_batches, is_dataset, unpacked
from latedrop.data.rows import Collate, Graphs, Items, as_items, row_count, take_rows
from latedrop.errors import ArgumentError, DataError
from latedrop.options import check_options, shown

__all__ = ["Batches", "Peeked", "as_target", "first_rows", "is_pair", "row_batches", "row_total"]


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

    def read(self, data: Any, model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
        """Yield `(inputs, targets)` with the inputs on the model's device.

        `data` is a pair `(x, y)` with y a tensor, array or table, a data set of torch or Hugging Face, or an iterable
        of batches, each a pair, a mapping, or an object that `unpack` turns into a pair. With `collate`, inputs
        are lists of items.
        """
        if isinstance(data, Tensor) or hasattr(data, "__array__"):
            raise DataError(
                f"expected a pair (x, y) or an iterable of batches; found a {type(data).__name__} alone. "
                "Pass inputs and targets together: calibrate(model, (x, y))."
            )
        if isinstance(data, (str, Mapping)) and not is_dataset(data):
            raise DataError(
                f"expected a pair (x, y) or an iterable of batches; found a {type(data).__name__}. Pass one batch as a "
                "list of one, [batch]."
            )
        if self.is_one_pair(data):
            x, y = place(as_items(data[0], self.collate), model), as_target(data[1])
            _check_rows(x, y)
            start = 0
            for part in row_batches(x, self.size):
                yield part, y[start : start + row_count(part)]
                start += row_count(part)
            return
        if not is_dataset(data) and not isinstance(data, Iterable):
            raise DataError(
                f"expected a pair (x, y) or an iterable of batches such as a DataLoader; found {type(data).__name__}."
            )
        for batch in dataset_batches(data, self.size):
            x, y = unpacked(batch, self.unpack, model)
            x, y = place(as_items(x, self.collate), model), as_target(y)
            _check_rows(x, y)
            if len(y):
                yield x, y

    def is_one_pair(self, data: Any) -> bool:
        """Return True if data is one pair `(x, y)` of all rows, and not an iterable of batches."""
        return self.unpack is None and is_pair(data)


class Peeked:
    """Hold batches whose first one has been read already, and iterate over all of them once."""

    def __init__(self, data: Any, batch_size: int) -> None:
        self._all, self._rest = data, dataset_batches(data, batch_size)
        self.first = next(self._rest, None)

    def __iter__(self) -> Iterator[Any]:
        return self._rest if self.first is None else chain([self.first], self._rest)

    @property
    def row_total(self) -> int | None:
        """Return the number of rows, or None if the data do not say it."""
        return row_total(self._all)


def row_batches(x: Any, batch_size: int) -> Iterator[Any]:
    """Cut inputs with N rows into parts of at most `batch_size` rows."""
    _check_size(batch_size)
    if isinstance(x, Graphs):
        yield from x.parts(batch_size)
        return
    rows = row_count(x)
    if 0 < rows <= batch_size:
        yield x
        return
    for start in range(0, rows, batch_size):
        yield take_rows(x, slice(start, start + batch_size))


def first_rows(pair: Any, model: nn.Module, most: int, collate: Collate = None) -> Any:
    """Return the first inputs of a pair (x, y), at most `most`, on the model's device."""
    x, rows = as_items(pair[0], collate), len(pair[1])
    if isinstance(x, Graphs):
        x.match(rows)
    if isinstance(x, Items):
        return x.at(slice(most))
    return place(map_values(x, lambda v: v[:most] if getattr(v, "ndim", 2) and len(v) == rows else v), model)


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
