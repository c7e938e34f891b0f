"""How far predictions are from their targets; the uncertainty is not looked at."""

from __future__ import annotations

from torch import Tensor

from latedrop.metrics.entries import Array, average, columns, joined

__all__ = ["mae", "rmse"]


def rmse(
    mean: Array,
    variance: Array | None,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    weights: Array | None = None,
) -> Tensor:
    """Root mean squared error, `sqrt(mean(e^2))`, a scalar or `(K,)` in the target's unit.

    The arguments are those of every metric, see `latedrop.metrics`; `variance` is ignored and may be None.

    >>> rmse([0.0, 0.0], None, [3.0, 4.0])
    tensor(3.5355)
    """
    used = columns(mean, None, target, mask, per_output, weights)
    return joined([average(error.square(), w).sqrt() for error, _, w in used], per_output)


def mae(
    mean: Array,
    variance: Array | None,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    weights: Array | None = None,
) -> Tensor:
    """Mean absolute error, `mean(|e|)`, a scalar or `(K,)` in the target's unit.

    The arguments are those of every metric, see `latedrop.metrics`; `variance` is ignored and may be None.

    >>> mae([0.0, 0.0], None, [3.0, -4.0])
    tensor(3.5000)
    """
    used = columns(mean, None, target, mask, per_output, weights)
    return joined([average(error.abs(), w) for error, _, w in used], per_output)
