"""Convert arrays, tables and tensors to inputs on the device and in the dtype of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.errors import DataError
from latedrop.torch_private import being_traced

__all__ = [
    *("all_finite", "any_true", "apart", "check_dtypes", "check_inputs", "constants", "first_weight", "floating"),
    *("from_array", "from_table", "is_table", "map_values", "place", "widened"),
]


def place(x: Any, model: nn.Module | Tensor, *, check: bool = True, cut: bool = False) -> Any:
    """Move inputs to the device of a model or weight; convert numpy arrays, tables and float64 tensors to its dtype.

    With `check`, raise `DataError` if a floating input has NaN or inf. Also raise it for numbers beyond the range of
    the dtype; with `cut` they are clamped to the range, unless every row has one.
    """
    parameter = model if isinstance(model, Tensor) else first_weight(model)
    device = parameter.device if parameter is not None else torch.device("cpu")

    def move(value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            value = from_table(value, "inputs") if is_table(value) else from_array(value, "inputs")
            convert = value.is_floating_point()
        else:
            convert = value.dtype == torch.float64  # the default of numpy; other dtypes were chosen by the user
        if convert and parameter is not None and value.dtype != parameter.dtype:
            value = _converted(value, parameter.dtype, cut)
        moved: Tensor = value if value.device == device else value.to(device)
        return moved.resolve_conj().resolve_neg() if moved.is_neg() or moved.is_conj() else moved

    placed = move(x) if isinstance(x, Tensor) else map_values(x, move)
    if check:
        check_inputs([placed] if isinstance(x, Tensor) and placed.is_floating_point() else floating(placed))
    return placed


def floating(x: Any) -> list[Tensor]:
    """Return the floating tensors among placed inputs."""
    if isinstance(x, Tensor):
        return [x] if x.is_floating_point() else []
    values: list[Tensor] = []
    map_values(x, lambda value: values.extend(floating(value)))
    return values


def check_inputs(inputs: Sequence[Tensor], where: str = "", leave: str = "rows") -> None:
    """Raise `DataError` where an input has NaN or inf; `where` says more of them, `leave` names what to drop."""
    for value in inputs:
        if not all_finite(value):
            bad = int((~torch.isfinite(value)).sum())
            raise DataError(
                f"expected finite inputs; found {bad} NaN or inf among {value.numel()} input values{where}. "
                f"Drop or impute those {leave}."
            )


def check_dtypes(x: Any, model: nn.Module, error: Exception) -> None:
    """Explain a failure of the model: raise `DataError` if weights and inputs have different floating dtypes."""
    weight = first_weight(model)
    other = [value.dtype for value in floating(x) if weight is not None and value.dtype != weight.dtype]
    if weight is not None and weight.is_floating_point() and other:
        raise DataError(
            f"expected inputs of {weight.dtype}, as the weights of the model are; found {other[0]}, on which it raised "
            f"{type(error).__name__}. Pass x.to({weight.dtype}), or a model of the inputs' dtype, as model.float() is."
        ) from error


def _converted(value: Tensor, dtype: torch.dtype, cut: bool) -> Tensor:
    """Convert to the model's dtype; raise `DataError` if finite numbers would become infinite and are not cut."""
    converted, most = value.to(dtype), torch.finfo(dtype).max
    if most < torch.finfo(value.dtype).max and not all_finite(converted):
        beyond = converted.isinf() & value.isfinite()
        if cut and not bool(beyond.flatten(1).any(1).all()):
            return torch.where(beyond, value.clamp(-most, most).to(dtype), converted)
        lost = value[beyond]
        if lost.numel():
            raise DataError(
                f"expected inputs that fit {dtype}, the model's dtype; found {lost.numel()} of {value.numel()} that do "
                f"not, such as {lost[0].item():.3g}. Use other units, or model.double()."
            )
    return converted


def all_finite(*tensors: Tensor) -> bool:
    """Return True if no value is NaN or inf. A finite sum proves it in one pass; otherwise all entries are tested.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, torch.inf]))
    (True, False)
    """
    if being_traced():
        return True
    totals = [
        values if values.numel() == 1 else values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
        for values in tensors
    ]
    if all(total.is_cpu for total in totals):
        finite = all(isfinite(total.item()) for total in totals)
    else:
        finite = isfinite(sum(totals[1:], totals[0]).item())  # one transfer from the GPU for all tensors
    return finite or all(bool(torch.isfinite(values).all()) for values in tensors)


