"""A variance of terms for numbers: the guard is set, candidates are compared, and the chosen one is fitted to all rows.

    variance(x) = g(x) · (floor + sum_j theta_j t_j(x)) + (g(x) - 1) · constant

The likelihood is Gaussian. Its place is `tails` below: the standardised errors of rows left out are what another
distribution would be fitted to.

Coefficients of the terms: `variance = floor + sum_j theta_j t_j`, `theta >= 0`, fitted to the squared errors.

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
from typing import NamedTuple

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import (
    Candidate,
    CrossValidation,
    crossed,
    effective_rows,
    leading,
)
from latedrop.calibration.fit_sites import Loss, polished, scored
from latedrop.calibration.fitted_terms import FittedTerms, Guard, guarded, ignorant, shares_of_terms, term_of
from latedrop.calibration.measure import MeasuredTerms
from latedrop.calibration.methods import Plan, Terms
from latedrop.calibration.scale_fit import refuse_no_errors
from latedrop.calibration.targets import warn_of_poor_fit
from latedrop.calibration.verdict import Verdict, gains, judged
from latedrop.metrics.entries import average
from latedrop.streams.usual import Usual, usual_of_rows
from latedrop.terms import Term

__all__ = [
    "Chosen",
    "Growth",
    "TermFit",
    "TermsFit",
    "choose",
    "fit_measured_terms",
    "fit_terms",
    "guarded",
    "ignorant",
    "outputs_last",
]

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


@dataclass(frozen=True)
class Chosen:
    """The candidate in use.

    Attributes:
        name: what it is made of.
        fit: to all rows; coefficients of the columns that it leaves out are 0.
        verdict: on rows of other folds.
        variance: `(N, K, entries)`, of each row from fits to the rows of the other folds.
        candidates: all that were compared, the simplest first.
    """

    name: str
    fit: TermFit
    verdict: Verdict
    variance: Tensor
    candidates: tuple[Candidate, ...]


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
    left: CrossValidation | None = None,
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
    left = left or CrossValidation()
    rows = len(growth.factor)
    inner = len(error) // rows
    shaped = error.reshape(rows, inner, -1).movedim(2, 1)
    # Runs of rows that are alike are too few to tell every site apart.
    tried = _candidates(names, groups, apart=left.kind != "blocks")
    crossed_fits, scores = {}, {}
    for name, blocks in tried.items():
        fit = partial(_fitted_to, error, columns, blocks, inner, growth, loss, left)
        crossed_fits[name] = crossed(shaped, fit, True, left)
        scores[name] = gains(shaped, *crossed_fits[name])
    name = leading(scores, _name(names), left)
    values = (part[..., 0] if inner == 1 else part for part in (shaped, *crossed_fits[name]))
    verdict = judged(*values, fitted="cross-validation", rows=left)
    listed = tuple(left.candidate(each, gain) for each, gain in scores.items())
    counts = None if left.weights is None else left.weights.repeat_interleave(inner)
    worth = left.worth(rows) if left.kind == "blocks" else None
    fitted = fit_terms(error, columns, tried[name], loss, counts, worth=worth)
    return Chosen(name, fitted, verdict, crossed_fits[name][0], listed)


def _candidates(names: Sequence[str], groups: Sequence[Blocks], *, apart: bool) -> dict[str, Blocks]:
    found: dict[str, Blocks] = {_name(()): []}
    for count in range(1, len(names) + 1):
        found[_name(names[:count])] = [block for group in groups[:count] for block in group]
    if apart and any(len(block) > 1 for group in groups for block in group):
        found[f"{_name(names)}, each site apart"] = [[place] for group in groups for block in group for place in block]
    return found


def _name(names: Sequence[str]) -> str:
    return " + ".join(names) or "floor alone"


def _fitted_to(
    error: Tensor,
    columns: Tensor,
    blocks: Blocks,
    inner: int,
    growth: Growth,
    loss: Loss,
    left: CrossValidation,
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


_INSIDE = 0.9
_FEW_ROWS, _MOST_OF_FEW = 30, 2.0


@dataclass(frozen=True)
class TermsFit:
    """What was fitted to measured terms.

    Attributes:
        terms: with their coefficients and the guard.
        variance: `(N, ...)` of the validation rows.
        held_out: `(N, ...)`, the same of each row from fits to the rows of other folds.
        verdict: on those.
    """

    terms: FittedTerms
    variance: Tensor
    held_out: Tensor
    verdict: Verdict


def fit_measured_terms(found: MeasuredTerms, plan: Plan) -> TermsFit:
    """Set the guard, compare the candidates on rows left out of their fits, and fit the chosen one."""
    method, per_output = plan.method, found.per_output
    assert isinstance(method, Terms)
    if not bool(outputs_last(found.target != found.mean, per_output).any(0).all()):
        refuse_no_errors()
    warn_of_poor_fit(
        found.mean, found.target, "validation rows", per_output=per_output, stacklevel=3, hint=plan.target is None
    )
    weights = plan.weights(len(found.target))
    error = outputs_last((found.target - found.mean).double(), per_output)
    target = outputs_last(found.target.double(), per_output)
    names = list(found.columns)
    stacked = [outputs_last(found.columns[name].double(), per_output) for name in names]
    columns = torch.stack(stacked, -1) if names else error.new_zeros(*error.shape, 0)
    too_few = plan.reference is None and len(found.target) < _FEW_ROWS  # then the constant stands
    guard, growth = set_guard(found, error, target, weights, grows=method.guard, too_few=too_few)
    used = 0 if too_few else len(found.terms)
    picked = choose(
        error,
        columns,
        [term.name for term in found.terms][:used],
        [_blocks(term, names) for term in found.terms][:used],
        growth,
        method.loss,
        CrossValidation(method.folds, weights),
    )
    fit = picked.fit
    inner = len(error) // len(found.target)
    variance = guarded(
        fit.variance(columns), growth.factor.repeat_interleave(inner)[:, None], fit.constants, growth.ceiling
    )
    parts = torch.cat([columns * fit.coefficients, fit.floors.expand(*error.shape)[..., None]], -1)
    named = dict(zip([*names, "floor"], parts.unbind(-1), strict=True))
    counts = torch.ones(len(error), dtype=torch.float64) if weights is None else weights.repeat_interleave(inner)
    shares = (counts[:, None, None] * parts / parts.sum(-1, keepdim=True)).mean((0, 1)).tolist()
    terms = FittedTerms(
        terms=found.terms,
        columns=tuple(names),
        coefficients=tuple(tuple(row) for row in fit.coefficients.tolist()),
        floors=tuple(fit.floors.tolist()),
        shares=dict(zip(named, shares, strict=True)),
        guard=guard,
        features=found.features,
        candidates=picked.candidates,
        choice=picked.name,
        reference_rows=found.reference_rows,
        usual=_usual(found, guard, named, weights) if inner == 1 else None,
    )
    shape = found.target.movedim(1, -1).shape if per_output else found.target.shape
    variance = variance.reshape(shape)
    held_out = picked.variance.reshape(found.target.shape)
    return TermsFit(terms, variance.movedim(-1, 1) if per_output else variance, held_out, picked.verdict)


def set_guard(
    found: MeasuredTerms, error: Tensor, target: Tensor, weights: Tensor | None, *, grows: bool, too_few: bool
) -> tuple[Guard | None, Growth]:
    """The guard at its limit, None where no features tell how novel a row is, and what it does to these rows."""
    counts = torch.ones(len(error), dtype=torch.float64)
    if weights is not None:
        counts = weights.repeat_interleave(len(error) // len(weights))
    constants, centres = ((counts[:, None] * part).mean(0) for part in (error.square(), target))
    spreads = (counts[:, None] * (target - centres).square()).mean(0)
    ceiling = ignorant(target - error, centres, spreads)
    if found.guard is None or found.leverage is None:
        return None, Growth(torch.ones(len(found.target), dtype=torch.float64), ceiling)
    limit = upper_quantile(found.leverage.double(), weights)
    known = [tuple(part.tolist()) for part in (constants, centres, spreads)]
    most = _MOST_OF_FEW if too_few else None
    guard = Guard(found.guard, limit, known[0], known[1], known[2], grows, most)
    return guard, Growth(guard.factor(found.leverage.double() / limit), ceiling)


def _usual(found: MeasuredTerms, guard: Guard | None, parts: dict[str, Tensor], weights: Tensor | None) -> Usual:
    """How the validation rows are spread, for streams; of the terms that are in use."""
    novelty = None if guard is None or found.leverage is None else (found.leverage / guard.limit).tolist()
    shares = shares_of_terms({name: part for name, part in parts.items() if bool(part.any()) or name == "floor"})
    counts = None if weights is None else weights.tolist()
    return usual_of_rows(novelty, {name: share.tolist() for name, share in shares.items()}, counts)


def upper_quantile(leverage: Tensor, weights: Tensor | None = None) -> float:
    """What rows of nine tenths of the weight stay below."""
    if weights is None:
        return float(torch.quantile(leverage, _INSIDE, interpolation="higher"))
    ordered, order = leverage.sort()
    counts = weights[order]
    below = counts.cumsum(0) - counts < _INSIDE * (len(counts) - 1)
    return float(ordered[min(int(below.sum()), len(ordered) - 1)])


def _blocks(term: Term, names: list[str]) -> list[list[int]]:
    """The places of a term's columns, those that share a coefficient together."""
    places = [i for i, name in enumerate(names) if term_of(name) == term.name]
    return [places] if term.is_block and places else [[place] for place in places]


def outputs_last(values: Tensor, per_output: bool) -> Tensor:
    """`(M, K)` with one column for each index of axis 1, or `(M, 1)`; the entries of a row stay together."""
    return values.movedim(1, -1).reshape(-1, values.shape[1]) if per_output else values.reshape(-1, 1)
