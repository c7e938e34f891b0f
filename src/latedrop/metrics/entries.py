"""The entries that count: `(mean, variance, target)` checked and flat.

Nothing is broadcast, and what cannot be scored is refused, with the place of the first such entry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import DataError

__all__ = [
    *("Array", "Options", "align_target", "average", "by_output", "checked_weights", "columns", "scored"),
]

Array = Tensor | npt.ArrayLike


class Options(TypedDict, total=False):
    """The options that metrics share, see `latedrop.metrics`."""

    per_output: bool
    weights: Array | None


def align_target(mean: Array, target: Array) -> Tensor:
    """Return the target as a tensor of the prediction's shape, on its device.

    Shapes have to be equal: a broadcast between predictions and targets is nearly always a mistake, as
    `(N, 1)` against `(N,)` compares each with each. That one case is aligned; others are a `DataError`.

    >>> align_target(torch.zeros(3, 1), torch.tensor([1.0, 2.0, 3.0])).shape
    torch.Size([3, 1])
    """
    mean, target = _tensor("mean", mean), _tensor("target", target)
    if target.ndim == 1 and mean.shape == (len(target), 1):
        target = target.unsqueeze(1)
    _check_shape("target", target, mean)
    return target.to(mean.device)


def scored(
    score: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    mean: Array,
    variance: Array | None,
    target: Array,
    *,
    per_output: bool = False,
    weights: Array | None = None,
    positive: bool = False,
) -> Tensor:
    """Return `score` of the entries' error, variance and weights: a scalar, or with `per_output` `(K,)`."""
    scores = [score(*used) for used in columns(mean, variance, target, per_output, weights, positive=positive)]
    return torch.stack(scores) if per_output else scores[0]


def columns(
    mean: Array,
    variance: Array | None,
    target: Array,
    per_output: bool = False,
    weights: Array | None = None,
    *,
    positive: bool = False,
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Check and flatten the entries' (error, variance, weight): once for all, or once for each output.

    A variance of None, for callers that do not read it, becomes ones. The weight is None where all count the same.
    """
    mean, target = _tensor("mean", mean), align_target(mean, target)
    if mean.numel() == 0:
        raise DataError(f"expected at least one entry, found shape {tuple(mean.shape)}; pass some data")
    arrays = {"mean": mean, "target": target}
    if variance is not None:
        arrays["variance"] = _tensor("variance", variance).to(mean.device)
        _check_shape("variance", arrays["variance"], mean)
    for name, array in arrays.items():
        _refuse(~array.isfinite(), f"{name} is NaN or infinite", "remove these entries")
    dtype = reduce(torch.promote_types, (array.dtype for array in arrays.values()), torch.float32)
    error = target.to(dtype) - mean.to(dtype)
    var = arrays["variance"].to(dtype) if variance is not None else torch.ones_like(error)
    _refuse(var < 0, "variance is below 0", "pass variances, not log-variances or errors")
    if positive:
        _refuse(var == 0, "variance is 0", "add a floor to it, or take more draws")
    entries = [error, var]
    if weights is not None:
        by_row = checked_weights(weights, len(mean)).to(mean.device)
        entries.append(by_row.reshape(-1, *[1] * (mean.dim() - 1)).expand(mean.shape))
    outputs = zip(*(by_output(values, per_output) for values in entries), strict=True)
    return [(e.flatten(), v.flatten(), w[0].flatten() if w else None) for e, v, *w in outputs]


def checked_weights(weights: Array, rows: int) -> Tensor:
    """Return weights of rows as float64 `(rows,)` with mean 1, or raise `DataError`."""
    checked = _tensor("weights", weights).detach().double()
    checked = checked[:, 0] if checked.dim() == 2 and checked.shape[1] == 1 else checked
    if checked.shape != (rows,):
        raise DataError(f"expected one weight for each of the {rows} rows; found shape {tuple(checked.shape)}.")
    if not bool(checked.isfinite().all()) or bool((checked < 0).any()) or not bool(checked.any()):
        raise DataError("expected weights that are finite, not below 0 and not all 0; found others.")
    return checked / checked.mean()


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of `(n,)`, each value counted as often as its weight says."""
    if weights is None:
        return values.mean()
    weights = weights.to(values)
    return (weights * values).sum() / weights.sum()


def by_output(values: Tensor, per_output: bool) -> tuple[Tensor, ...]:
    """Return the values of each index of axis 1; all of them together without `per_output`, or with a single axis."""
    return values.unbind(1) if per_output and values.dim() > 1 else (values,)


def _tensor(name: str, value: Array) -> Tensor:
    try:
        if not isinstance(value, Tensor) and hasattr(value, "__array__"):
            # torch warns of read-only arrays and refuses negative strides; a copy of these will do.
            value = np.require(value, requirements=["C", "W"])
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as reason:
        raise DataError(
            f"expected {name} as a tensor, array or number, found {type(value).__name__}: {reason}"
        ) from None
    if tensor.is_complex():
        raise DataError(f"expected {name} to be real, found {tensor.dtype}; take its real part")
    return tensor


def _check_shape(name: str, array: Tensor, mean: Tensor) -> None:
    if array.shape != mean.shape:
        raise DataError(
            f"expected {name} of the mean's shape {tuple(mean.shape)}, found {tuple(array.shape)}; "
            f"nothing is broadcast: reshape or expand the {name}"
        )


def _refuse(bad: Tensor, problem: str, remedy: str) -> None:
    count = int(bad.sum())
    if count:
        first = tuple(torch.nonzero(bad)[0].tolist())
        raise DataError(f"{problem} in {count} of {bad.numel()} entries, the first at index {first}; {remedy}")
