r"""How good a prediction and its uncertainty are: pure functions of `(mean, variance, target)`.

With `e = target - mean`, `v = variance`, `std = sqrt(v)` and `z_a` the normal quantile of `(1 + a) / 2`,
nearly all is built from the Gaussian likelihood and from how often a target lies in its central interval:

$$
\mathrm{NLL} = \mathrm{mean}\left( \frac{e^2}{2 v} + \frac{\log v}{2} \right) + \frac{\log 2 \pi}{2},
\qquad
\pi(a) = \mathrm{mean}\left( |e| \le z_a \cdot \mathrm{std} \right).
$$

Arguments are tensors, numpy arrays or numbers of one shape, `(N,)`, `(N, K)` or `(N, K, ...)`. Nothing is
broadcast, except that a target `(N,)` goes with a mean `(N, 1)`. Results are float32, or float64 where an
argument is, on the device of `mean`. Every metric has two options:

- `mask`: bool, broadcastable to the target. Entries that are False do not count, and may even be NaN.
- `per_output`: reduce over all axes but axis 1, to shape `(K,)` (`(1,)` for inputs `(N,)`), not to a scalar.

References: Gneiting & Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation" (2007). Tran et
al., "Methods for comparing uncertainty quantifications for material property predictions" (2020). Levi et
al., "Evaluating and Calibrating Uncertainty Prediction in Regression Tasks" (2022).
"""

import math
import warnings
from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, LatedropWarning

__all__ = [
    "align_target",
    "balance",
    "calibration_curve",
    "coverage",
    "crps",
    "ence",
    "ideal_nll",
    "interval_score",
    "interval_width",
    "mae",
    "miscalibration_area",
    "nll",
    "rmse",
]

Array = Tensor | npt.ArrayLike
Levels = int | Sequence[float] | Tensor | npt.NDArray[np.floating]


def rmse(
    mean: Array, variance: Array | None, target: Array, *, mask: Array | None = None, per_output: bool = False
) -> Tensor:
    """Root mean squared error, `sqrt(mean(e^2))`.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Ignored; may be None.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.

    Returns:
        A scalar, or `(K,)`; in the target's unit.

    Example:
        >>> rmse([0.0, 0.0], None, [3.0, 4.0])
        tensor(3.5355)
    """
    columns = _columns(mean, None, target, mask, per_output)
    return _join([error.square().mean().sqrt() for error, _ in columns], per_output)


def mae(
    mean: Array, variance: Array | None, target: Array, *, mask: Array | None = None, per_output: bool = False
) -> Tensor:
    """Mean absolute error, `mean(|e|)`.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Ignored; may be None.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.

    Returns:
        A scalar, or `(K,)`; in the target's unit.

    Example:
        >>> mae([0.0, 0.0], None, [3.0, -4.0])
        tensor(3.5000)
    """
    columns = _columns(mean, None, target, mask, per_output)
    return _join([error.abs().mean() for error, _ in columns], per_output)


def nll(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    constant: bool = True,
) -> Tensor:
    """Gaussian negative log-likelihood, `mean(e^2 / (2 v) + log(v) / 2) + log(2 pi) / 2`.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`; above 0.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        constant: Whether `log(2 pi) / 2` is part of it; the dropout injection paper leaves it out.

    Returns:
        A scalar, or `(K,)`; in nats.

    Example:
        >>> nll([0.0, 0.0], [1.0, 4.0], [1.0, 2.0], constant=False)
        tensor(0.8466)
    """
    columns = _columns(mean, variance, target, mask, per_output, positive=True)
    scores = [(error.square() / var + var.log()).mean() / 2 for error, var in columns]
    return _join(scores, per_output) + (math.log(2 * math.pi) / 2 if constant else 0.0)


def ideal_nll(
    mean: Array,
    variance: Array | None,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    constant: bool = True,
) -> Tensor:
    """The lowest `nll` any variance reaches, that of `v = e^2`: `mean(1 + log(e^2)) / 2 + log(2 pi) / 2`.

    An error of exactly 0 would make it -inf. Such entries count as the smallest error that is not 0, with a
    warning that says how many they are.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Ignored; may be None.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        constant: Whether `log(2 pi) / 2` is part of it.

    Returns:
        A scalar, or `(K,)`; in nats.

    Example:
        >>> ideal_nll([0.0, 0.0], None, [1.0, 2.0], constant=False)
        tensor(0.8466)
    """
    sizes = [error.abs() for error, _ in _columns(mean, None, target, mask, per_output)]
    zeros, entries = sum(int((size == 0).sum()) for size in sizes), sum(size.numel() for size in sizes)
    if any(not size.any() for size in sizes):
        raise DataError(
            "expected an error that is not 0, found every error 0: the ideal variance is 0 and its NLL -inf; "
            "check that the target is not the prediction itself"
        )
    if zeros:
        warnings.warn(
            f"{zeros} of {entries} errors are exactly 0; the ideal NLL counts them as the smallest error "
            "that is not 0 (mask them to leave them out)",
            LatedropWarning,
            stacklevel=2,
        )
    floored = [torch.where(size > 0, size, size[size > 0].min()) for size in sizes]
    scores = [size.log().mean() + 0.5 for size in floored]
    return _join(scores, per_output) + (math.log(2 * math.pi) / 2 if constant else 0.0)


