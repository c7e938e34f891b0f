"""Tensors in records: inside the JSON, or beside it in a file that the JSON names by its checksum."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from math import prod
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.records import FieldError, match

__all__ = ["Beside", "StoredTensor", "elsewhere", "inline"]

Beside: TypeAlias = Callable[[str], Mapping[str, Tensor]]
"""Gives the tensors of a file beside the JSON, from the name that the JSON has for it."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_MOST_NUMBERS = 2**31


class _Stored:
    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.with_info_plain_validator_function(lambda value, info: _tensor(value, info.context))


StoredTensor: TypeAlias = Annotated[Tensor, _Stored()]
"""A tensor of float32 or float64 without NaN. A feature that never varies has an infinite spread."""


def inline(value: Tensor) -> dict[str, Any]:
    """A tensor as plain data: its bytes, least significant first, in base 64."""
    array = value.detach().cpu().contiguous().numpy()
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}


def elsewhere(tensors: dict[str, Tensor], file: str) -> Callable[[Tensor], dict[str, Any]]:
    """Collect tensors, which a record then names as those of a file."""

    def named(value: Tensor) -> dict[str, Any]:
        name = str(len(tensors))
        tensors[name] = value
        return {"stored": name, "file": file}

    return named


def _tensor(value: Any, beside: Beside | None) -> Tensor:
    keys = set(value) if isinstance(value, dict) else None
    if keys == {"stored", "file"} and all(isinstance(part, str) for part in value.values()):
        tensors = {} if beside is None else beside(value["file"])
        match(value["stored"] in tensors, "stored", "a tensor of the file beside", value["stored"])
        found = tensors[value["stored"]]
    elif keys == {"dtype", "shape", "data"}:
        found = _from_bytes(**value)
    else:
        raise FieldError("", "a tensor", value)
    allowed = found.dtype in _DTYPES.values() and not bool((found.isnan() | (found == -torch.inf)).any())
    match(allowed, "", "a tensor of numbers", found.dtype)
    return found


def _from_bytes(dtype: Any, shape: Any, data: Any) -> Tensor:
    match(dtype in [*_DTYPES], "dtype", f"one of {', '.join(_DTYPES)}", dtype)
    sizes = isinstance(shape, list) and all(type(size) is int and 0 <= size <= _MOST_NUMBERS for size in shape)
    match(sizes and prod(shape) <= _MOST_NUMBERS and len(shape) <= 8, "shape", "the sizes of a tensor", shape)
    try:
        content = base64.b64decode(data, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise FieldError("data", "bytes in base 64", data) from None
    item = np.dtype(dtype).newbyteorder("<")
    match(len(content) == prod(shape) * item.itemsize, "data", f"{prod(shape) * item.itemsize} bytes", len(content))
    return torch.from_numpy(np.frombuffer(content, item).astype(dtype).reshape(shape))
