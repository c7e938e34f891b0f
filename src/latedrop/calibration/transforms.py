"""Targets that were transformed for training: the model's unit, and the way back to the original one.

The model predicts `t = f(y)`, and all fits are made there: `t` is a Gaussian of mean `m` and variance `v`. As `f`
increases, the original target has

    quantiles  f^{-1}(m + z_q sqrt(v)),      density  N(f(y); m, v) · f'(y),

and its mean and variance are those of `f^{-1}(t)`: in closed form where `f` is affine or a logarithm (a log-normal has
the mean `exp(m + v/2)` and the variance `(exp(v) - 1) exp(2m + v)`), by Gauss-Hermite quadrature for functions of the
user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop.calibration.scale import along_outputs
from latedrop.data.arrays import any_true
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.records import Fields, numbers, text, wrong

__all__ = [
    "Log",
    "Standardized",
    "Transform",
    "Transformed",
    "capped",
    "checked_transform",
    "transform_from_dict",
    "with_own",
]

_NODES = 32
_STEP = 6e-6  # of a central difference in float64
_CLOSE = 1e-3  # of the targets' spread: how far there and back may lead from a target
_LEAST, _MOST = 1e-300, 1e300
_LARGE = 500.0  # beyond, exp(v) - 1 is exp(v)


class Transform:
    """From the original unit of the targets to the one that the model was trained in, and back."""

    def forward(self, y: Tensor) -> Tensor:
        """Targets `(N, ...)` in the model's unit, in float64; `DataError` where they have none there."""
        raise NotImplementedError

    def inverse(self, t: Tensor) -> Tensor:
        """Values of the model's unit `(N, ...)` in the original one."""
        raise NotImplementedError

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance in the original unit of a Gaussian in the model's, `(N, ...)` each."""
        raise NotImplementedError

    def log_slope(self, y: Tensor) -> Tensor:
        """`log f'(y)` of every target, `(N, ...)`: what the density in the original unit is larger by."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        raise NotImplementedError


def capped(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In that dtype, at most its largest number: a model's logarithm of 1000 is no infinity."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


@dataclass(frozen=True, init=False)
class Standardized(Transform):
    """Targets of which a mean was subtracted, and that were divided by a standard deviation, for training.

    Args:
        mean: of the training targets; a number, or one for each output.
        std: likewise.

    >>> Standardized(mean=200.0, std=50.0).forward(torch.tensor([250.0, 200.0]))
    tensor([1., 0.], dtype=torch.float64)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        found = []
        for name, value in (("mean", mean), ("std", std)):
            value = value.detach().cpu() if isinstance(value, Tensor) else value
            try:
                array = np.atleast_1d(np.asarray(value, dtype=np.float64))
            except (TypeError, ValueError, OverflowError):
                array = np.zeros((0, 0))
            if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
                raise ArgumentError(
                    f"expected {name} of the training targets as a number, or one for each output; found {value!r}."
                )
            found.append(array)
        means, stds = found
        if bool((stds <= 0).any()) or len({len(means), len(stds)} - {1}) > 1:
            raise ArgumentError(f"expected a std above 0 for every mean; found mean={mean!r} and std={std!r}.")
        both = np.broadcast_arrays(means, stds)
        object.__setattr__(self, "mean", tuple(both[0].tolist()))
        object.__setattr__(self, "std", tuple(both[1].tolist()))

    def forward(self, y: Tensor) -> Tensor:
        """See `Transform`."""
        mean, std = self._along(y)
        return (y.double() - mean) / std

    def inverse(self, t: Tensor) -> Tensor:
        """See `Transform`."""
        mean, std = self._along(t)
        return capped(t.double() * std + mean, t.dtype)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """See `Transform`."""
        return self.inverse(mean), capped(variance.double() * self._along(variance)[1].square(), variance.dtype)

    def log_slope(self, y: Tensor) -> Tensor:
        """See `Transform`."""
        return -self._along(y)[1].log().expand(y.shape)

    def to_dict(self) -> dict[str, Any]:
        """See `Transform`."""
        return {"kind": "standardized", "mean": self.mean, "std": self.std}

    def _along(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.mean) > 1 and (values.dim() < 2 or values.shape[1] != len(self.mean)):
            raise DataError(
                f"expected targets (N, {len(self.mean)}), as Standardized has {len(self.mean)} means; found shape "
                f"{tuple(values.shape)}."
            )
        like = values.double()
        parts = (torch.tensor(part, dtype=torch.float64) for part in (self.mean, self.std))
        mean, std = (along_outputs(part, like) for part in parts)
        return mean, std


