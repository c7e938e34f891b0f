"""The default calibration: terms measured on the validation rows, nested candidates compared, the guard set.

The validation data are read once. What needs no reference is measured on the way; features are kept, and the terms that
learn from reference rows are measured afterwards. Of very many rows some are kept (`row_sample`); no others are run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.calibration.batches import row_batches
from latedrop.calibration.entries import Entries
from latedrop.calibration.fitted_terms import KINDS, FittedTerms, Guard, measured_columns, shares_of_terms, term_of
from latedrop.calibration.names import in_order
from latedrop.calibration.row_sample import MOST_ROWS, RowSample
from latedrop.calibration.seen import feature_marks, warn_of_training_rows
from latedrop.calibration.setup import Setup
from latedrop.calibration.targets import as_output, check_rows
from latedrop.calibration.term_fit import Growth, choose, guarded, ignorant
from latedrop.calibration.verdict import Left, Verdict
from latedrop.data.arrays import is_table, place
from latedrop.data.datasets import dataset_batches, inputs_of, is_dataset
from latedrop.data.items import as_items
from latedrop.data.rows import take_rows
from latedrop.dropout.moments import out_of_memory
from latedrop.errors import ArgumentError, DataError, LatedropError, SiteError
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.streams.usual import Usual, usual_of_rows
from latedrop.terms import Dropout, Leverage, LocalErrors, Rows, Term
from latedrop.terms.features import Features

__all__ = ["MeasuredTerms", "fitted", "measured", "outputs_last", "reference_features"]

_INSIDE = 0.9
_FEW_ROWS, _MOST_OF_FEW = 30, 2.0
_MEAN, _TARGET = "(mean)", "(target)"  # beside columns, whose names are those of terms


@dataclass(frozen=True)
class MeasuredTerms:
    """The validation rows, measured.

    Attributes:
        sites: where dropout goes.
        mean, target: `(N, ...)`.
        terms: after they learned.
        columns: `(N, ...)` each, by name.
        features: which they are; None where there are none.
        shape: of one row's output, of which `mean`, `target` and `columns` may hold some entries alone.
        per_output: whether axis 1 holds outputs.
        guard: what tells strange rows, after it learned; None where there are no features.
        leverage: its values, `(N,)`.
        reference_rows: how many there were; 0 where the validation rows stood in.
    """

    sites: Sites
    mean: Tensor
    target: Tensor
    terms: tuple[Term, ...]
    columns: dict[str, Tensor]
    features: Features | None
    shape: tuple[int, ...]
    per_output: bool
    guard: Term | None = None
    leverage: Tensor | None = None
    reference_rows: int = 0


def measured(network: Network, batches: Any, setup: Setup) -> MeasuredTerms:
    """Measure the terms on all validation rows."""
    terms: tuple[Term, ...] = ()
    features: Features | None = None
    entries: Entries | None = None
    sites = Sites()
    kept: list[Tensor] = []
    inputs: list[Any] = []
    sample = RowSample(MOST_ROWS if setup.row_weights is None else None)
    with closing(batches) as stream:
        for x, y, found, tick in stream:
            chosen = sample.add(len(y))
            if chosen is not None:
                x, y = take_rows(x, chosen), y[chosen]
            if not len(y):
                tick()
                continue
            if entries is None:
                sites = found
                features = Features.all(sites) if setup.features is None else Features.named(setup.features, sites)
                terms, features = _fitting(setup.terms, network, x, sites, features, setup)
            rows = Rows(network, x, sites, setup.readout, features)
            columns = measured_columns([term for term in terms if not term.needs_features], rows)
            entries = entries or _entries(rows.mean, terms, setup)
            entries.add({_MEAN: rows.mean, _TARGET: as_output(rows.mean, y), **columns})
            if features is not None:
                kept.append(rows.features.cpu())
                inputs += [x] if any(map(_is_own, terms)) else []
            stay = sample.halved()
            if stay is not None:
                entries.keep(stay)
                kept, inputs = _thinned(kept, inputs, stay)
            tick()
    columns = dict(entries.items()) if entries is not None else {}
    check_rows(len(columns.get(_TARGET, ())), stacklevel=6)
    assert entries is not None
    mean, target = columns.pop(_MEAN), columns.pop(_TARGET)
    per_output = setup.has_outputs(torch.empty(0, *entries.shape))
    result = MeasuredTerms(sites, mean, target, terms, columns, features, entries.shape, per_output)
    return result if features is None else _learned(result, network, kept, inputs, setup, entries)


def _thinned(kept: list[Tensor], inputs: list[Any], stay: Tensor) -> tuple[list[Tensor], list[Any]]:
    """Features, and inputs where these are kept too, of the rows that stay."""
    if not inputs:
        return [torch.cat(kept)[stay]] if kept else [], []
    parts = stay.split([len(part) for part in kept])
    both = zip(inputs, parts, strict=True)
    inputs = [take_rows(x, part.nonzero()[:, 0].tolist()) for x, part in both if bool(part.any())]
    return [part[at] for part, at in zip(kept, parts, strict=True) if bool(at.any())], inputs


def _entries(mean: Tensor, terms: tuple[Term, ...], setup: Setup) -> Entries:
    """For outputs like these; all of their entries where the errors of each are kept."""
    whole = any(isinstance(term, LocalErrors) for term in terms)
    most = {"most": None} if whole else {}
    return Entries(tuple(mean.shape[1:]), axis=2 if setup.has_outputs(mean) else 1, **most)


def _is_own(term: Term) -> bool:
    """Whether a term is the user's and looks at features: it may look at the inputs beside them."""
    return term.needs_features and type(term) not in KINDS.values()


