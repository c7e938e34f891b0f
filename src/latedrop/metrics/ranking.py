"""Whether larger predicted variances go with larger errors: what a constant variance cannot do."""

from __future__ import annotations

import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop.metrics.entries import Array, scored

__all__ = ["auroc", "kept_means", "rank_correlation"]


def rank_correlation(
    mean: Array, variance: Array, target: Array, *, mask: Array | None = None, per_output: bool = False
) -> Tensor:
    """Spearman's correlation of standard deviation and size of the error, a scalar or `(K,)`; ties share ranks.

    0 where all variances or all errors are equal: a constant ranks nothing. The arguments are those of every metric,
    see `latedrop.metrics`.

    >>> rank_correlation([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, -3.0])
    tensor(1.)
    """

    def score(error: Tensor, var: Tensor, _: Tensor | None) -> Tensor:
        return _correlation(_ranks(error.abs()), _ranks(var)).to(var.dtype)

    return scored(score, mean, variance, target, mask=mask, per_output=per_output)


def auroc(score: Array, positive: Array) -> Tensor:
    """How well a score tells entries apart: the probability that one of `positive` has the larger score, a scalar.

    `score` `(N,)` are numbers, such as the standard deviations of usual and of strange rows; `positive` `(N,)` is bool.
    Equal scores count half.

    >>> auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
    tensor(0.7500)
    """
    values, chosen = torch.as_tensor(score).double().flatten(), torch.as_tensor(positive).flatten()
    if chosen.dtype != torch.bool or len(chosen) != len(values):
        raise DataError(
            f"expected one bool for each of {len(values)} scores; found {len(chosen)} of {chosen.dtype}. "
            "Compare them, as in labels == 1."
        )
    if not bool(values.isfinite().all()):
        raise DataError("expected finite scores; found NaN or inf. Remove these entries.")
    many, rest = int(chosen.sum()), int((~chosen).sum())
    if not many or not rest:
        raise DataError(f"expected entries of both kinds; found {many} positive and {rest} others.")
    above = float(_ranks(values)[chosen.to(values.device)].sum()) - many * (many + 1) / 2
    return torch.tensor(above / (many * rest))


def _ranks(values: Tensor) -> Tensor:
    """Return ranks from 1, in float64; equal values share the mean of their ranks."""
    _, group, sizes = torch.unique(values, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    shared: Tensor = last - (sizes.double() - 1) / 2
    return shared[group]


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(), b - b.mean()
    size = a.norm() * b.norm()
    return a @ b / size if float(size) > 0 else torch.zeros((), dtype=a.dtype, device=a.device)


def kept_means(size: Tensor, by: Tensor) -> Tensor:
    """Return the means of the 1, 2, ... entries with the least `by`; equal ones are replaced by their mean."""
    _, group, count = torch.unique(by, return_inverse=True, return_counts=True)
    shared = torch.zeros(len(count), dtype=size.dtype, device=size.device).index_add_(0, group, size) / count
    ordered = shared.repeat_interleave(count)
    means: Tensor = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, dtype=size.dtype, device=size.device)
    return means
