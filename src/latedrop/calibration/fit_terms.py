"""A variance of terms for numbers: the guard is set, candidates are compared, and the chosen one is fitted to all rows.

    variance(x) = g(x) · (floor + sum_j theta_j t_j(x)) + (g(x) - 1) · constant,      theta >= 0

The coefficients are fitted, shrunk to a typical shape, by `latedrop.calibration.fitted_terms`.

Nested candidates are compared by cross-validation: the floor alone, then one term after the other, then a coefficient
for every site. All terms with one rate for all sites are used, or those before the forest where these are better,
unless another candidate is better by more than a standard error. The tails are fitted to the standardised errors of
rows left out (`latedrop.calibration.tails`).
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
from latedrop.calibration.groups import Held, Inputs, by_input
from latedrop.calibration.guard import Guard
from latedrop.calibration.measure import MeasuredTerms
from latedrop.calibration.methods import Plan, Terms
from latedrop.calibration.scale import refuse_no_errors
from latedrop.calibration.tails import Tail, fit_tail
from latedrop.calibration.targets import warn_of_poor_fit
from latedrop.calibration.verdict import Slice, Verdict, judged, losses, off_slices
from latedrop.streams.monitor import Usual, usual_of_rows

__all__ = ["Picked", "TermRows", "compare", "described", "judge", "nested", "set_guard"]

_FEW_ROWS, _MOST_OF_FEW = 30, 2.0


@dataclass(frozen=True)
class TermRows:
    """The validation rows as a fit sees them: K outputs, or one for all, of I entries each.

    Attributes:
        error, mean: `(N, K, I)`.
        columns: `(N, K, I, J)`.
        sizes: `(K, J)`, what columns are on usual rows.
        novelty: `(N,)`; None where there is no guard.
        guard: for constants of all rows.
        left: how rows are left out, and what each counts.
        student: whether tails are fitted; else they are Gaussian.
    """

    error: Tensor
    mean: Tensor
    columns: Tensor
    sizes: Tensor
    novelty: Tensor | None
    guard: Guard | None
    left: CrossValidation
    student: bool

    @classmethod
    def of(cls, measured: MeasuredTerms, guard: Guard | None, plan: Plan) -> TermRows:
        """Take what was measured; raise `DataError` where there is no error to fit to."""
        error, per_output = measured.entries(measured.target - measured.mean), measured.per_output
        if not bool(error.any(2).any(0).all()):
            refuse_no_errors()
        warn_of_poor_fit(
            measured.mean,
            measured.target,
            "validation rows",
            per_output=per_output,
            stacklevel=4,
            hint=plan.target is None,
        )
        columns = [measured.entries(column) for column in measured.columns.values()]
        stacked = torch.stack(columns, -1) if columns else error.new_zeros(*error.shape, 0)
        assert isinstance(plan.method, Terms)
        left = CrossValidation(plan.method.folds, plan.weights)
        sizes = left.mean(stacked.mean(2))
        for j, name in enumerate(measured.columns):
            if name in measured.sizes:
                usual = measured.sizes[name].double()
                sizes[:, j] = usual if per_output else usual.mean()
        novelty = None if guard is None or measured.leverage is None else guard.ratio(measured.leverage.unbind(1))
        student = plan.intervals == "student"
        return cls(error, measured.entries(measured.mean), stacked, sizes, novelty, guard, left, student)

    def fit(self, blocks: Sequence[Block], rows: Tensor | None = None) -> TermFit:
        """Fit the coefficients of a candidate to some rows, or to all."""
        error, columns, weights = self.error, self.columns, self.left.weights
        if rows is not None:
            error, columns, weights = error[rows], columns[rows], self.left.at(rows)
        runs = self.left.worth(len(self.error)) * len(error) / len(self.error) if self.left.kind == "blocks" else None
        return fit_terms(error, columns, blocks, self.sizes, weights, worth=runs)

    def variance(self, fit: TermFit, rows: Tensor | None = None) -> Tensor:
        """Return what a fit says of some rows, or of all, `(n, K, I)`."""
        at: Any = slice(None) if rows is None else rows
        columns = self.columns[at]
        variance, without = fit.variance(columns), None if fit.without is None else fit.without.variance(columns)
        if self.guard is None or self.novelty is None:
            return variance
        guard = replace(self.guard, constants=tuple(fit.constants.tolist()))
        return guard.grown(variance, self.novelty[at], self.mean[at], without)

    def left_out(self, blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
        """Return variances and constants of all rows, each from fits to the rows of other folds."""

        def fit(rest: Tensor) -> Callable[[Tensor], Tensor]:
            fitted = self.fit(blocks, rest)
            return lambda out: self.variance(fitted, out)

        return crossed(self.error, fit, True, self.left)

    def tail(self, variance: Tensor) -> Tail:
        """Return the tail of the errors, with variances of rows left out."""
        if not self.student:
            return Tail()
        z, weights = self.error / variance.sqrt(), self.left.weights
        counts = None if weights is None else weights[:, None, None].expand_as(z)
        return fit_tail(z, counts, self.left.worth(len(z)))


@dataclass(frozen=True)
class Picked:
    """The candidate in use.

    Attributes:
        name: what it is made of.
        fit: to all rows; coefficients of the columns that it leaves out are 0.
        variance, constant: `(N, K, I)`, of each row from fits to the rows of other folds.
        tail: of the standardised errors of these rows.
        trivial: the same of one constant variance.
        gain: `(N,)`, nats by which it is better than that.
        candidates: all that were compared, the simplest first.
    """

    name: str
    fit: TermFit
    variance: Tensor
    constant: Tensor
    tail: Tail
    trivial: Tail
    gain: Tensor
    candidates: tuple[Candidate, ...]


def set_guard(measured: MeasuredTerms, plan: Plan) -> Guard | None:
    """Set the limits of the guard; None where nothing tells how novel a row is."""
    assert isinstance(plan.method, Terms)
    if not measured.guard or measured.leverage is None:
        return None
    left = CrossValidation(weights=plan.weights)
    error, target = measured.entries(measured.target - measured.mean), measured.entries(measured.target)
    centres = left.mean(target.mean(2))
    moments = error.square(), target, (target - centres[:, None]).square()
    constants, centre, spreads = (tuple(left.mean(part.mean(2)).tolist()) for part in moments)
    most = _MOST_OF_FEW if _is_few(measured, plan) else None
    guard = Guard.of(measured.guard, measured.leverage, measured.usual, left.weights)
    return replace(guard, constants=constants, centres=centre, spreads=spreads, grows=plan.method.guard, most=most)


def nested(measured: MeasuredTerms, plan: Plan) -> dict[str, list[Block]]:
    """Return the candidates by name, the simplest first: each adds a term; the last tells the sites apart."""
    names = list(measured.columns)
    blocks = {term.name: blocks_of(term, names) for term in measured.terms}
    blocks = {} if _is_few(measured, plan) else {name: each for name, each in blocks.items() if each}
    tried, terms = {_name(()): list[Block]()}, list(blocks)
    for count in range(1, len(terms) + 1):
        tried[_name(terms[:count])] = [block for name in terms[:count] for block in blocks[name]]
    whole = tried[_name(terms)]
    assert isinstance(plan.method, Terms)
    # Runs of rows that are alike are too few to tell every site apart.
    if plan.method.folds != "blocks" and any(len(block.places) > 1 for block in whole):
        tried[f"{_name(terms)}, each site apart"] = [
            block._replace(places=[place], share=block.share / len(block.places))
            for block in whole
            for place in block.places
        ]
    return tried


def compare(rows: TermRows, tried: Mapping[str, Sequence[Block]]) -> Picked:
    """Compare candidates on rows that were left out of their fits, and fit the one in use to all."""
    left_out, tails, gains = {}, {}, {}
    trivial: Tail | None = None
    for name, blocks in tried.items():
        variance, constant = left_out[name] = rows.left_out(blocks)
        tails[name], trivial = rows.tail(variance), trivial or rows.tail(constant)
        gains[name] = losses(rows.error, constant, trivial) - losses(rows.error, variance, tails[name])
    assert trivial is not None
    # All terms are to beat, or those before a forest where these are better: a forest can fit noise.
    homes = [name for name in tried if "apart" not in name]
    before = [name for name in homes if not any(block.of_forest for block in tried[name])]
    home = max((before[-1], homes[-1]), key=lambda name: float(rows.left.mean(gains[name])))
    name = leading(gains, home, rows.left)
    candidates = tuple(rows.left.candidate(each, gain) for each, gain in gains.items())
    return Picked(name, rows.fit(tried[name]), *left_out[name], tails[name], trivial, gains[name], candidates)


def judge(measured: MeasuredTerms, rows: TermRows, picked: Picked, plan: Plan) -> Verdict:
    """Judge the candidate in use, on rows of other folds."""
    values = [part[..., 0] if part.shape[2] == 1 else part for part in (rows.error, picked.variance, picked.constant)]
    verdict = judged(*values, fitted="cross-validation", rows=rows.left, tail=picked.tail, gain=picked.gain)
    return verdict if measured.mean.dim() > 2 else replace(verdict, slices=_slices(measured, rows, picked, plan))


def described(measured: MeasuredTerms, rows: TermRows, picked: Picked) -> FittedTerms:
    """Make the record of the terms with their coefficients."""
    fit = picked.fit
    parts = [*(rows.columns * fit.coefficients[:, None]).unbind(-1), fit.floors[:, None].expand(rows.error.shape)]
    named = dict(zip([*measured.columns, "floor"], parts, strict=True))
    total = torch.stack(parts).sum(0)
    shares = {name: float(rows.left.mean((part / total).mean((1, 2)))) for name, part in named.items()}
    return FittedTerms(
        terms=measured.terms,
        columns=tuple(measured.columns),
        coefficients=tuple(tuple(row) for row in fit.coefficients.tolist()),
        floors=tuple(fit.floors.tolist()),
        without=() if fit.without is None else fit.without.with_floors(),
        shares=shares,
        guard=rows.guard,
        features=measured.features,
        candidates=picked.candidates,
        choice=picked.name,
        reference_rows=measured.reference_rows,
        correction=measured.correction,
        usual=_usual(rows, named) if rows.error.shape[2] == 1 else None,
    )


def _is_few(measured: MeasuredTerms, plan: Plan) -> bool:
    """Return True if rows are too few to tell what is usual: then the constant stands."""
    return plan.reference is None and len(measured.target) < _FEW_ROWS


def _name(names: Sequence[str]) -> str:
    return " + ".join(names) or "floor alone"


def _slices(measured: MeasuredTerms, rows: TermRows, picked: Picked, plan: Plan) -> tuple[Slice, ...]:
    """Return ranges of inputs, predictions and deviations where 90 % intervals of rows left out hold something else."""
    error, std = rows.error.flatten(1), picked.variance.flatten(1).sqrt()
    outputs = error.shape[1]
    inside = error.abs() <= picked.tail.quantile(0.95) * std
    each = np.arange(len(error)).repeat(outputs)
    held = Held(0.9, each, error.flatten().numpy(), std.flatten().numpy(), inside.flatten().numpy(), None)
    others = {"the deviation": held.std, "the prediction": measured.mean.double().flatten().numpy()}
    if outputs > 1:
        others = {"the relative deviation": (std / picked.fit.constants.sqrt()).flatten().numpy()}
    columns: dict[str, Any] = {}
    if measured.table is not None:
        names = (plan.columns or {}).get("inputs") or ()
        names = (
            names if len(names) == measured.table.shape[1] else [f"input {k}" for k in range(measured.table.shape[1])]
        )
        columns = dict(zip(names, measured.table.double().T.numpy(), strict=True))
    return off_slices(group for groups in by_input(held, Inputs(columns), others, None) for group in groups)


def _usual(rows: TermRows, parts: dict[str, Tensor]) -> Usual:
    """Return how the validation rows are spread, for streams; of the terms that are in use."""
    used = {name: part for name, part in parts.items() if bool(part.any()) or name == "floor"}
    shares = {name: share.tolist() for name, share in shares_of_terms(used).items()}
    novelty, weights = (None if part is None else part.tolist() for part in (rows.novelty, rows.left.weights))
    return usual_of_rows(novelty, shares, weights)
