"""A variance of terms for numbers: the guard is set, candidates are compared, and the chosen one is fitted to all rows.

    variance(x) = g(x) · (floor + sum_j theta_j t_j(x)) + (g(x) - 1) · constant,      theta >= 0

The coefficients are fitted, shrunk to a typical shape, by `latedrop.calibration.fitted_terms`.

Nested candidates are compared by cross-validation: the floor alone, then one term after the other, then a coefficient
for every site. All terms with one rate for all sites are used, or those before the forest where these are better,
unless another candidate is better by more than a standard error. The tails are fitted to the standardised errors of
rows left out (`latedrop.metrics.tails`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop.calibration.cross_validation import Candidate, CrossValidation, crossed, leading
from latedrop.calibration.fitted_terms import Block, FittedTerms, TermFit, blocks_of, fit_terms, shares_of_terms
from latedrop.calibration.guard import Guard
from latedrop.calibration.measure import TermRows
from latedrop.calibration.methods import Terms
from latedrop.calibration.scale import refuse_no_errors
from latedrop.calibration.targets import warn_of_poor_fit
from latedrop.calibration.verdict import Slice, Verdict, judged, losses, off_slices
from latedrop.metrics.groups import Inputs, Outcomes, by_input
from latedrop.metrics.tails import Tail, fit_tail
from latedrop.streams.monitor import usual_of_rows

__all__ = ["Picked", "compare", "described", "fitted_variance", "judge", "nested", "with_guard"]

_FEW_ROWS, _MOST_OF_FEW = 30, 2.0


@dataclass(frozen=True)
class Picked:
    """The candidate in use."""

    name: str
    fit: TermFit  # to all rows; coefficients of the columns that it leaves out are 0
    variance: Tensor  # (N, K, I), of each row from fits to the rows of other folds
    constant: Tensor  # the same of one constant variance
    tail: Tail  # of the standardised errors of these rows
    trivial: Tail  # the same of the constant
    gain: Tensor  # (N,), nats by which it is better than the constant
    candidates: tuple[Candidate, ...]


def with_guard(rows: TermRows) -> TermRows:
    """Set the limits of the guard; raise `DataError` where there is no error to fit to."""
    plan, method = rows.plan, rows.plan.method
    assert isinstance(method, Terms)
    if not bool(rows.error.any(2).any(0).all()):
        refuse_no_errors()
    warn_of_poor_fit(rows.mean, rows.target, "validation rows", per_output=rows.per_output, stacklevel=4)
    if not rows.guards or rows.leverage is None:
        return rows
    left, target = CrossValidation(plan.weights), rows.entries(rows.target)
    centres = left.mean(target.mean(2))
    moments = rows.error.square(), target, (target - centres[:, None]).square()
    constants, centre, spreads = (tuple(left.mean(part.mean(2)).tolist()) for part in moments)
    most = _MOST_OF_FEW if _are_few(rows) else None
    guard = Guard.of(rows.guards, rows.leverage, rows.usual, plan.weights)
    guard = replace(guard, constants=constants, centres=centre, spreads=spreads, grows=method.guard, most=most)
    return replace(rows, guard=guard)


def nested(rows: TermRows) -> dict[str, list[Block]]:
    """Return the candidates by name, the simplest first: each adds a term; the last tells the sites apart."""
    names = list(rows.columns)
    blocks = {term.name: blocks_of(term, names) for term in rows.terms}
    blocks = {} if _are_few(rows) else {name: each for name, each in blocks.items() if each}
    tried, whole = {"floor alone": list[Block]()}, list[Block]()
    for i, name in enumerate(blocks):
        whole = [*whole, *blocks[name]]
        tried[" + ".join([*blocks][: i + 1])] = whole
    # Runs of rows that are alike are too few to tell every site apart.
    if rows.left.groups is None and any(len(block.places) > 1 for block in whole):
        tried[f"{' + '.join(blocks)}, each site apart"] = [
            block._replace(places=[place], share=block.share / len(block.places))
            for block in whole
            for place in block.places
        ]
    return tried


def compare(rows: TermRows, tried: Mapping[str, Sequence[Block]]) -> Picked:
    """Compare candidates on rows that were left out of their fits, and fit the one in use to all."""
    left, left_out, tails, gains = rows.left, {}, {}, {}
    trivial: Tail | None = None
    for name, blocks in tried.items():

        def fit(rest: Tensor, blocks: Sequence[Block] = blocks) -> Callable[[Tensor], Tensor]:
            fitted = _fit(rows, blocks, rest)
            return lambda out: fitted_variance(rows, fitted, out)

        variance, constant = left_out[name] = crossed(rows.error, fit, True, left)
        tails[name], trivial = _tail(rows, variance), trivial or _tail(rows, constant)
        gains[name] = losses(rows.error, constant, trivial) - losses(rows.error, variance, tails[name])
    assert trivial is not None
    # All terms are to beat, or those before a forest where these are better: a forest can fit noise.
    homes = [name for name in tried if "apart" not in name]
    before = [name for name in homes if not any(block.of_forest for block in tried[name])]
    home = max((before[-1], homes[-1]), key=lambda name: float(left.mean(gains[name])))
    name = leading(gains, home, left)
    candidates = tuple(left.candidate(each, gain) for each, gain in gains.items())
    return Picked(name, _fit(rows, tried[name]), *left_out[name], tails[name], trivial, gains[name], candidates)


def fitted_variance(rows: TermRows, fit: TermFit, at: Any = slice(None)) -> Tensor:
    """Return what a fit says of some rows, or of all, `(n, K, I)`."""
    columns = rows.stacked[at]
    variance, without = fit.variance(columns), None if fit.without is None else fit.without.variance(columns)
    if rows.guard is None or rows.novelty is None:
        return variance
    guard = replace(rows.guard, constants=tuple(fit.constants.tolist()))
    return guard.grown(variance, rows.novelty[at], rows.entries(rows.mean)[at], without)


def _fit(rows: TermRows, blocks: Sequence[Block], at: Any = slice(None)) -> TermFit:
    """Fit the coefficients of a candidate to some rows, or to all."""
    left, error = rows.left, rows.error[at]
    runs = None if left.groups is None else left.worth(len(rows.error)) * len(error) / len(rows.error)
    return fit_terms(error, rows.stacked[at], blocks, rows.sizes, left.at(at), worth=runs)


def _tail(rows: TermRows, variance: Tensor) -> Tail:
    """Return the tail of the errors, with variances of rows left out; a Gaussian's where none was asked for."""
    if rows.plan.intervals != "student":
        return Tail()
    z, weights = rows.error / variance.sqrt(), rows.left.weights
    counts = None if weights is None else weights[:, None, None].expand_as(z)
    return fit_tail(z, counts, rows.left.worth(len(z)))


