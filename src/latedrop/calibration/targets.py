"""Targets beside outputs: in their shape and dtype, and whether the model is any closer to them than their mean is.

Of rows of classes logits are `(N, K)` and labels `(N,)`; of maps `(N, K, H, W)` and `(N, H, W)`. A binary classifier
with one logit `z` is one with two, `(0, z)`. Probabilities in the place of logits are refused.

With `e2 = (target - mean)^2` of the model and `c2 = (target - average target)^2`, each averaged over a row, the model
is worse than a constant where the average of `d = e2 - c2` over the rows is above 0 by three of its standard errors. A
model in other units gains nothing over the constant, while a straight line through outputs and targets halves the
squared error.

Targets that were transformed for training are fitted in the model's unit. The model predicts `t = f(y)`, a Gaussian of
mean `m` and variance `v`. As `f` increases, the original target has

    quantiles  f^{-1}(m + z_q sqrt(v)),      density  N(f(y); m, v) · f'(y),

and its mean and variance are those of `f^{-1}(t)`: a log-normal has the mean `exp(m + v/2)` and the variance
`(exp(v) - 1) exp(2m + v)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias
from warnings import warn

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from latedrop import metrics
from latedrop.calibration.scale import along_outputs
from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError
from latedrop.records import Limits, Tagged, match, record
from latedrop.torch_private import being_traced

__all__ = [
    *("Log", "Standardized", "StoredTransform", "Transform", "as_labels", "as_logits", "as_output", "capped"),
    *("check_classes", "check_row_count", "check_rows", "check_shapes", "checked_transform", "is_classification"),
    "warn_of_poor_fit",
]

_ERRORS = 3.0  # standard errors: what is less may be chance
_NO_GAIN, _HALF = 0.98, 0.5
_SHOWN = 3
_FEW_ROWS = 10
_LOOKED_AT = 2**12  # pixels of a batch, to see whether they are probabilities
_SUMS = 1e-3  # by how much the sum of probabilities may differ from 1, also in half precision
_COARSE_SUMS = 8e-3  # in bfloat16
_LEAST, _MOST = 1e-300, 1e300
_LARGE = 500.0  # beyond, exp(v) - 1 is exp(v)


def as_output(output: Tensor, target: Tensor) -> Tensor:
    """Return the target in the shape, the dtype and on the device of the output; `DataError` where it does not fit."""
    several = output.dim() == 2 and output.shape[1] > 1
    if several and tuple(target.shape) in ((len(output),), (len(output), 1)):
        pair = ", and method=Terms([VarianceHead(...), ...]) where the other one is a variance"
        raise DataError(
            f"expected a target for each of the {output.shape[1]} outputs of a row, {tuple(output.shape)}; found "
            f"targets of shape {tuple(target.shape)}. Pass readout=lambda output: output[:, 0], or the column that the "
            f"targets are of{pair if output.shape[1] == 2 else ''}."
        )
    target = metrics.align_target(output, target)
    most = torch.finfo(output.dtype).max ** 0.5
    largest = float(target.detach().abs().max()) if target.numel() else 0.0
    if largest > most:
        raise DataError(
            f"expected targets below {most:.2g}, as their squares have to fit {output.dtype}, the dtype of the model's "
            f"output; found {largest:.3g}. Use other units for targets and output, or model.double()."
        )
    return target.to(output.dtype)


def check_rows(rows: int, *, stacklevel: int) -> None:
    """Raise `DataError` where validation rows are too few; warn where they are few."""
    if rows < 2:
        raise DataError(f"expected at least 2 validation rows, and better a hundred; found {rows}.")
    if rows < _FEW_ROWS:
        text = f"only {rows} validation rows: the scale and the intervals will be rough."
        warn(text, LatedropWarning, stacklevel=stacklevel + 1)


def check_shapes(shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise `DataError` where outputs have more than one shape."""
    different = sorted({tuple(shape) for shape in shapes})
    if len(different) > 1:
        raise DataError(
            f"expected outputs of one shape in all batches; found {different}. Pass a readout that gives one shape, "
            "such as a map's sum, or calibrate on inputs of one size."
        )


