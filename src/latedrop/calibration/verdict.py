"""What an uncertainty is worth, in one sentence, from rows that it was not fitted to.

The measure is one constant variance for all rows, the validation rows' mean squared error. The gain over it is the mean
over rows of `(log c + e^2 / c - log v - e^2 / v) / 2` nats, with `c` the constant and `v` the variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from latedrop.metrics import rank_correlation
from latedrop.metrics.levels import central_quantile

__all__ = ["Folds", "Verdict", "correlation", "crossed", "folds", "gains", "judged", "losses", "standard_error"]

Folds: TypeAlias = Literal["shuffled", "blocks"]
"""Which rows are left out of a fit together: some of a shuffle, or a run of neighbours."""

_LEVEL = 0.9
_FOLDS = 10
_LEAST = 1e-4  # of the mean squared error


@dataclass(frozen=True)
class Verdict:
    """What a variance is worth on rows that it was not fitted to.

    Attributes:
        rows: how many.
        fitted: how they were kept apart: `"cross-validation"` or `"other rows"`.
        gain: nats per value by which it is better than the constant.
        gain_error: standard error of the gain over rows.
        correlation: rank correlation of standard deviation and size of the error.
        coverage: share of values inside their 90 % intervals.
        coverage_error: its standard error over rows.
    """

    rows: int
    fitted: str
    gain: float
    gain_error: float
    correlation: float
    coverage: float
    coverage_error: float

    @property
    def better(self) -> bool | None:
        """Whether it is better than a constant; None where the rows cannot tell (within two standard errors)."""
        return None if abs(self.gain) <= 2 * self.gain_error else self.gain > 0

    @property
    def sentence(self) -> str:
        """The same as a sentence of its own."""
        text = str(self)
        return f"{text[0].upper()}{text[1:]}."

    def __str__(self) -> str:
        words = {True: "better than one constant variance by", False: "worse than one constant variance by", None: ""}
        size = f"{abs(self.gain):.3f} nats (± {self.gain_error:.3f})"
        worth = f"{words[self.better]} {size}"
        if self.better is None:
            worth = f"no better than one constant variance ({self.gain:+.3f} ± {self.gain_error:.3f} nats)"
        where = "by cross-validation" if self.fitted == "cross-validation" else "not used for fitting"
        return (
            f"{worth}; rank correlation of std and error {self.correlation:.2f}; 90 % intervals hold "
            f"{self.coverage:.0%} (± {100 * self.coverage_error:.1f}) of {self.rows} rows {where}"
        )


def judged(
    error: Tensor,
    variance: Tensor,
    constant: Tensor,
    *,
    fitted: str,
    inside: Tensor | None = None,
    kind: Folds = "shuffled",
) -> Verdict:
    """The verdict on errors and variances `(N, ...)`; the constant broadcasts with them.

    `inside` `(N, ...)` says what lies in its interval where that is not the Gaussian one. With `"blocks"` the rows of a
    run are alike, and standard errors come from runs.
    """
    error, variance, constant = (part.double() for part in (error, variance, constant.to(error)))
    if inside is None:
        inside = error.abs() <= central_quantile(_LEVEL) * variance.sqrt()
    by_row = [gains(error, variance, constant), inside.double().reshape(len(inside), -1).mean(1)]
    return Verdict(
        rows=len(error),
        fitted=fitted,
        gain=float(by_row[0].mean()),
        gain_error=standard_error(by_row[0], kind),
        correlation=correlation(error, variance),
        coverage=float(by_row[1].mean()),
        coverage_error=standard_error(by_row[1], kind),
    )


def gains(error: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    """By how many nats the variance is better than the constant, per value, of every row `(N,)`."""
    return losses(error, constant) - losses(error, variance)


def losses(error: Tensor, variance: Tensor) -> Tensor:
    """The NLL per value of every row `(N,)`, but for a constant; the variance broadcasts with the errors `(N, ...)`."""
    loss: Tensor = (variance.log() + error.square() / variance) / 2
    return loss.reshape(len(loss), -1).mean(1)


def standard_error(values: Tensor, kind: Folds = "shuffled") -> float:
    """Of the mean of `(N,)`: of independent rows, or from the means of runs of them."""
    if kind == "blocks":
        fold = folds(len(values), kind)
        values = torch.stack([values[fold == number].mean() for number in fold.unique()])
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("inf")


def crossed(
    error: Tensor, fit: Callable[[Tensor], Callable[[Tensor], Tensor]], per_output: bool, kind: Folds = "shuffled"
) -> tuple[Tensor, Tensor]:
    """Variances and constants `(N, ...)` of every row, from fits to the rows of the other folds.

    `fit` is given the places of the rows to fit to, and returns a function from places to variances. With `per_output`
    each index of axis 1 has a constant of its own. Where no row of the other folds has an error, the constant is
    a small number, and the variance too.
    """
    fold = folds(len(error), kind)
    axes = tuple(axis for axis in range(error.dim()) if axis != 1 or not per_output)
    variance, constant = torch.empty_like(error), torch.empty_like(error)
    least = _LEAST * error.square().mean(axes, keepdim=True)
    for number in fold.unique().tolist():
        rest, held = (fold != number).nonzero()[:, 0], (fold == number).nonzero()[:, 0]
        size = error[rest].square().mean(axes, keepdim=True)
        constant[held] = torch.maximum(size, least)
        variance[held] = fit(rest)(held).to(variance) if bool(size.all()) else constant[held]
    return variance, constant


def folds(rows: int, kind: Folds = "shuffled") -> Tensor:
    """A fold for each row, `(rows,)`: every tenth of a fixed shuffle, or one fold per row where they are few.

    Of blocks, a run of a tenth of the rows each.
    """
    if kind == "blocks":
        return torch.arange(rows) * min(_FOLDS, rows) // max(1, rows)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    fold = torch.empty(rows, dtype=torch.long)
    fold[order] = torch.arange(rows) % min(_FOLDS, rows)
    return fold


def correlation(error: Tensor, variance: Tensor) -> float:
    """Rank correlation of standard deviation and size of the error, averaged over outputs, whose units may differ."""
    several = error.dim() == 2 and error.shape[1] > 1
    return float(rank_correlation(torch.zeros_like(error), variance, error, per_output=several).mean())
