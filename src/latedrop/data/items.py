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

from latedrop.data.arrays import is_table, map_values, place
from latedrop.errors import DataError

__all__ = ["Collate", "Items", "as_items", "batch_of"]

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


def as_items(x: Any, collate: Collate) -> Any:
    """`x` as it is without `collate`; with it, `x` is a list of items, or what can be read like one."""
    if collate is None or isinstance(x, Items):
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
