"""Arrays, tables and tensors: what goes into a model, on its device and in its dtype."""

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
    """Move inputs to the device of a model, or of its first weight; numpy arrays, tables and float64 take its dtype.

    With `check`, raises `DataError` where a floating input has NaN or inf. Numbers that do not fit the dtype raise one,
    too; with `cut` they are cut at the largest, unless no row fits.
    """
    parameter = model if isinstance(model, Tensor) else first_weight(model)
    device = parameter.device if parameter is not None else torch.device("cpu")

    def move(value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            value = from_table(value, "inputs") if is_table(value) else from_array(value, "inputs")
            convert = value.is_floating_point()
        else:
            convert = value.dtype == torch.float64  # as numpy makes them; others were chosen
        if convert and parameter is not None and value.dtype != parameter.dtype:
            value = _converted(value, parameter.dtype, cut)
        moved: Tensor = value if value.device == device else value.to(device)
        return moved.resolve_conj().resolve_neg() if moved.is_neg() or moved.is_conj() else moved

    placed = move(x) if isinstance(x, Tensor) else map_values(x, move)
    if check:
        check_inputs([placed] if isinstance(x, Tensor) and placed.is_floating_point() else floating(placed))
    return placed


def floating(x: Any) -> list[Tensor]:
    """Return the floating tensors of inputs that were placed, where NaN and inf can be."""
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
    """After a failure of the model: raise where its weights are of another floating dtype than the inputs."""
    weight = first_weight(model)
    other = [value.dtype for value in floating(x) if weight is not None and value.dtype != weight.dtype]
    if weight is not None and weight.is_floating_point() and other:
        raise DataError(
            f"expected inputs of {weight.dtype}, as the weights of the model are; found {other[0]}, on which it raised "
            f"{type(error).__name__}. Pass x.to({weight.dtype}), or a model of the inputs' dtype, as model.float() is."
        ) from error


def _converted(value: Tensor, dtype: torch.dtype, cut: bool) -> Tensor:
    """In the model's dtype; `DataError` where finite numbers would become infinite, unless they are cut."""
    made, most = value.to(dtype), torch.finfo(dtype).max
    if most < torch.finfo(value.dtype).max and not all_finite(made):
        beyond = made.isinf() & value.isfinite()
        if cut and not bool(beyond.flatten(1).any(1).all()):
            return torch.where(beyond, value.clamp(-most, most).to(dtype), made)
        lost = value[beyond]
        if lost.numel():
            raise DataError(
                f"expected inputs that fit {dtype}, the model's dtype; found {lost.numel()} of {value.numel()} that do "
                f"not, such as {lost[0].item():.3g}. Use other units, or model.double()."
            )
    return made


def all_finite(*tensors: Tensor) -> bool:
    """Return True if no value is NaN or inf: their sum then is finite too, mostly, and takes one pass and no memory.

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
        finite = isfinite(sum(totals[1:], totals[0]).item())  # another device is waited for once
    return finite or all(bool(torch.isfinite(values).all()) for values in tensors)


def any_true(values: Tensor) -> bool:
    """Return True if any entry is True; False while a function is traced, where no value can be looked at."""
    return False if being_traced() else bool(values.any())


def from_array(array: np.ndarray, what: str) -> Tensor:
    """Return a numpy array of numbers as a tensor; `what` names it in the error where it holds something else."""
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
    # torch refuses foreign byte orders and wide floats, and warns of read-only arrays: these are copied.
    dtype = np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype, requirements=["C", "W"]))


def is_table(value: Any) -> bool:
    """Return True if `value` is a data frame or a series, of pandas, polars or alike."""
    return hasattr(value, "to_numpy") and not isinstance(value, (Tensor, np.ndarray, type))


def from_table(table: Any, what: str, *, whole: bool = False) -> Tensor:
    """Return a data frame `(N, D)` or a series `(N,)` of numbers as a float64 tensor; missing values are NaN.

    With `whole`, columns of whole numbers alone are an int64 tensor.

    >>> import pandas
    >>> from_table(pandas.DataFrame({"a": [1, 2], "b": [True, False]}), "inputs")
    tensor([[1., 1.],
            [2., 0.]], dtype=torch.float64)
    """
    if not hasattr(table, "columns"):
        return from_array(_numbers(getattr(table, "name", None), table, what, whole), what)
    # pandas names its columns by `items`, polars by `iter_columns`.
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
    """Call `make` in a thread of its own: there nothing is traced, and its tensor can be kept."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(make).result()


def constants(values: tuple[float, ...]) -> Tensor:
    """Return numbers in float64, made once; they are not to be changed in place."""
    # What is made while a graph is traced, or in inference mode, is of no use outside.
    return torch.tensor(values, dtype=torch.float64) if being_traced() else _constants(values)


@lru_cache(maxsize=256)
def _constants(values: tuple[float, ...]) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float64)


def widened(output: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 where it is."""
    return output if output.dtype in (torch.float32, torch.float64) else output.float()


def _numbers(name: Any, column: Any, what: str, whole: bool) -> np.ndarray:
    """One column of a table as float64, or as int64 where it is wanted and has whole numbers alone."""
    kind = getattr(column.dtype, "kind", None)
    nullable = not isinstance(column.dtype, np.dtype) and kind in (*"fiub",)  # pandas
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
