"""Tensors in records: their bytes inside the JSON."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from math import prod
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.records import FieldError, match

__all__ = ["StoredTensor", "elsewhere", "inline"]

_DTYPES = ["float32", "float64"]
_MOST_NUMBERS = 2**31


class _Stored:
    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(_tensor)


StoredTensor: TypeAlias = Annotated[Tensor, _Stored()]
"""A tensor of float32 or float64 without NaN. A feature that never varies has an infinite spread."""


def inline(value: Tensor) -> dict[str, Any]:
    """A tensor as plain data: its bytes, least significant first, in base 64."""
    array = value.detach().cpu().contiguous().numpy()
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}


def elsewhere(tensors: dict[str, Tensor], file: str) -> Callable[[Tensor], dict[str, Any]]:
    """Collect tensors, which a record for people to read then names only."""

    def named(value: Tensor) -> dict[str, Any]:
        name = str(len(tensors))
        tensors[name] = value
        return {"stored": name, "file": file}

    return named


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data"}:
        raise FieldError("", "a tensor", value)
    tensor = _from_bytes(**value)
    match(not bool((tensor.isnan() | (tensor == -torch.inf)).any()), "", "a tensor of numbers", "others")
    return tensor


def _from_bytes(dtype: Any, shape: Any, data: Any) -> Tensor:
    match(dtype in _DTYPES, "dtype", f"one of {', '.join(_DTYPES)}", dtype)
    sizes = isinstance(shape, list) and all(type(size) is int and 0 <= size <= _MOST_NUMBERS for size in shape)
    match(sizes and prod(shape) <= _MOST_NUMBERS and len(shape) <= 8, "shape", "the sizes of a tensor", shape)
    try:
        content = base64.b64decode(data, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise FieldError("data", "bytes in base 64", data) from None
    item = np.dtype(dtype).newbyteorder("<")
    match(len(content) == prod(shape) * item.itemsize, "data", f"{prod(shape) * item.itemsize} bytes", len(content))
    return torch.from_numpy(np.frombuffer(content, item).astype(dtype).reshape(shape))
