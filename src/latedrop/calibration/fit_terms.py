"""A variance of terms for numbers: the guard is set, candidates are compared, and the chosen one is fitted to all rows.

    variance(x) = g(x) · (floor + sum_j theta_j t_j(x)) + (g(x) - 1) · constant,      theta >= 0

The coefficients are fitted, shrunk to a typical shape, by `latedrop.calibration.shape`.

Nested candidates are compared by cross-validation: the floor alone, then one term after the other, then a coefficient
for every site. All terms with one rate for all sites are used, or those before the forest where these are better,
unless another candidate is better by more than a standard error. The tails are fitted to the standardised errors of
rows left out (`latedrop.calibration.tails`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from latedrop.calibration.cross_validation import (
    Candidate,
    CrossValidation,
    crossed,
    leading,
)
from latedrop.calibration.fit_sites import Loss
from latedrop.calibration.fitted_terms import FittedTerms, Guard, guarded, ignorant, shares_of_terms, term_of
from latedrop.calibration.groups import Held, Inputs, by_input
from latedrop.calibration.measure import MeasuredTerms
from latedrop.calibration.methods import Plan, Terms
from latedrop.calibration.scale_fit import refuse_no_errors
from latedrop.calibration.shape import Block, TermFit, blocks_of, fit_terms
from latedrop.calibration.tails import Tail, fit_tail
from latedrop.calibration.targets import warn_of_poor_fit
from latedrop.calibration.verdict import Slice, Verdict, judged, losses, off_slices
from latedrop.metrics.entries import average
from latedrop.streams.bag import Usual, usual_of_rows

__all__ = [
    "Chosen",
    "Growth",
    "TermsFit",
    "choose",
    "fit_measured_terms",
    "guarded",
    "ignorant",
    "outputs_last",
]


@dataclass(frozen=True)
class Chosen:
    """The candidate in use.

    Attributes:
        name: what it is made of.
        fit: to all rows; coefficients of the columns that it leaves out are 0.
        tail: of the standardised errors of rows of other folds.
        trivial: the same of one constant variance.
        verdict: on rows of other folds.
        variance: `(N, K, entries)`, of each row from fits to the rows of the other folds.
        candidates: all that were compared, the simplest first.
    """

    name: str
    fit: TermFit
    tail: Tail
    trivial: Tail
    verdict: Verdict
    variance: Tensor
    candidates: tuple[Candidate, ...]


class Growth(NamedTuple):
    """What the guard does to the validation rows: a factor for each `(N,)`, and a ceiling for each entry `(M, K)`."""

    factor: Tensor
    ceiling: Tensor


def choose(
    error: Tensor,
    columns: Tensor,
    sizes: Tensor,
    names: Sequence[str],
    groups: Sequence[Sequence[Block]],
    growth: Growth,
    loss: Loss = "nll",
    left: CrossValidation | None = None,
    *,
    student: bool = True,
) -> Chosen:
    """Compare nested candidates on rows that were left out of their fits, and fit the one in use to all.

    Args:
        error: `(M, K)`, the entries of a row together.
        columns: `(M, K, J)`.
        sizes: `(K, J)`, what columns are on usual rows.
        names: of the terms.
        groups: for each term its columns: those that share a coefficient together.
        growth: by the guard.
        loss: what the fits minimise; candidates are compared by their likelihood.
        left: how rows are left out, and what each counts.
        student: whether tails are fitted; else they are Gaussian.
    """
    left = left or CrossValidation()
    rows = len(growth.factor)
    inner = len(error) // rows
    shaped = error.reshape(rows, inner, -1).movedim(2, 1)
    # Runs of rows that are alike are too few to tell every site apart.
    tried = _candidates(names, groups, apart=left.kind != "blocks")
    crossed_fits, tails, scores = {}, {}, {}
    trivial: Tail | None = None
    for name, blocks in tried.items():
        fit = partial(_fitted_to, error, columns, sizes, blocks, inner, growth, loss, left)
        variance, constant = crossed_fits[name] = crossed(shaped, fit, True, left)
        tails[name] = fit_tail_of(shaped, variance, left) if student else Tail()
        trivial = trivial or (fit_tail_of(shaped, constant, left) if student else Tail())
        scores[name] = losses(shaped, constant, trivial) - losses(shaped, variance, tails[name])
    name = leading(scores, _home(scores, tried, names, left), left)
    values = (part[..., 0] if inner == 1 else part for part in (shaped, *crossed_fits[name]))
    verdict = judged(*values, fitted="cross-validation", rows=left, tail=tails[name], gain=scores[name])
    listed = tuple(left.candidate(each, gain) for each, gain in scores.items())
    counts = None if left.weights is None else left.weights.repeat_interleave(inner)
    worth = left.worth(rows) if left.kind == "blocks" else None
    fitted = fit_terms(error, columns, tried[name], sizes, loss, counts, worth=worth)
    assert trivial is not None
    return Chosen(name, fitted, tails[name], trivial, verdict, crossed_fits[name][0], listed)


def fit_tail_of(error: Tensor, variance: Tensor, left: CrossValidation) -> Tail:
    """The tail of errors `(N, ...)` with variances of rows left out."""
    weights = None if left.weights is None else left.weights.reshape(-1, *[1] * (error.dim() - 1)).expand_as(error)
    return fit_tail(error / variance.sqrt(), weights, left.worth(len(error)))


def _candidates(names: Sequence[str], groups: Sequence[Sequence[Block]], *, apart: bool) -> dict[str, Sequence[Block]]:
    found: dict[str, Sequence[Block]] = {_name(()): []}
    for count in range(1, len(names) + 1):
        found[_name(names[:count])] = [block for group in groups[:count] for block in group]
    if apart and any(len(block.places) > 1 for group in groups for block in group):
        blocks = [block for group in groups for block in group]
        found[f"{_name(names)}, each site apart"] = [
            block._replace(places=[place], share=block.share / len(block.places))
            for block in blocks
            for place in block.places
        ]
    return found


def _home(
    scores: Mapping[str, Tensor], tried: Mapping[str, Sequence[Block]], names: Sequence[str], left: CrossValidation
) -> str:
    """The candidate to beat: all terms, or those before a forest where these are better: a forest can fit noise."""
    before = [name for name, blocks in tried.items() if not any(block.of_forest for block in blocks)]
    all_but_sites = [name for name in (before[-1], _name(names)) if "apart" not in name]
    return max(all_but_sites, key=lambda name: float(average(scores[name], left.weights)))


def _name(names: Sequence[str]) -> str:
    return " + ".join(names) or "floor alone"


def _fitted_to(
    error: Tensor,
    columns: Tensor,
    sizes: Tensor,
    blocks: Sequence[Block],
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
    fit = fit_terms(error[entries], columns[entries], blocks, sizes, loss, counts, worth=worth)

    def variance(held: Tensor) -> Tensor:
        places = _entries(held, inner)
        plain = fit if fit.without is None else fit.without
        parts = fit.variance(columns[places]), ceiling[places], plain.variance(columns[places])
        found, most, without = (part.reshape(len(held), inner, -1).movedim(2, 1) for part in parts)
        return guarded(found, factor[held, None, None], fit.constants[:, None], most, without)

    return variance


def _entries(rows: Tensor, inner: int) -> Tensor:
    return (rows[:, None] * inner + torch.arange(inner)).flatten()


_INSIDE = 0.95
_FEW_ROWS, _MOST_OF_FEW = 30, 2.0


@dataclass(frozen=True)
class TermsFit:
    """What was fitted to measured terms.

    Attributes:
        terms: with their coefficients and the guard.
        variance: `(N, ...)` of the validation rows.
        held_out: `(N, ...)`, the same of each row from fits to the rows of other folds.
        tail: of the errors of those.
        trivial: of their errors with one constant variance.
        verdict: on those.
    """

    terms: FittedTerms
    variance: Tensor
    held_out: Tensor
    tail: Tail
    trivial: Tail
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
    few = plan.reference is None and len(found.target) < _FEW_ROWS  # then the constant stands
    guard, growth = set_guard(found, error, target, weights, grows=method.guard, few=few)
    measured = [] if few else [term for term in found.terms if any(term_of(name) == term.name for name in names)]
    sizes = _sizes(found, names, columns, weights)
    picked = choose(
        error,
        columns,
        sizes,
        [term.name for term in measured],
        [blocks_of(term, names) for term in measured],
        growth,
        method.loss,
        CrossValidation(method.folds, weights),
        student=plan.intervals == "student",
    )
    fit = picked.fit
    inner = len(error) // len(found.target)
    variance = guarded(
        fit.variance(columns),
        growth.factor.repeat_interleave(inner)[:, None],
        fit.constants,
        growth.ceiling,
        None if fit.without is None else fit.without.variance(columns),
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
        without=() if fit.without is None else _rows(fit.without),
        shares=dict(zip(named, shares, strict=True)),
        guard=guard,
        features=found.features,
        candidates=picked.candidates,
        choice=picked.name,
        reference_rows=found.reference_rows,
        correction=found.correction,
        usual=_usual(found, guard, named, weights) if inner == 1 else None,
    )
    shape = found.target.movedim(1, -1).shape if per_output else found.target.shape
    variance = variance.reshape(shape)
    held_out = picked.variance.reshape(found.target.shape)
    variance = variance.movedim(-1, 1) if per_output else variance
    verdict = picked.verdict
    if found.mean.dim() <= 2:
        verdict = replace(verdict, slices=_slices(found, held_out, picked.tail, fit.constants, plan))
    return TermsFit(terms, variance, held_out, picked.tail, picked.trivial, verdict)


def _slices(found: MeasuredTerms, variance: Tensor, tail: Tail, constants: Tensor, plan: Plan) -> tuple[Slice, ...]:
    """Ranges of inputs, predictions and deviations in which 90 % intervals of rows left out hold something else."""
    outputs = max(1, found.mean[0].numel())
    error, std = ((part.double().reshape(-1, outputs)) for part in (found.target - found.mean, variance.sqrt()))
    inside = error.abs() <= tail.quantile(0.95) * std
    relative = (std / constants.sqrt()).flatten().numpy()
    rows = np.arange(len(error)).repeat(outputs)
    held = Held(0.9, rows, error.flatten().numpy(), std.flatten().numpy(), inside.flatten().numpy(), None)
    own = {"the relative deviation" if outputs > 1 else "the deviation": relative if outputs > 1 else held.std}
    own |= {} if outputs > 1 else {"the prediction": found.mean.double().flatten().numpy()}
    columns: dict[str, Any] = {}
    if found.table is not None:
        names = (plan.columns or {}).get("inputs") or ()
        names = names if len(names) == found.table.shape[1] else [f"input {k}" for k in range(found.table.shape[1])]
        columns = dict(zip(names, found.table.double().T.numpy(), strict=True))
    return off_slices(group for groups in by_input(held, Inputs(columns), own, None) for group in groups)


def _rows(fit: TermFit) -> tuple[tuple[float, ...], ...]:
    """Coefficients and floors, these last, for each output."""
    return tuple(tuple(row) for row in torch.cat([fit.coefficients, fit.floors[:, None]], 1).tolist())


def _sizes(found: MeasuredTerms, names: Sequence[str], columns: Tensor, weights: Tensor | None) -> Tensor:
    """What columns are on usual rows, `(K, J)`: the reference rows tell, or these."""
    inner = len(columns) // len(found.target)
    counts = torch.ones(len(columns), dtype=torch.float64) if weights is None else weights.repeat_interleave(inner)
    sizes = torch.einsum("n,nkj->kj", counts / counts.sum(), columns)
    for j, name in enumerate(names):
        if name in found.sizes:
            known = found.sizes[name].double()
            sizes[:, j] = known if found.per_output else known.mean()
    return sizes


def set_guard(
    found: MeasuredTerms, error: Tensor, target: Tensor, weights: Tensor | None, *, grows: bool, few: bool
) -> tuple[Guard | None, Growth]:
    """The guard at its limits, None where nothing tells how novel a row is, and what it does to these rows."""
    counts = torch.ones(len(error), dtype=torch.float64)
    if weights is not None:
        counts = weights.repeat_interleave(len(error) // len(weights))
    constants, centres = ((counts[:, None] * part).mean(0) for part in (error.square(), target))
    spreads = (counts[:, None] * (target - centres).square()).mean(0)
    ceiling = ignorant(target - error, centres, spreads)
    if not found.guard or found.leverage is None:
        return None, Growth(torch.ones(len(found.target), dtype=torch.float64), ceiling)
    usual, counted = (found.leverage, weights) if found.usual is None else (found.usual, None)
    limits = tuple(tuple(upper_quantile(v, counted) for v in values.unbind(1)) for values in usual.unbind(1))
    known = [tuple(part.tolist()) for part in (constants, centres, spreads)]
    guard = Guard(found.guard, limits, known[0], known[1], known[2], grows, _MOST_OF_FEW if few else None)
    return guard, Growth(guard.factor(guard.ratio(found.leverage.unbind(1))), ceiling)


def _usual(found: MeasuredTerms, guard: Guard | None, parts: dict[str, Tensor], weights: Tensor | None) -> Usual:
    """How the validation rows are spread, for streams; of the terms that are in use."""
    novelty = None if guard is None or found.leverage is None else guard.ratio(found.leverage.unbind(1)).tolist()
    shares = shares_of_terms({name: part for name, part in parts.items() if bool(part.any()) or name == "floor"})
    counts = None if weights is None else weights.tolist()
    return usual_of_rows(novelty, {name: share.tolist() for name, share in shares.items()}, counts)


def upper_quantile(leverage: Tensor, weights: Tensor | None = None) -> float:
    """What rows of 95 % of the weight stay below, `(n,)`."""
    leverage = leverage.double().clamp_min(1e-30)
    if weights is None:
        return float(np.quantile(leverage.numpy(), _INSIDE, method="higher"))
    ordered, order = leverage.sort()
    counts = weights[order]
    below = counts.cumsum(0) - counts < _INSIDE * (len(counts) - 1)
    return float(ordered[min(int(below.sum()), len(ordered) - 1)])


def outputs_last(values: Tensor, per_output: bool) -> Tensor:
    """`(M, K)` with one column for each index of axis 1, or `(M, 1)`; the entries of a row stay together."""
    return values.movedim(1, -1).reshape(-1, values.shape[1]) if per_output else values.reshape(-1, 1)