def _fitting(
    terms: tuple[Term, ...], network: Network, x: Any, sites: Sites, features: Features | None, setup: Setup
) -> tuple[tuple[Term, ...], Features | None]:
    """The terms that this model can have, ready to measure."""
    if features is not None:
        try:
            features = features.steady(network, x, sites)
        except LatedropError:
            features = None
    wanting = [term.name for term in terms if term.needs_features]
    if features is None and wanting:
        if setup.terms_given:
            raise ArgumentError(
                f"expected a site whose inputs have an axis for the examples and do not depend on the other rows of a "
                f"batch, which terms {wanting} look at; found none. Leave these terms out."
            )
        terms = tuple(term for term in terms if not term.needs_features)
    rows = Rows(network, x, sites, setup.readout, features)
    return tuple(term.prepared(rows) for term in terms), features


def _learned(
    found: MeasuredTerms, network: Network, kept: list[Tensor], inputs: list[Any], setup: Setup, entries: Entries
) -> MeasuredTerms:
    """Terms that look at features, after they saw those of the reference rows."""
    own = setup.reference is None
    count = 0
    features = torch.cat(kept)
    marks = feature_marks(features)
    seen = np.zeros(len(marks), dtype=bool)

    def reference() -> Iterator[Tensor]:
        nonlocal count
        count = 0
        for usual in reference_features(network, setup, found.sites, found.features, kept[0].shape[1]):
            count += len(usual)
            seen[np.isin(marks, feature_marks(usual))] = True
            yield usual

    learners = [term for term in found.terms if term.needs_features and not isinstance(term, LocalErrors)]
    guard = next((term for term in learners if isinstance(term, Leverage)), Leverage())
    learners += [guard] if guard not in learners else []
    # Several look at the same rows, which can perhaps be read but once.
    rows_seen = kept if own else reference() if len(learners) == 1 else _held(reference())
    learned: dict[Term, Term] = {term: term.learned_from(rows_seen, own) for term in learners}
    warn_of_training_rows(float(seen.mean()), stacklevel=7)
    error = found.target - found.mean
    rows = Rows(network, None, found.sites, setup.readout, found.features, torch.arange(len(features)))
    rows.remember(features, found.mean)
    learned |= {term: term.learned_from_errors(kept, error) for term in found.terms if isinstance(term, LocalErrors)}
    terms = [learned.get(term, term) for term in found.terms]
    measure = learned[guard]
    ours = [term for term in terms if term.needs_features and not _is_own(term)]
    columns = {**found.columns, **measured_columns(ours, rows)}
    if inputs:
        places = torch.arange(len(features)).split([len(part) for part in kept])
        theirs = entries.like()
        for x, at in zip(inputs, places, strict=True):
            batch = Rows(network, x, found.sites, setup.readout, found.features, at)
            theirs.add(measured_columns(list(filter(_is_own, terms)), batch))
        columns |= theirs.items()
    order = [name for term in terms for name in columns if term_of(name) == term.name]
    return replace(
        found,
        terms=tuple(terms),
        columns={name: columns[name] for name in order},
        guard=measure,
        leverage=measure.values(rows),
        reference_rows=count,
    )


def _held(parts: Iterator[Tensor]) -> list[Tensor]:
    """All rows, or as many as memory should hold."""
    sample, found = RowSample(), []
    for part in parts:
        chosen = sample.add(len(part))
        found.append(part if chosen is None else part[chosen])
        stay = sample.halved()
        found = found if stay is None else [torch.cat(found)[stay]]
    return found