@dataclass(frozen=True)
class Log(Transform):
    """Targets whose natural logarithm was learned: the prediction is log-normal.

    >>> Log().forward(torch.tensor([1.0, 10.0]))
    tensor([0.0000, 2.3026], dtype=torch.float64)
    """

    def forward(self, y: Tensor) -> Tensor:
        """See `Transform`."""
        bad = int((y <= 0).sum())
        if bad:
            raise DataError(
                f"expected targets above 0, as their logarithm was learned (target=Log()); found {bad} of {y.numel()} "
                "that are not. For log(1 + y) pass target=Transformed(torch.log1p, torch.expm1)."
            )
        return y.double().log()

    def inverse(self, t: Tensor) -> Tensor:
        """See `Transform`."""
        return capped(t.double().exp(), t.dtype)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """See `Transform`."""
        m, v = mean.double(), variance.double()
        # One exponential of a sum: a product of two could be infinity times 0.
        logs = 2 * m + v + v.clamp_min(_LEAST).expm1().log().where(v < _LARGE, v)
        return capped((m + v / 2).exp(), mean.dtype), capped(logs.exp().where(v > 0, 0.0), variance.dtype)

    def log_slope(self, y: Tensor) -> Tensor:
        """See `Transform`."""
        return -y.double().log()

    def to_dict(self) -> dict[str, Any]:
        """See `Transform`."""
        return {"kind": "log"}


@dataclass(frozen=True, init=False)
class Transformed(Transform):
    """Targets that went through an increasing function of one's own for training.

    Args:
        forward: from original targets, a float64 tensor `(N, ...)`, to what the model was trained with. Increasing.
        inverse: the way back, for all real numbers; it is also called with what lies beyond the targets.

    A file holds only the names of the two: `load` needs them again.

    >>> Transformed(torch.log1p, torch.expm1).inverse(torch.tensor([0.0]))
    tensor([0.])
    """

    _there: Callable[[Tensor], Any]
    _back_again: Callable[[Tensor], Any]

    def __init__(self, forward: Callable[[Tensor], Any], inverse: Callable[[Tensor], Any]) -> None:
        if not callable(forward) or not callable(inverse):
            raise ArgumentError(f"expected two functions, forward and inverse; found {forward!r} and {inverse!r}.")
        object.__setattr__(self, "_there", forward)
        object.__setattr__(self, "_back_again", inverse)

    def __repr__(self) -> str:
        return f"Transformed({_name(self._there)}, {_name(self._back_again)})"

    def forward(self, y: Tensor) -> Tensor:
        """See `Transform`; checks that the functions belong together, and that they increase."""
        t = _called(self._there, y, "forward", finite=True)
        back = self._back(t)
        spread = float((y.double() - y.double().mean()).square().mean().sqrt())
        far = float((back - y).abs().max()) if y.numel() else 0.0
        if far > _CLOSE * max(spread, float(y.double().abs().max()) * 1e-3):
            raise DataError(
                f"expected target=Transformed(forward, inverse) whose inverse undoes forward; found targets that come "
                f"back changed by up to {far:.3g}. Check that the functions belong together."
            )
        if y.numel() and bool((self._back(t + 1e-3 * (1 + t.abs())) < back).any()):
            raise DataError(
                "expected target=Transformed(forward, inverse) that increase; found that larger outputs are smaller "
                "targets. Change the sign of the model's output in a readout, and of the functions."
            )
        return t

    def inverse(self, t: Tensor) -> Tensor:
        """See `Transform`."""
        return capped(self._back(t), t.dtype)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """See `Transform`."""
        m, std = mean.double(), variance.double().sqrt()
        values = [(w, self._back(m + x * std)) for x, w in _gauss_hermite()]
        center = torch.stack([w * y for w, y in values]).sum(0)
        spread = torch.stack([w * (y - center).square() for w, y in values]).sum(0)
        # Where the inverse overflows, both are as large as can be.
        return capped(center, mean.dtype), capped(spread.nan_to_num(nan=torch.inf, posinf=torch.inf), variance.dtype)

    def log_slope(self, y: Tensor) -> Tensor:
        """See `Transform`."""
        t = _called(self._there, y, "forward", finite=True)
        step = _STEP * t.abs().clamp_min(1.0)
        return -((self._back(t + step) - self._back(t - step)) / (2 * step)).clamp_min(_LEAST).log()

    def to_dict(self) -> dict[str, Any]:
        """See `Transform`."""
        return {"kind": "own", "forward": _name(self._there), "inverse": _name(self._back_again)}

    def _back(self, t: Tensor) -> Tensor:
        return _called(self._back_again, t, "inverse")


