"""Rows: the first axis of every input and of the output counts the examples.

A tuple or list is several positional inputs; a mapping is keyword inputs, or one dict. Of `Items` each is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from latedrop.data.arrays import map_values
from latedrop.data.items import Items
from latedrop.errors import DataError

__all__ = [
    "copied",
    "distinct_rows",
    "map_rows",
    "operands",
    "reordered",
    "reordering",
    "repeated",
    "replaced",
    "row_count",
    "some_rows",
    "take_rows",
    "tensors",
]


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside nested tuples, lists, mappings and dataclasses, in order."""
    found: list[Tensor] = []
    _collect(value, found, [])
    return found


def _collect(value: Any, found: list[Tensor], around: list[Any]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in fields(value))
    else:
        return
    if not any(value is outer for outer in around):  # something may hold itself
        around.append(value)
        for item in items:
            _collect(item, found, around)
        around.pop()


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
    """Number of examples in `x`: the length of the first tensor that has an axis.

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
            "Pass a list of sequences and collate=: a function from such a list to what the model takes."
        )
    for tensor in (x,) if isinstance(x, Tensor) else tensors(x):
        if tensor.dim() > 0:
            return tensor.shape[0]
    if isinstance(x, Iterator):
        raise DataError(
            f"expected inputs that can be read more than once; found a {type(x).__name__}. Pass a DataLoader, a data "
            "set, or arrays."
        )
    raise DataError(
        "expected inputs with at least one tensor whose first axis counts the examples; "
        f"found {type(x).__name__}. Pass a tensor, a tuple of tensors or a dict of tensors; for a list of objects, "
        "such as graphs, pass collate= too."
    )


def some_rows(x: Any) -> int:
    """The same, or `DataError` where there is none."""
    count = row_count(x)
    if count == 0:
        raise DataError("expected inputs with at least one row; found none. Leave out what has no rows.")
    return count


def map_rows(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every input in `x` that has as many rows as the first one."""
    count = row_count(x)
    return map_values(x, lambda t: change(t) if t.dim() > 0 and t.shape[0] == count else t)


def take_rows(x: Any, index: slice | list[int]) -> Any:
    """The rows `index` of every input in `x` that has as many rows as the first one."""
    if isinstance(x, Items):
        return x.at(index)
    return map_rows(x, lambda t: t[index])


def repeated(x: Any, times: int) -> Any:
    """All rows, one time after the other, in memory of their own: a model may write into its inputs."""
    if type(x) is Tensor and times > 1:
        return torch.cat([x] * times)
    if isinstance(x, Items):
        return x if times == 1 else x.repeated(times)
    return map_rows(copied(x) if times == 1 else x, lambda t: torch.cat([t] * times) if times > 1 else t)


def copied(x: Any) -> Any:
    """Inputs that a model may write into."""
    if type(x) is Tensor:
        return x.clone()
    return map_values(x, lambda t: t.clone() if isinstance(t, Tensor) else t)


def replaced(x: Any, rows: Tensor, other: Any) -> Any:
    """`x` with `other`, a single row, in the place of some `rows`, `(N,)` of bool."""
    if isinstance(x, Items):
        return Items([*x.items, *other.items], x.collate).at([-1 if gone else i for i, gone in enumerate(rows)])
    ones: list[Tensor] = []
    map_values(other, ones.append)
    each, count = iter(ones), row_count(x)

    def change(t: Tensor) -> Tensor:
        one = next(each)
        return torch.where(rows.to(t.device).reshape(-1, *[1] * (t.dim() - 1)), one, t) if len(t) == count else t

    return map_values(x, lambda t: change(t) if t.dim() > 0 else (next(each), t)[1])


def distinct_rows(x: Any, count: int) -> Any:
    """`count` rows of `x`; where it has fewer, they repeat at half the size to be told apart."""
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
    """Return another order of some rows, which a model that turns them around or moves them on by one would change.

    >>> reordering(3), reordering(5)
    ([1, 0, 2], [3, 4, 2, 1, 0])
    """
    order = list(range(rows)) if rows <= 3 else list(range(rows))[::-1]
    return [*order[1::-1], *order[2:]]


def reordered(x: Any) -> Any:
    """Return all rows in that order."""
    return take_rows(x, reordering(row_count(x)))