def calibration_curve(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    levels: Levels = 99,
) -> tuple[Tensor, Tensor]:
    """How often the target lies in the central interval `mean ± z_a std`, against the interval's level `a`.

    Below the bisector the uncertainty is too small (overconfident), above it too large (underconfident).

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`; 0 is an interval of no width.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One curve for each index of axis 1.
        levels: How many, evenly spaced inside (0, 1), at `k / (levels + 1)`; or the levels themselves.

    Returns:
        The levels `(L,)` and the observed frequencies `(L,)`, or `(K, L)` with `per_output`.

    Example:
        >>> calibration_curve([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
        (tensor([0.5000, 0.9000]), tensor([0.5000, 0.7500]))
    """
    grid = _levels(levels)
    columns = _columns(mean, variance, target, mask, per_output)
    observed = [_observed(error, var, grid) for error, var in columns]
    return grid.to(observed[0]), _join(observed, per_output)


def miscalibration_area(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    levels: Levels = 99,
) -> Tensor:
    """Area between the calibration curve and the bisector, `mean(|pi(a) - a|)` over the levels.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        levels: As in `calibration_curve`.

    Returns:
        A scalar, or `(K,)`; between 0 (calibrated) and about 0.5.

    Example:
        >>> miscalibration_area([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
        tensor(0.0750)
    """
    grid, pi = calibration_curve(mean, variance, target, mask=mask, per_output=per_output, levels=levels)
    return (pi - grid).abs().mean(-1)


def balance(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    levels: Levels = 99,
) -> Tensor:
    """Signed area between the calibration curve and the bisector, `mean(pi(a) - a)` over the levels.

    Negative is overconfident on the whole, positive underconfident. It never falls as one factor on every
    variance grows: bisection over that factor finds the relaxed scale.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        levels: As in `calibration_curve`.

    Returns:
        A scalar, or `(K,)`; between about -0.5 and 0.5.

    Example:
        >>> balance([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0], levels=[0.5, 0.9])
        tensor(-0.0750)
    """
    grid, pi = calibration_curve(mean, variance, target, mask=mask, per_output=per_output, levels=levels)
    return (pi - grid).mean(-1)


def coverage(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    level: float = 0.9,
) -> Tensor:
    """Fraction of targets inside the central interval at one level, `pi(a)`.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        level: Probability content `a` of the interval.

    Returns:
        A scalar, or `(K,)`; `level` is calibrated.

    Example:
        >>> coverage([0.0] * 4, [1.0] * 4, [0.1, -0.5, 1.0, 3.0])
        tensor(0.7500)
    """
    _check_level(level)
    _, observed = calibration_curve(mean, variance, target, mask=mask, per_output=per_output, levels=[level])
    return observed.squeeze(-1)


def interval_width(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    level: float = 0.9,
) -> Tensor:
    """Mean width of the central interval at one level, `2 z_a mean(std)`; the sharpness.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`.
        target: True values, shaped as `mean`; the width does not depend on them.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        level: Probability content `a` of the interval.

    Returns:
        A scalar, or `(K,)`; in the target's unit.

    Example:
        >>> interval_width([0.0, 0.0], [1.0, 4.0], [1.0, 2.0], level=0.9)
        tensor(4.9346)
    """
    z = _normal_quantile(level)
    columns = _columns(mean, variance, target, mask, per_output)
    return _join([2 * z * var.sqrt().mean() for _, var in columns], per_output)