@dataclass(frozen=True)
class Absent(Transform):
    """Stands for functions of the user's own that a file could only name."""

    forward_name: str
    inverse_name: str

    def to_dict(self) -> dict[str, Any]:
        """See `Transform`."""
        return {"kind": "own", "forward": self.forward_name, "inverse": self.inverse_name}


def checked_transform(value: Any) -> Transform | None:
    """The transform of the targets, None where there is none; `ArgumentError` for anything else."""
    if isinstance(value, type) and issubclass(value, Log):
        return Log()
    if value is None or isinstance(value, Transform):
        return value
    raise ArgumentError(
        f"expected target= as Standardized(mean, std), Log() or Transformed(forward, inverse); found {value!r}. "
        "Targets themselves belong into data, (x, y)."
    )


def with_own(known: Transform | None, given: Any, path: object) -> Transform | None:
    """The transform of a calibration file, with functions of the user's own where it only names them."""
    given = checked_transform(given)
    if isinstance(known, Absent):
        if not isinstance(given, Transformed):
            raise FileError(
                f"expected target=, as {path} was made with the functions {known.forward_name!r} and "
                f"{known.inverse_name!r}, which a file cannot hold. Pass Transformed(...) with the same to load()."
            )
        return given
    if given is not None and given != known:
        raise ArgumentError(
            f"expected the transform of the targets that {path} was made with, {known}; found {given}. Leave target= "
            "out: the file knows it."
        )
    return known


def transform_from_dict(value: Any, name: str, *, count: int) -> Transform:
    """The inverse of `Transform.to_dict`, for `count` outputs; functions of the user's own come back `Absent`."""
    fields = Fields(value, name)
    kind = fields.take("kind", text, among=("standardized", "log", "own"))
    found: Transform
    if kind == "log":
        found = Log()
    elif kind == "own":
        found = Absent(fields.take("forward", text), fields.take("inverse", text))
    else:
        mean = fields.take("mean", numbers, least=-_MOST, most=_MOST)
        std = fields.take("std", numbers, least=_LEAST, most=_MOST, length=len(mean))
        if len(mean) not in (1, count):
            wrong(f"{name}.mean", f"one number, or {count}", mean)
        found = Standardized(mean, std)
    fields.end()
    return found


@cache
def _gauss_hermite() -> list[tuple[float, float]]:
    """Places and weights for the mean of a function of a standard Gaussian."""
    x, w = np.polynomial.hermite.hermgauss(_NODES)
    return list(zip((sqrt(2) * x).tolist(), (w / sqrt(pi)).tolist(), strict=True))


def _called(function: Callable[[Tensor], Any], values: Tensor, name: str, *, finite: bool = False) -> Tensor:
    """A function of the user's own on float64 values, in their shape; `DataError` where it gives anything else."""
    found = torch.as_tensor(function(values.detach().double())).to(values.device, torch.float64)
    if found.shape != values.shape or any_true(~found.isfinite() if finite else found.isnan()):
        bad = f"shape {tuple(found.shape)}" if found.shape != values.shape else "NaN or inf"
        raise DataError(
            f"expected {name} of target=Transformed(...) to give numbers of shape {tuple(values.shape)}; found "
            f"{bad}. It is called on tensors, entry by entry, and the inverse also beyond the targets."
        )
    return found


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
