"""Coefficients of the terms: `variance = floor + sum_j theta_j t_j`, `theta >= 0`, fitted to the squared errors.

Errors and terms are brought to a mean of 1, and the fit is shrunk to the constant in two ways that fade with the n
rows: the squared errors `e2` become `(n e2 + k) / (n + k)`, as if k rows more had the average error, and each
coefficient costs `p / n`. With few rows little is left but the constant; nothing is switched by a narrow margin.

Nested candidates are compared by cross-validation: the floor alone, then one term after the other, then a coefficient
for every site. All terms with one rate for all sites are used unless another candidate is better by more than a
standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from latedrop.calibration.fit import Loss, polished, scored
from latedrop.calibration.verdict import Left, Verdict, crossed, effective_rows, gains, judged, standard_error
from latedrop.metrics.entries import average
from latedrop.records import Limits, record

__all__ = ["Candidate", "Chosen", "Growth", "TermFit", "choose", "fit_terms", "guarded", "ignorant"]

_AVERAGE_ROWS = 5.0
_PRICE = 2.0
_LEAST_FLOOR = 1e-4  # of the mean squared error

Blocks = Sequence[Sequence[int]]
"""Columns that share a coefficient, for each coefficient."""


@dataclass(frozen=True)
class TermFit:
    """`variance = floors + columns @ coefficients`, one row of coefficients and one floor for each output.

    Attributes:
        coefficients: `(K, J)`.
        floors: `(K,)`.
        constants: `(K,)`, the mean squared errors.
    """

    coefficients: Tensor
    floors: Tensor
    constants: Tensor

    def variance(self, columns: Tensor) -> Tensor:
        """The fitted variance `(n, K)` from `(n, K, J)`."""
        return torch.einsum("nkj,kj->nk", columns, self.coefficients) + self.floors


@record
@dataclass(frozen=True)
class Candidate:
    """One of the nested models that were compared.

    Attributes:
        name: what it is made of.
        gain: nats by which it is better than the constant, on rows of other folds.
        gain_error: standard error of that.
    """

    name: str
    gain: float
    gain_error: Annotated[float, Limits(0)]


@dataclass(frozen=True)
class Chosen:
    """The candidate in use.

    Attributes:
        name: what it is made of.
        fit: to all rows; coefficients of the columns that it leaves out are 0.
        verdict: on rows of other folds.
        candidates: all that were compared, the simplest first.
    """

    name: str
    fit: TermFit
    verdict: Verdict
    candidates: tuple[Candidate, ...]


def guarded(variance: Tensor, factor: Tensor, constant: Tensor, ceiling: Tensor | None = None) -> Tensor:
    """`g · variance + (g - 1) · constant`: a row far outside is no narrower than a constant would be there.

    Nor is it made wider than `ceiling`.
    """
    grown = factor * variance + (factor - 1) * constant
    return grown if ceiling is None else torch.minimum(grown, torch.maximum(variance, ceiling))


def ignorant(mean: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """`spread + (mean - centre)^2`: how far off a prediction is on average if the target is any of those known.

    `centre` and `spread` are the mean and the variance of the known targets.
    """
    return spread + (mean - centre).square()


def fit_terms(
    error: Tensor,
    columns: Tensor,
    blocks: Blocks,
    loss: Loss = "nll",
    weights: Tensor | None = None,
    *,
    worth: float | None = None,
) -> TermFit:
    """Fit errors `(n, K)` with columns `(n, K, J)`; each output has coefficients of its own.

    `weights` `(n,)` say what each row counts; n above is then `(sum w)^2 / sum w^2`. `worth` is how many independent
    rows they are, where neighbours are alike.

    With `loss="crps"` the CRPS is lowered from there, of the rows and of k more that have the average error.
    """
    pairs = zip(error.double().unbind(1), columns.double().unbind(1), strict=True)
    fits = [_of_one(e, u, blocks, loss, weights, worth) for e, u in pairs]
    return TermFit(*(torch.stack(part) for part in zip(*fits, strict=True)))


def _of_one(
    error: Tensor, columns: Tensor, blocks: Blocks, loss: Loss, weights: Tensor | None, worth: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    counts = None if weights is None else weights.double() / weights.double().mean()
    rows, count = effective_rows(counts, len(error)), columns.shape[1]
    size = average(error.square(), counts)
    found = torch.zeros(count, dtype=columns.dtype, device=columns.device)
    joined = [columns[:, list(block)].sum(1) for block in blocks]
    used = [(block, column, float(column.mean())) for block, column in zip(blocks, joined, strict=True)]
    used = [part for part in used if part[2] > 0]
    unit = torch.stack([*(column / mean for _, column, mean in used), torch.ones_like(error)], 1)
    start = torch.zeros_like(unit[0])
    start[-1] = 1
    charge = torch.full_like(start, _PRICE / rows)
    charge[-1] = 0
    known = rows if worth is None else worth
    shrunk = (known * error.square() / size + _AVERAGE_ROWS) / (known + _AVERAGE_ROWS)
    theta = scored(shrunk, unit, start, torch.zeros_like(start), charge, counts)
    if loss == "crps":
        more = unit.new_ones(int(_AVERAGE_ROWS), unit.shape[1])
        scaled = torch.cat([error / size.sqrt(), more[:, 0]])
        alike = None if counts is None else torch.cat([counts, more[:, 0]])
        theta = polished(scaled, torch.cat([unit, more]), theta, torch.zeros_like(theta), alike)
    for (block, _, mean), value in zip(used, theta[:-1], strict=True):
        found[list(block)] = value * size / mean
    return found, theta[-1].clamp_min(_LEAST_FLOOR) * size, size


class Growth(NamedTuple):
    """What the guard does to the validation rows: a factor for each `(N,)`, and a ceiling for each entry `(M, K)`."""

    factor: Tensor
    ceiling: Tensor


def choose(
    error: Tensor,
    columns: Tensor,
    names: Sequence[str],
    groups: Sequence[Blocks],
    growth: Growth,
    loss: Loss = "nll",
    left: Left | None = None,
) -> Chosen:
    """Compare nested candidates on rows that were left out of their fits, and fit the one in use to all.

    Args:
        error: `(M, K)`, the entries of a row together.
        columns: `(M, K, J)`.
        names: of the terms.
        groups: for each term its columns, by their places: those that share a coefficient together.
        growth: by the guard.
        loss: what the fits minimise; candidates are compared by their likelihood.
        left: how rows are left out, and what each counts.
    """
    left = left or Left()
    rows = len(growth.factor)
    inner = len(error) // rows
    shaped = error.reshape(rows, inner, -1).movedim(2, 1)
    # Runs of rows that are alike are too few to tell every site apart.
    tried = _candidates(names, groups, apart=left.kind != "blocks")
    scores = []
    for blocks in tried.values():
        fit = partial(_fitted_to, error, columns, blocks, inner, growth, loss, left)
        variance, constant = crossed(shaped, fit, True, left)
        scores.append((variance, constant, gains(shaped, variance, constant)))
    home = list(tried).index(_name(names))
    picked = max(range(len(tried)), key=lambda i: _lead(scores[i][2] - scores[home][2], left))
    variance, constant, _ = scores[picked]
    name = list(tried)[picked]
    listed = (
        Candidate(n, float(average(g, left.weights)), standard_error(g, left))
        for n, (_, _, g) in zip(tried, scores, strict=True)
    )
    values = [part[..., 0] if inner == 1 else part for part in (shaped, variance, constant)]
    verdict = judged(*values, fitted="cross-validation", rows=left)
    counts = None if left.weights is None else left.weights.repeat_interleave(inner)
    worth = left.worth(rows) if left.kind == "blocks" else None
    return Chosen(name, fit_terms(error, columns, tried[name], loss, counts, worth=worth), verdict, tuple(listed))


def _candidates(names: Sequence[str], groups: Sequence[Blocks], *, apart: bool) -> dict[str, Blocks]:
    found: dict[str, Blocks] = {_name(()): []}
    for count in range(1, len(names) + 1):
        found[_name(names[:count])] = [block for group in groups[:count] for block in group]
    if apart and any(len(block) > 1 for group in groups for block in group):
        found[f"{_name(names)}, each site apart"] = [[place] for group in groups for block in group for place in block]
    return found


def _name(names: Sequence[str]) -> str:
    return " + ".join(names) or "floor alone"


def _lead(difference: Tensor, left: Left) -> float:
    """By how much a candidate leads beyond one standard error; 0 for the one that is compared with itself."""
    lead = float(average(difference, left.weights)) - standard_error(difference, left)
    return lead if bool(difference.any()) else 0.0


def _fitted_to(
    error: Tensor,
    columns: Tensor,
    blocks: Blocks,
    inner: int,
    growth: Growth,
    loss: Loss,
    left: Left,
    rows: Tensor,
) -> Callable[[Tensor], Tensor]:
    """A fit to some rows, as a function from the places of others to their variances `(rows, K, inner)`."""
    entries = _entries(rows, inner)
    weights = left.at(rows)
    counts = None if weights is None else weights.repeat_interleave(inner)
    factor, ceiling = growth
    worth = left.worth(len(factor)) * len(rows) / len(factor) if left.kind == "blocks" else None
    fit = fit_terms(error[entries], columns[entries], blocks, loss, counts, worth=worth)

    def variance(held: Tensor) -> Tensor:
        places = _entries(held, inner)
        both = fit.variance(columns[places]), ceiling[places]
        found, most = (part.reshape(len(held), inner, -1).movedim(2, 1) for part in both)
        return guarded(found, factor[held, None, None], fit.constants[:, None], most)

    return variance


def _entries(rows: Tensor, inner: int) -> Tensor:
    return (rows[:, None] * inner + torch.arange(inner)).flatten()
