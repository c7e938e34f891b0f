"""Targets that were transformed for training: the model's unit, and the way back to the original one.

The model predicts `t = f(y)`, and all fits are made there: `t` is a Gaussian of mean `m` and variance `v`. As `f`
increases, the original target has

    quantiles  f^{-1}(m + z_q sqrt(v)),      density  N(f(y); m, v) · f'(y),

and its mean and variance are those of `f^{-1}(t)`: a log-normal has the mean `exp(m + v/2)` and the variance
`(exp(v) - 1) exp(2m + v)`.

`forward` takes targets `(N, ...)` to the model's unit, in float64, and `inverse` takes values back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.calibration.scale import along_outputs
from latedrop.errors import ArgumentError, DataError
from latedrop.records import Limits, Tagged, match, record

__all__ = ["Log", "Standardized", "StoredTransform", "Transform", "capped", "checked_transform"]

_LEAST, _MOST = 1e-300, 1e300
_LARGE = 500.0  # beyond, exp(v) - 1 is exp(v)


def capped(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype, at most its largest number: a model's logarithm of 1000 is no infinity."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


@record
@dataclass(frozen=True, init=False)
class Standardized:
    """Targets of which a mean was subtracted, and that were divided by a standard deviation, for training.

    Args:
        mean: of the training targets; a number, or one for each output.
        std: likewise.

    >>> Standardized(mean=200.0, std=50.0).forward(torch.tensor([250.0, 200.0]))
    tensor([1., 0.], dtype=torch.float64)
    """

    mean: Annotated[tuple[Annotated[float, Limits(-_MOST, _MOST)], ...], Limits(1)]
    std: tuple[Annotated[float, Limits(_LEAST, _MOST)], ...]
    kind: Literal["standardized"] = field(default="standardized", repr=False)

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        means, stds = _numbers("mean", mean), _numbers("std", std)
        if bool((stds <= 0).any()) or len({len(means), len(stds)} - {1}) > 1:
            raise ArgumentError(f"expected a std above 0 for every mean; found mean={mean!r} and std={std!r}.")
        means, stds = np.broadcast_arrays(means, stds)
        object.__setattr__(self, "mean", tuple(means.tolist()))
        object.__setattr__(self, "std", tuple(stds.tolist()))

    def forward(self, y: Tensor) -> Tensor:
        """Return targets in the model's unit."""
        mean, std = self._along(y)
        return (y.double() - mean) / std

    def inverse(self, t: Tensor) -> Tensor:
        """Return values of the model's unit in the original one."""
        mean, std = self._along(t)
        return capped(t.double() * std + mean, t.dtype)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance in the original unit."""
        return self.inverse(mean), capped(variance.double() * self._along(variance)[1].square(), variance.dtype)

    def log_slope(self, y: Tensor) -> Tensor:
        """Return the logarithm of 1 / std."""
        return -self._along(y)[1].log().expand(y.shape)

    def checked(self) -> Standardized:
        """Check lengths against each other after reading."""
        match(len(self.std) == len(self.mean), "std", f"{len(self.mean)} numbers, as mean", self.std)
        return self

    def _along(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.mean) > 1 and (values.dim() < 2 or values.shape[1] != len(self.mean)):
            raise DataError(
                f"expected targets (N, {len(self.mean)}), as Standardized has {len(self.mean)} means; found shape "
                f"{tuple(values.shape)}."
            )
        like = values.double()
        mean, std = (torch.tensor(part, dtype=torch.float64) for part in (self.mean, self.std))
        return along_outputs(mean, like), along_outputs(std, like)


def _numbers(name: str, value: Any) -> Any:
    """Return one finite number, or one for each output, as an array."""
    value = value.detach().cpu() if isinstance(value, Tensor) else value
    try:
        array = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError, OverflowError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ArgumentError(
            f"expected {name} of the training targets as a number, or one for each output; found {value!r}."
        )
    return array


@record
@dataclass(frozen=True)
class Log:
    """Targets whose natural logarithm was learned: the prediction is log-normal.

    >>> Log().forward(torch.tensor([1.0, 10.0]))
    tensor([0.0000, 2.3026], dtype=torch.float64)
    """

    kind: Literal["log"] = field(default="log", repr=False)

    def forward(self, y: Tensor) -> Tensor:
        """Return logarithms; `DataError` where targets have none."""
        bad = int((y <= 0).sum())
        if bad:
            raise DataError(
                f"expected targets above 0, as their logarithm was learned (target=Log()); found {bad} of {y.numel()} "
                "that are not. Of log(1 + y) pass readout=torch.expm1 instead."
            )
        return y.double().log()

    def inverse(self, t: Tensor) -> Tensor:
        """Return exponentials."""
        return capped(t.double().exp(), t.dtype)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the log-normal."""
        m, v = mean.double(), variance.double()
        # One exponential of a sum: a product of two could be infinity times 0.
        logs = 2 * m + v + v.clamp_min(_LEAST).expm1().log().where(v < _LARGE, v)
        return capped((m + v / 2).exp(), mean.dtype), capped(logs.exp().where(v > 0, 0.0), variance.dtype)

    def log_slope(self, y: Tensor) -> Tensor:
        """Return the logarithm of 1 / y."""
        return -y.double().log()


Transform: TypeAlias = Standardized | Log
StoredTransform: TypeAlias = Annotated[Transform, Tagged()]
"""A transform as a field of a record."""


def checked_transform(value: Any) -> Transform | None:
    """Return the transform of the targets, None where there is none; `ArgumentError` for anything else."""
    if value is Log:
        return Log()
    if value is None or isinstance(value, (Standardized, Log)):
        return value
    raise ArgumentError(
        f"expected target= as Standardized(mean, std) or Log(); found {value!r}. Targets themselves belong into data, "
        "(x, y)."
    )
