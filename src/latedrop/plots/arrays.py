"""What is drawn, as arrays of one shape; what does not fit is refused."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop.errors import ArgumentError, DataError

__all__ = ["Array", "Floats", "as_array", "like_path", "not_empty", "same_length"]

Array = Tensor | npt.ArrayLike
Floats = npt.NDArray[np.float64]


def not_empty(series: Mapping[Any, Any], noun: str) -> Mapping[Any, Any]:
    """The series, of which there has to be one."""
    if not series:
        raise ArgumentError(f"expected at least one {noun}, found none; pass a mapping from label to values")
    return series


def as_array(values: Array) -> Floats:
    """In double precision, on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def like_path(name: str, values: Array, path: Floats) -> Floats:
    """The values, one for each point of the `(R, P)` path or paths."""
    array = as_array(values)
    try:
        return np.broadcast_to(array, path.shape)
    except ValueError:
        raise DataError(
            f"expected {name} for each point of the path, shape {path.shape}, found {array.shape}; "
            "pass one value per point"
        ) from None


def same_length(columns: Mapping[str, Array]) -> list[Floats]:
    """The columns as arrays, all `(N,)`; what a network with one output gives, `(N, 1)`, is flattened."""
    arrays = {name: as_array(values) for name, values in columns.items()}
    arrays = {name: a[:, 0] if a.ndim == 2 and a.shape[1] == 1 else a for name, a in arrays.items()}
    first = next(iter(arrays))
    for name, array in arrays.items():
        if array.ndim != 1 or not len(array) or len(array) != len(arrays[first]):
            raise DataError(
                f"expected one axis of one length, not empty, for {', '.join(arrays)}; "
                f"found {name} of shape {array.shape}, {first} of shape {arrays[first].shape}; trim it"
            )
    return list(arrays.values())