def any_true(values: Tensor) -> bool:
    """Return True if any entry is True; False while a function is traced, because values cannot be read then."""
    return False if being_traced() else bool(values.any())


def from_array(array: np.ndarray, what: str) -> Tensor:
    """Convert a numpy array of numbers to a tensor; `what` names it in error messages."""
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"expected numeric {what}; found a numpy array of dtype {array.dtype}. "
            "Encode text and categories as numbers first."
        )
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise DataError(
            f"expected {what} without missing values; found {int(np.ma.getmaskarray(array).sum())} masked ones. Drop "
            "or impute those rows."
        )
    # Copy foreign byte orders and wide floats, which torch refuses, and read-only arrays, for which it warns.
    dtype = np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype, requirements=["C", "W"]))


def is_table(value: Any) -> bool:
    """Return True if `value` is a data frame or a series, of pandas, polars or a similar library."""
    return hasattr(value, "to_numpy") and not isinstance(value, (Tensor, np.ndarray, type))


def from_table(table: Any, what: str, *, whole: bool = False) -> Tensor:
    """Convert a data frame `(N, D)` or a series `(N,)` of numbers to a float64 tensor; missing values become NaN.

    With `whole`, the tensor is int64 if all columns hold whole numbers.

    >>> import pandas
    >>> from_table(pandas.DataFrame({"a": [1, 2], "b": [True, False]}), "inputs")
    tensor([[1., 1.],
            [2., 0.]], dtype=torch.float64)
    """
    if not hasattr(table, "columns"):
        return from_array(_numbers(getattr(table, "name", None), table, what, whole), what)
    # pandas iterates over columns by `items`, polars by `iter_columns`.
    named = table.items() if hasattr(table, "items") else ((column.name, column) for column in table.iter_columns())
    columns = [_numbers(name, column, what, whole) for name, column in named]
    return from_array(np.stack(columns, 1) if columns else np.zeros((len(table), 0)), what)


def map_values(x: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every tensor, array and table in nested tuples, lists and mappings."""
    if isinstance(x, (Tensor, np.ndarray)) or is_table(x):
        return change(x)
    if isinstance(x, Mapping):
        return {key: map_values(value, change) for key, value in x.items()}
    if isinstance(x, PackedSequence):  # its counts stay on the CPU
        orders = (None if order is None else change(order) for order in x[2:])
        return type(x)(change(x.data), x.batch_sizes, *orders)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(map_values(value, change) for value in x))
    if isinstance(x, (tuple, list)):
        return type(x)(map_values(value, change) for value in x)
    return x


def apart(make: Callable[[], Tensor]) -> Tensor:
    """Call `make` in a new thread, where nothing is traced, so that its tensor can be cached."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(make).result()


def constants(values: tuple[float, ...]) -> Tensor:
    """Return a cached float64 tensor of numbers; do not change it in place."""
    # A tensor made while tracing or in inference mode cannot be used outside of it.
    return torch.tensor(values, dtype=torch.float64) if being_traced() else _constants(values)


@lru_cache(maxsize=256)
def _constants(values: tuple[float, ...]) -> Tensor:
    """Make the cached tensor of `constants`."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float64)


def widened(output: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float32 or float64."""
    return output if output.dtype in (torch.float32, torch.float64) else output.float()


def _numbers(name: Any, column: Any, what: str, whole: bool) -> np.ndarray:
    """Convert a column to float64, or to int64 if `whole` is set and it holds only whole numbers."""
    kind = getattr(column.dtype, "kind", None)
    nullable = not isinstance(column.dtype, np.dtype) and kind in (*"fiub",)  # nullable dtypes of pandas
    values = np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan) if nullable else column.to_numpy())
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"expected numeric {what}; found column {name!r} of type {column.dtype}. Encode text, categories and dates "
            "as numbers, or leave the column out."
        )
    counted = np.can_cast(values.dtype, np.int64) or (nullable and kind != "f" and not np.isnan(values).any())
    return values.astype(np.int64 if whole and counted else np.float64)


def first_weight(model: nn.Module) -> Tensor | None:
    """Return the first floating parameter of a model, or None."""
    return next((weight for weight in model.parameters() if weight.is_floating_point()), None)
