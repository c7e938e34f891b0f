"""Targets beside outputs: in their shape and dtype, and whether the model is any closer to them than their mean is.

With `e2 = (target - mean)^2` of the model and `c2 = (target - average target)^2`, each averaged over a row, the model
is worse than a constant where the average of `d = e2 - c2` over the rows is above 0 by three of its standard errors. A
model in other units gains nothing over the constant, while a straight line through outputs and targets halves the
squared error: that is what a forgotten `target=` looks like.
"""

from __future__ import annotations

from collections.abc import Iterable
from warnings import warn

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.errors import DataError, LatedropWarning

__all__ = ["as_output", "check_rows", "check_shapes", "warn_of_poor_fit"]

_ERRORS = 3.0  # standard errors: what is less may be chance
_NO_GAIN, _HALF = 0.98, 0.5
_MOST_LINES = 8  # that a warning can list
_SHOWN = 3
_FEW_ROWS = 10


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
        warn(
            f"only {rows} validation rows: the scale and the intervals will be rough.",
            LatedropWarning,
            stacklevel=stacklevel + 1,
        )


def check_shapes(shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise `DataError` where outputs have more than one shape."""
    different = sorted({tuple(shape) for shape in shapes})
    if len(different) > 1:
        raise DataError(
            f"expected outputs of one shape in all batches; found {different}. Pass a readout that gives one shape, "
            "such as a map's sum, or calibrate on inputs of one size."
        )


def warn_of_poor_fit(
    mean: Tensor, target: Tensor, rows: str, *, per_output: bool, stacklevel: int, hint: bool = False
) -> None:
    """Warn of outputs whose targets are all the same, or that the model predicts no better than their average does.

    Args:
        mean: predictions, `(N, ...)`.
        target: of the same shape.
        rows: what the rows are called.
        per_output: whether each index of axis 1 is looked at on its own.
        stacklevel: of the warning, as seen by the caller.
        hint: whether to look for a transform of the targets that makes up for it.
    """
    if len(target) < 2:
        return
    count = mean.shape[1] if per_output and mean.dim() > 1 else 1
    parts = (values.detach().double().reshape(len(values), count, -1).unbind(1) for values in (mean, target))
    outputs = {f"output {k}: " if per_output else "": pair for k, pair in enumerate(zip(*parts, strict=True))}
    same = [f"{name}{float(y[0, 0]):g}" for name, (_, y) in outputs.items() if bool((y == y[0, 0]).all())]
    if same:
        warn(
            f"the targets of all {len(target)} {rows} are the same: {_some(same)}. Nothing can be said from them about "
            "other targets. Check the target column.",
            LatedropWarning,
            stacklevel=stacklevel + 1,
        )
    worse = [
        f"{name}RMSE {_rms(y - m):.4g} against {_rms(y - y.mean()):.4g}"
        for name, (m, y) in outputs.items()
        if _is_poor(m, y)
    ]
    if worse:
        warn(
            f"the model predicts the targets of the {rows} no better than their average does: {_some(worse)}. Its "
            "output may be in other units than the targets, or normalised, or the weights untrained. "
            f"Compare a few rows.{_hint(list(outputs.values())) if hint else ''}",
            LatedropWarning,
            stacklevel=stacklevel + 1,
        )


def _hint(outputs: list[tuple[Tensor, ...]]) -> str:
    """Return which transform of the targets makes up for it, if one does."""
    if all(bool((y > 0).all()) and _rms(y.log() - m) < _HALF**0.5 * float(y.log().std()) for m, y in outputs):
        return " It is near the logarithm of the targets: if that was learned, pass target=Log()."
    intercepts, slopes, shares = zip(*(_line(m, y) for m, y in outputs), strict=True)
    if len(outputs) > _MOST_LINES or min(slopes) <= 0 or min(shares) <= _HALF:
        return ""
    means, stds = (", ".join(f"{value:.4g}" for value in values) for values in (intercepts, slopes))
    if len(outputs) > 1:
        means, stds = f"[{means}]", f"[{stds}]"
    return (
        f" A straight line through outputs and targets explains {min(shares):.0%} of the targets' variance: if these "
        f"were standardised for training, pass target=Standardized(mean={means}, std={stds}), or those of training."
    )


def _line(mean: Tensor, target: Tensor) -> tuple[float, float, float]:
    """Return intercept and slope of the targets over the outputs, and the share of the variance that it explains."""
    x, y = mean - mean.mean(), target - target.mean()
    tiny = torch.finfo(x.dtype).tiny
    slope = (x * y).sum() / x.square().sum().clamp_min(tiny)
    share = slope * (x * y).sum() / y.square().sum().clamp_min(tiny)
    return float(target.mean() - slope * mean.mean()), float(slope), float(share)


def _is_poor(mean: Tensor, target: Tensor) -> bool:
    e2, c2 = (target - mean).square().mean(1), (target - target.mean()).square().mean(1)
    if not bool(c2.any()):
        return False
    d = e2 - c2
    worse = d.mean() > _ERRORS * d.std() / len(d) ** 0.5
    return bool(worse | ((e2.mean() > _NO_GAIN * c2.mean()) & (_line(mean, target)[2] > _HALF)))


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:_SHOWN]) + (f"; ... ({len(texts)} outputs)" if len(texts) > _SHOWN else "")