def warn_of_poor_fit(mean: Tensor, target: Tensor, rows: str, *, per_output: bool, stacklevel: int) -> None:
    """Warn of outputs whose targets are all the same, or that the model predicts no better than their average does.

    Args:
        mean: predictions, `(N, ...)`.
        target: of the same shape.
        rows: what the rows are called.
        per_output: whether each index of axis 1 is looked at on its own.
        stacklevel: of the warning, as seen by the caller.
    """
    if len(target) < 2:
        return
    count = mean.shape[1] if per_output and mean.dim() > 1 else 1
    parts = (values.detach().double().reshape(len(values), count, -1).unbind(1) for values in (mean, target))
    same, worse = [], []
    for k, (m, y) in enumerate(zip(*parts, strict=True)):
        name = f"output {k}: " if per_output else ""
        if bool((y == y[0, 0]).all()):
            same.append(f"{name}{float(y[0, 0]):g}")
        elif _is_poor(m, y):
            own, constant = (float(off.square().mean().sqrt()) for off in (y - m, y - y.mean()))
            worse.append(f"{name}RMSE {own:.4g} against {constant:.4g}")
    if same:
        warn(
            f"the targets of all {len(target)} {rows} are the same: {_some(same)}. Nothing can be said from them about "
            "other targets. Check the target column.",
            LatedropWarning,
            stacklevel=stacklevel + 1,
        )
    if worse:
        warn(
            f"the model predicts the targets of the {rows} no better than their average does: {_some(worse)}. Its "
            "output may be in other units than the targets, or the weights untrained: compare a few rows. If the "
            "model learned standardised targets or their logarithm, pass target=Standardized(mean, std) or Log().",
            LatedropWarning,
            stacklevel=stacklevel + 1,
        )


def _is_poor(mean: Tensor, target: Tensor) -> bool:
    """Return True if a constant, or a line through outputs and targets, is better by more than chance explains."""
    e2, c2 = (target - mean).square().mean(1), (target - target.mean()).square().mean(1)
    d = e2 - c2
    worse = d.mean() > _ERRORS * d.std() / len(d) ** 0.5
    x, y = mean - mean.mean(), target - target.mean()
    tiny = torch.finfo(x.dtype).tiny
    explained = (x * y).sum().square() / x.square().sum().clamp_min(tiny) / y.square().sum().clamp_min(tiny)
    return bool(worse | ((e2.mean() > _NO_GAIN * c2.mean()) & (explained > _HALF)))


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:_SHOWN]) + (f"; ... ({len(texts)} outputs)" if len(texts) > _SHOWN else "")


def is_classification(labels: Any, output: Tensor | None) -> bool:
    """Return True if labels and outputs are those of a classifier.

    They are where labels are whole numbers `(N,)` beside outputs `(N, K)` of at least two columns, or `(N, H, W)`
    beside `(N, K, H, W)`: as targets of a regression they would not even fit.
    """
    whole = isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex()
    if not whole or output is None or output.dim() != labels.dim() + 1 or output.dim() < 2:
        return False
    return output.shape[1] > 1 and output.shape[2:] == labels.shape[1:]