def judge(rows: TermRows, picked: Picked) -> Verdict:
    """Judge the candidate in use, on rows of other folds."""
    values = [part[..., 0] if part.shape[2] == 1 else part for part in (rows.error, picked.variance, picked.constant)]
    verdict = judged(*values, fitted="cross-validation", rows=rows.left, tail=picked.tail, gain=picked.gain)
    return verdict if rows.mean.dim() > 2 else replace(verdict, slices=_slices(rows, picked))


def described(rows: TermRows, picked: Picked) -> FittedTerms:
    """Make the record of the terms with their coefficients."""
    fit = picked.fit
    rest = fit.without
    without = [] if rest is None else torch.cat([rest.coefficients, rest.floors[:, None]], 1).tolist()
    parts = [*(rows.stacked * fit.coefficients[:, None]).unbind(-1), fit.floors[:, None].expand(rows.error.shape)]
    named = dict(zip([*rows.columns, "floor"], parts, strict=True))
    total = torch.stack(parts).sum(0)
    usual = None
    if rows.error.shape[2] == 1:  # for streams: how novelty and the terms in use are spread over the validation rows
        used = {name: part for name, part in named.items() if bool(part.any()) or name == "floor"}
        each = shares_of_terms([*used], torch.stack([*used.values()]))
        novelty, weights = (None if part is None else part.tolist() for part in (rows.novelty, rows.left.weights))
        usual = usual_of_rows(novelty, {name: share.tolist() for name, share in each.items()}, weights)
    return FittedTerms(
        terms=rows.terms,
        columns=tuple(rows.columns),
        coefficients=tuple(tuple(row) for row in fit.coefficients.tolist()),
        floors=tuple(fit.floors.tolist()),
        without=tuple(map(tuple, without)),
        shares={name: float(rows.left.mean((part / total).mean((1, 2)))) for name, part in named.items()},
        guard=rows.guard,
        features=rows.features,
        candidates=picked.candidates,
        choice=picked.name,
        reference_rows=rows.reference_rows,
        correction=rows.correction,
        usual=usual,
    )


def _are_few(rows: TermRows) -> bool:
    """Return True if rows are too few to tell what is usual: then the constant stands."""
    return rows.plan.reference is None and len(rows.target) < _FEW_ROWS


def _slices(rows: TermRows, picked: Picked) -> tuple[Slice, ...]:
    """Return ranges of inputs, predictions and deviations where 90 % intervals of rows left out hold something else."""
    error, std = rows.error.flatten(1), picked.variance.flatten(1).sqrt()
    outputs = error.shape[1]
    inside = error.abs() <= picked.tail.quantile(0.95) * std
    each = np.arange(len(error)).repeat(outputs)
    outcomes = Outcomes(0.9, each, error.flatten().numpy(), std.flatten().numpy(), inside.flatten().numpy(), None)
    others = {"the deviation": outcomes.std, "the prediction": rows.mean.double().flatten().numpy()}
    if outputs > 1:
        others = {"the relative deviation": (std / picked.fit.constants.sqrt()).flatten().numpy()}
    columns: dict[str, Any] = {}
    if rows.table is not None:
        names = (rows.plan.columns or {}).get("inputs") or ()
        values = rows.table.double().T.numpy()
        names = names if len(names) == len(values) else [f"input {k}" for k in range(len(values))]
        columns = dict(zip(names, values, strict=True))
    return off_slices(group for groups in by_input(outcomes, Inputs(columns), others, None) for group in groups)