def crps(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
) -> Tensor:
    """Continuous ranked probability score: the integral of `(F(t) - [t >= target])^2`, `F` the Gaussian CDF.

    In closed form `mean(std (w (2 Phi(w) - 1) + 2 phi(w) - 1 / sqrt(pi)))`, with `w = e / std`. As the
    variance goes to 0 it becomes `|e|`, and a variance of 0 is scored so.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.

    Returns:
        A scalar, or `(K,)`; in the target's unit.

    Example:
        >>> crps([0.0, 0.0], [1.0, 0.0], [0.0, 3.0])
        tensor(1.6168)
    """
    scores = []
    for error, var in _columns(mean, variance, target, mask, per_output):
        # The inner `where` keeps 0 / 0, and so NaN gradients, out of the branch that is not taken.
        std = torch.where(var > 0, var, 1).sqrt()
        w = error / std
        density = torch.exp(-w.square() / 2) / math.sqrt(2 * math.pi)
        score = error * torch.erf(w / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
        scores.append(torch.where(var > 0, score, error.abs()).mean())
    return _join(scores, per_output)


def interval_score(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    level: float = 0.9,
) -> Tensor:
    """Width of the interval at one level, plus a fine for each target outside it.

    `mean(2 z_a std + 2 / (1 - a) max(0, |e| - z_a std))`: the fine is the distance to the interval, times the
    factor that makes the true quantiles the best bounds.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        level: Probability content `a` of the interval.

    Returns:
        A scalar, or `(K,)`; in the target's unit.

    Example:
        >>> interval_score([0.0, 0.0], [1.0, 1.0], [0.0, 2.0], level=0.9)
        tensor(6.8412)
    """
    z = _normal_quantile(level)
    scores = []
    for error, var in _columns(mean, variance, target, mask, per_output):
        half = z * var.sqrt()
        scores.append((2 * half + 2 / (1 - level) * torch.relu(error.abs() - half)).mean())
    return _join(scores, per_output)


def ence(
    mean: Array,
    variance: Array,
    target: Array,
    *,
    mask: Array | None = None,
    per_output: bool = False,
    bins: int = 10,
) -> Tensor:
    """Expected normalised calibration error, `mean(|RMV - RMSE| / RMV)` over bins of like variance.

    Entries are put in order of predicted variance and cut into bins of equal size, give or take one. RMV is
    the root of a bin's mean variance, RMSE the root of its mean squared error.

    Args:
        mean: Predictions, `(N, ...)`.
        variance: Their variances, shaped as `mean`; above 0.
        target: True values, shaped as `mean`.
        mask: True where an entry counts.
        per_output: One value for each index of axis 1.
        bins: How many bins; at most the number of entries.

    Returns:
        A scalar, or `(K,)`; 0 is calibrated, no upper bound.

    Example:
        >>> ence([0.0] * 4, [1.0, 1.0, 4.0, 4.0], [1.0, -1.0, 4.0, 4.0], bins=2)
        tensor(0.5000)
    """
    columns = _columns(mean, variance, target, mask, per_output, positive=True)
    fewest = min(error.numel() for error, _ in columns)
    if not 1 <= bins <= fewest:
        raise ArgumentError(
            f"expected bins between 1 and the number of entries, {fewest}, found {bins}; "
            "take fewer bins or more validation rows"
        )
    scores = []
    for error, var in columns:
        order = var.argsort(stable=True)
        rmv = torch.stack([part.mean().sqrt() for part in var[order].tensor_split(bins)])
        root = torch.stack([part.square().mean().sqrt() for part in error[order].tensor_split(bins)])
        scores.append(((rmv - root).abs() / rmv).mean())
    return _join(scores, per_output)


def align_target(mean: Array, target: Array) -> Tensor:
    """The target as a tensor of the prediction's shape, on its device.

    Shapes have to be equal: a broadcast between predictions and targets is nearly always a mistake, as
    `(N, 1)` against `(N,)` compares each with each. That one case is aligned; the others are refused.

    Args:
        mean: Predictions, `(N, ...)`; only the shape and the device matter.
        target: True values, of the same shape, or `(N,)` for predictions `(N, 1)`.

    Returns:
        The target, shaped as `mean`; its dtype is its own.

    Raises:
        DataError: The shapes differ in any other way.

    Example:
        >>> align_target(torch.zeros(3, 1), torch.tensor([1.0, 2.0, 3.0])).shape
        torch.Size([3, 1])
    """
    mean, target = _tensor("mean", mean), _tensor("target", target)
    if target.ndim == 1 and mean.shape == (len(target), 1):
        target = target.unsqueeze(1)
    _check_shape("target", target, mean)
    return target.to(mean.device)


def _columns(
    mean: Array,
    variance: Array | None,
    target: Array,
    mask: Array | None,
    per_output: bool,
    positive: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """The used entries' (error, variance), flat and checked: one pair, or one for each output.

    For a variance of None, which the caller does not look at, ones stand in.
    """
    error, var, keep = _checked(mean, variance, target, mask, positive)
    if not per_output:
        return [(error.masked_select(keep), var.masked_select(keep))]
    if error.ndim < 2:
        error, var, keep = error.reshape(-1, 1), var.reshape(-1, 1), keep.reshape(-1, 1)
    outputs = list(zip(error.unbind(1), var.unbind(1), keep.unbind(1), strict=True))
    empty = [k for k, (_, _, kept) in enumerate(outputs) if not kept.any()]
    if empty:
        raise DataError(f"expected a mask that keeps part of every output, found none of {empty}; widen it")
    return [(e.masked_select(kept), v.masked_select(kept)) for e, v, kept in outputs]


def _checked(
    mean: Array, variance: Array | None, target: Array, mask: Array | None, positive: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Error, variance and mask, of the shape of `mean`; what the mask leaves out is not checked."""
    mean, target = _tensor("mean", mean), align_target(mean, target)
    arrays = {"mean": mean, "target": target}
    if variance is not None:
        arrays["variance"] = _tensor("variance", variance).to(mean.device)
        _check_shape("variance", arrays["variance"], mean)
    if mean.numel() == 0:
        raise DataError(f"expected at least one entry, found shape {tuple(mean.shape)}; pass some data")
    keep = _keep(mask, mean)
    for name, array in arrays.items():
        _refuse(~array.isfinite() & keep, f"{name} is NaN or infinite", "remove these entries, or mask them")
    dtype = reduce(torch.promote_types, (array.dtype for array in arrays.values()), torch.float32)
    error = target.to(dtype) - mean.to(dtype)
    if variance is None:
        return error, torch.ones_like(error), keep
    var = arrays["variance"].to(dtype)
    _refuse((var < 0) & keep, "variance is below 0", "pass variances, not log-variances or errors")
    if positive:
        _refuse((var == 0) & keep, "variance is 0, which this metric cannot score", "add a floor to it")
    return error, var, keep


def _join(scores: list[Tensor], per_output: bool) -> Tensor:
    return torch.stack(scores) if per_output else scores[0]


def _observed(error: Tensor, variance: Tensor, levels: Tensor) -> Tensor:
    """Fraction of entries inside their interval, for each of the `(L,)` levels."""
    error, variance = error.detach().abs(), variance.detach()
    # Sorted once, each level is a look-up: memory is linear in N. An interval of no width holds only error 0.
    ratio = torch.where(error == 0, 0, error / variance.sqrt()).sort().values
    z = torch.special.ndtri((1 + levels) / 2).to(ratio)
    return torch.searchsorted(ratio, z, right=True).to(ratio) / len(ratio)


def _levels(levels: Levels) -> Tensor:
    """The levels as a float64 CPU tensor `(L,)`."""
    if isinstance(levels, int | np.integer) and levels >= 1:
        return torch.arange(1, int(levels) + 1, dtype=torch.float64) / (int(levels) + 1)
    try:
        grid = torch.tensor([float(level) for level in levels], dtype=torch.float64)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        grid = torch.empty(0)
    if not len(grid) or not ((grid > 0) & (grid < 1)).all():
        raise ArgumentError(
            f"expected levels as a positive int, or as numbers inside (0, 1), found {levels}; "
            "a 90 % interval is level 0.9"
        )
    return grid


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ArgumentError(f"expected a level inside (0, 1), found {level}; a 90 % interval is level 0.9")


def _normal_quantile(level: float) -> float:
    """Half the width of the central interval at `level`, in standard deviations."""
    _check_level(level)
    return float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))


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


def _keep(mask: Array | None, mean: Tensor) -> Tensor:
    """The mask in the shape of `mean`; all True for None."""
    if mask is None:
        return torch.ones_like(mean, dtype=torch.bool)
    keep = _tensor("mask", mask).to(mean.device)
    if keep.dtype != torch.bool:
        raise DataError(f"expected a mask of bool, True to use, found {keep.dtype}; compare it: mask > 0")
    if keep.ndim == 1 and mean.shape == (len(keep), 1):
        keep = keep.unsqueeze(1)
    # A mask of one value per example lines up with the last axis, which may happen to have the same length.
    per_example = 0 < keep.ndim < mean.ndim and len(keep) == len(mean) > 1
    try:
        full = keep.broadcast_to(mean.shape)
    except RuntimeError:
        full = None
    if full is None or per_example:
        raise DataError(
            f"expected a mask that broadcasts to {tuple(mean.shape)}, found {tuple(keep.shape)}; "
            "give it as many axes as the target (one value per example: mask[:, None])"
        )
    if not full.any():
        raise DataError(
            f"expected a mask that keeps something, found all {full.numel()} entries masked; True means use"
        )
    return full


def _refuse(bad: Tensor, what: str, remedy: str) -> None:
    count = int(bad.sum())
    if count:
        first = tuple(torch.nonzero(bad)[0].tolist())
        raise DataError(f"{what} in {count} of {bad.numel()} entries, the first at index {first}; {remedy}")