def as_logits(output: Tensor, *, maps: bool = False) -> Tensor:
    """Return `(N, K)`, or maps `(N, K, ...)`, also from one logit; `OutputError` where they look like probabilities."""
    if (output.dim() > 2) != maps:
        wanted = "maps of logits (N, K, H, W)" if maps else "logits (N, K), or (N,) or (N, 1) of a binary classifier"
        raise OutputError(
            f"expected {wanted}; found shape {tuple(output.shape)}. Pass a readout that gives them, as the calibration "
            "was made with."
        )
    output = output[:, None] if output.dim() == 1 else output
    if output.shape[1] == 1:
        return torch.cat([torch.zeros_like(output), output], 1)
    pixels = output.flatten(2) if maps else output[:, :, None]
    some = pixels[:, :, :: max(1, len(pixels) * pixels.shape[2] // _LOOKED_AT)]
    _check_no_probabilities(some.movedim(1, -1).reshape(-1, output.shape[1]))
    return output


def _check_no_probabilities(output: Tensor) -> None:
    """Raise `OutputError` where all of several rows `(N, K)` look like probabilities."""
    if being_traced():
        return
    most = _COARSE_SUMS if bool((output == output.bfloat16()).all()) else _SUMS
    sums = output.double().sum(1)
    if len(output) > 1 and bool(((output >= 0).all(1) & ((sums - 1).abs() < most)).all()):
        raise OutputError(
            "expected logits, as they are before a softmax; found rows that are not below 0 and sum to 1, as "
            "probabilities do. Pass readout=lambda p: p.clamp_min(1e-12).log(), or the model without its last softmax."
        )


def as_labels(labels: Any, classes: int, shape: Sequence[int], ignore_index: int | None = None) -> Tensor:
    """Return labels of the `shape` `(N,)` or `(N, H, W)` as whole numbers from 0 to `classes - 1`; else `DataError`."""
    labels = torch.as_tensor(labels)
    if labels.dim() == len(shape) + 1 and labels.shape[1] == 1:
        labels = labels[:, 0]
    maps = len(shape) > 1
    if tuple(labels.shape) != tuple(shape):
        raise DataError(
            f"expected one label for each {'pixel' if maps else 'row'}, {tuple(shape)}; found shape "
            f"{tuple(labels.shape)}. Of one-hot labels pass labels.argmax(1)."
        )
    numbers = labels.is_complex() or (labels.is_floating_point() and classes > 2)
    if numbers or (labels.is_floating_point() and not bool((labels == labels.round()).all())):
        raise DataError(
            f"expected labels as whole numbers from 0 to {classes - 1}; found {labels.dtype}. Convert them with "
            "labels.long() if they are; numbers that are no classes are task='regression'."
        )
    codes: Tensor = labels.long()
    counted = codes if ignore_index is None else codes[codes != ignore_index]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= classes):
        beside = "" if ignore_index is None else f", beside the ignore_index {ignore_index}"
        remedy = "Labels count from 0; leave out rows whose class the model does not know."
        if maps:
            remedy = "Name the label of pixels that have no class: task=Classification(ignore_index=...)."
        raise DataError(
            f"expected labels from 0 to {classes - 1}{beside}, as the model has {classes} classes; found "
            f"{int(counted.min())} to {int(counted.max())}. {remedy}"
        )
    return codes


def check_row_count(rows: int | None, classes: int) -> None:
    """Raise `DataError` where rows are too few to fit to; None: nobody knows how many there are."""
    if rows is not None and rows < max(2, classes):
        raise DataError(
            f"expected at least as many validation rows as classes, {classes}, and better a thousand; found {rows}."
        )


def check_classes(logits: Tensor, labels: Tensor, *, binary: bool) -> None:
    """Raise where labels `(N,)` are too few to fit to, or where the outputs of all rows look like probabilities.

    One number between 0 and 1 may be either: it is a probability where the labels are likelier under it.
    """
    check_row_count(len(labels), logits.shape[1])
    if len(labels.unique()) < 2:
        raise DataError(
            f"expected labels of at least two classes; found {len(labels)} rows of class {int(labels[0])} alone. Pass "
            "rows by chance, not the first ones of a sorted file."
        )
    if not binary:
        _check_no_probabilities(logits)
        return
    z, y = logits[:, 1].double(), labels.double()
    inside = bool(((z >= 0) & (z <= 1)).all())
    if inside and binary_cross_entropy(z, y) < binary_cross_entropy_with_logits(z, y):
        raise OutputError(
            "expected logits of a binary classifier, as they are before a sigmoid; found numbers from 0 to 1, as "
            "probabilities are. Pass readout=lambda p: p.clamp(1e-7, 1 - 1e-7).logit(), or the model without its "
            "last sigmoid."
        )


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