def reference_features(
    network: Network, setup: Setup, sites: Sites, which: Features | None, width: int
) -> Iterator[Tensor]:
    """Features of the reference rows, as many for each as the validation rows have, in batches."""
    for x in _inputs(setup, network.model):
        try:
            features = Rows(network, x, sites, setup.readout, which).features.cpu()
            if features.shape[1] != width:
                raise ValueError(f"{features.shape[1]} features in place of {width}")
        except (SiteError, RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            if out_of_memory(error):
                raise
            raise DataError(
                f"expected reference rows that the model takes; it raised {type(error).__name__}: {error}. "
                "Pass the inputs of training rows in the form of the validation rows, or batches of them."
            ) from error
        yield features


def _inputs(setup: Setup, model: nn.Module) -> Iterator[Any]:
    """Reference inputs in batches: rows, or an iterable of batches whose targets, if any, are left out."""
    reference, collate = setup.reference, setup.collate
    arrays = isinstance(reference, (Tensor, dict, tuple)) or hasattr(reference, "__array__") or is_table(reference)
    listed = hasattr(reference, "__len__") and hasattr(reference, "__getitem__")
    if listed if collate is not None else arrays:
        rows = in_order(reference if collate is not None else inputs_of(reference, model), setup.columns)
        yield from row_batches(place(as_items(rows, collate), model), setup.batch_size)
        return
    try:
        batches = dataset_batches(reference, setup.batch_size) if is_dataset(reference) else iter(reference)
    except TypeError as error:
        raise DataError(
            f"expected reference rows as inputs, or an iterable of batches of them; found {type(reference).__name__}."
        ) from error
    for batch in batches:
        inputs = in_order(inputs_of(batch, model, setup.unpack, collate), setup.columns)
        yield place(as_items(inputs, collate), model)


def fitted(found: MeasuredTerms, setup: Setup) -> tuple[FittedTerms, Tensor, Verdict]:
    """Compare the candidates and fit the chosen one: with its variances of the validation rows, and its verdict."""
    per_output = found.per_output
    error = outputs_last((found.target - found.mean).double(), per_output)
    names = list(found.columns)
    stacked = [outputs_last(found.columns[name].double(), per_output) for name in names]
    columns = torch.stack(stacked, -1) if names else error.new_zeros(*error.shape, 0)
    too_few = setup.reference is None and len(found.target) < _FEW_ROWS  # then the constant stands
    factor, guard = torch.ones(len(found.target), dtype=torch.float64), None
    weights = setup.weights(len(found.target))
    counts = torch.ones(len(error), dtype=torch.float64)
    if weights is not None:
        counts = weights.repeat_interleave(len(error) // len(weights))
    target = outputs_last(found.target.double(), per_output)
    centres = (counts[:, None] * target).mean(0)
    spreads = (counts[:, None] * (target - centres).square()).mean(0)
    if found.guard is not None and found.leverage is not None:
        limit = _quantile(found.leverage.double(), weights)
        constants = (counts[:, None] * error.square()).mean(0)
        known = [tuple(part.tolist()) for part in (constants, centres, spreads)]
        most = _MOST_OF_FEW if too_few else None
        guard = Guard(found.guard, limit, known[0], known[1], known[2], bool(setup.guard), most)
        factor = guard.factor(found.leverage.double() / limit)
    growth = Growth(factor, ignorant(target - error, centres, spreads))
    groups = [_blocks(term, names) for term in found.terms]
    used = 0 if too_few else len(found.terms)
    picked = choose(
        error,
        columns,
        [term.name for term in found.terms][:used],
        groups[:used],
        growth,
        setup.loss,
        Left(setup.folds, weights),
    )
    fit = picked.fit
    grown = factor.repeat_interleave(len(error) // len(factor))[:, None]
    variance = guarded(fit.variance(columns), grown, fit.constants, growth.ceiling)
    shape = found.target.movedim(1, -1).shape if per_output else found.target.shape
    variance = variance.reshape(shape)
    parts = torch.cat([columns * fit.coefficients, fit.floors.expand(*error.shape)[..., None]], -1)
    named = dict(zip([*names, "floor"], parts.unbind(-1), strict=True))
    shares = (counts[:, None, None] * parts / parts.sum(-1, keepdim=True)).mean((0, 1)).tolist()
    kept = FittedTerms(
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
        usual=_usual(found, guard, named, weights) if len(error) == len(found.target) else None,
    )
    return kept, variance.movedim(-1, 1) if per_output else variance, picked.verdict


def _usual(found: MeasuredTerms, guard: Guard | None, parts: dict[str, Tensor], weights: Tensor | None) -> Usual:
    """How the validation rows are spread, for streams; of the terms that are in use."""
    strangeness = None if guard is None or found.leverage is None else (found.leverage / guard.limit).tolist()
    shares = shares_of_terms({name: part for name, part in parts.items() if bool(part.any()) or name == "floor"})
    counts = None if weights is None else weights.tolist()
    return usual_of_rows(strangeness, {name: share.tolist() for name, share in shares.items()}, counts)


def _quantile(leverage: Tensor, weights: Tensor | None) -> float:
    """What rows of nine tenths of the weight stay below."""
    if weights is None:
        return float(torch.quantile(leverage, _INSIDE, interpolation="higher"))
    ordered, order = leverage.sort()
    counts = weights[order]
    below = counts.cumsum(0) - counts < _INSIDE * (len(counts) - 1)
    return float(ordered[min(int(below.sum()), len(ordered) - 1)])


def _blocks(term: Term, names: list[str]) -> list[list[int]]:
    """The places of a term's columns: the sites of dropout share a rate."""
    places = [i for i, name in enumerate(names) if term_of(name) == term.name]
    return [places] if isinstance(term, Dropout) and places else [[place] for place in places]


def outputs_last(values: Tensor, per_output: bool) -> Tensor:
    """`(M, K)` with one column for each index of axis 1, or `(M, 1)`; the entries of a row stay together."""
    return values.movedim(1, -1).reshape(-1, values.shape[1]) if per_output else values.reshape(-1, 1)
