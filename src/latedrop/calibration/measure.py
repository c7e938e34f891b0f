"""Measure the network's predictions and the variance terms on the validation rows.

The data are read once. Terms that need no reference rows are measured in this pass. Features are stored, and the terms
that learn from reference rows are measured afterwards.

Memory is bounded if the number of rows is known. Of more than `MOST_ROWS` rows about that many are chosen by a hash of
the row number, which does not depend on the batch size, and only these rows are run. Of large outputs a subset of
positions is stored, the same for every row, because a fit of a few coefficients needs no more than a million errors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.calibration.corrected_mean import Correction, fit_correction
from latedrop.calibration.cross_validation import CrossValidation, crossed
from latedrop.calibration.fitted_terms import blocks_of, fit_terms, measured_columns, term_of
from latedrop.calibration.guard import Guard
from latedrop.calibration.methods import Plan, Terms
from latedrop.calibration.scale import refuse_no_errors
from latedrop.calibration.seen import feature_marks, warn_of_training_rows
from latedrop.calibration.targets import as_output, check_rows, check_shapes
from latedrop.data.arrays import is_table, place
from latedrop.data.batches import Labelled, dataset_batches, in_order, inputs_of, is_dataset, row_batches, row_total
from latedrop.data.rows import as_items, row_count, rows_are_nodes, take_rows
from latedrop.dropout.masks import STEP, mixed
from latedrop.dropout.moments import out_of_memory
from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.network.find_sites import find_sites
from latedrop.network.network import Network, Readout
from latedrop.network.sites import Sites
from latedrop.terminal import listed, progress
from latedrop.terms import BatchContext, Dropout, ErrorForest, GradientLeverage, Leverage, Term
from latedrop.terms.features import Features

__all__ = [
    *("Learned", "TermRows", "joined", "learnable", "learned_from_reference", "leverages", "measure_terms"),
    *("usable_features", "validation_batches", "whole_batch"),
]

_log = logging.getLogger(__name__)
MOST_ROWS = 2**15
"""Rows of a fit, about; with half as many, a variance has a standard error of about 1 %."""
MOST_ENTRIES = 2**20
_SHOWN = 6
_EXAMPLES = 1024  # maximum number of rows for finding sites
_MOST_NUMBERS = 2**25  # maximum number of floats stored of the reference rows
_MEAN, _TARGET = "(mean)", "(target)"  # keys next to the columns of terms

Parts: TypeAlias = dict[str, Tensor]
"""Tensors of n rows by name, each `(n, ...)`."""


def validation_batches(
    model: nn.Module, data: Labelled, plan: Plan, per_batch: int = 1
) -> Generator[tuple[Any, Tensor, Sites, Callable[[], Any]], None, None]:
    """Yield inputs, targets in the model's unit, sites, and a function that advances the progress bar.

    The sites are found on the first inputs. Rows of weight 0 are skipped, as if they were not in the data.
    """
    sites, count = plan.sites if isinstance(plan.sites, Sites) else Sites(), 0
    weights, first = plan.counted, data.first(_EXAMPLES)
    if not isinstance(plan.sites, Sites) and first is not None:
        # A pair offers more rows than the first batch, which may not run every branch.
        sites = find_sites(model, first[0], select=plan.sites)
        _log.info("sites found: %s", listed([site.name for site in sites], _SHOWN))
    with progress("calibrating", data.row_total, show=plan.progress) as done:
        for x, y in data:
            rows, count = len(y), count + len(y)
            if weights is not None and not bool(weights[count - rows : count].all()):
                some = weights[count - rows : count].nonzero()[:, 0]
                if not len(some):
                    continue
                x, y = take_rows(x, some.tolist()), y[some]
            y = y if plan.target is None else plan.target.forward(y)
            yield x, y, sites, partial(done, rows / per_batch)
    plan.check_weights(count)


class _RowChoice:
    """Choose about `most` of `total` rows that arrive in batches, or half as many; all rows if no total is known."""

    def __init__(self, total: int | None, most: int) -> None:
        halvings = 0 if total is None else max(0, math.ceil(math.log2(max(total, 1) / most)))
        self._every, self.read = 2**halvings, 0
        self.expected = None if total is None else total // self._every

    def next(self, rows: int) -> list[int] | None:
        """Return the positions of the chosen rows among the next `rows` ones; None for all."""
        start, self.read = self.read, self.read + rows
        if self._every == 1:
            return None
        hashes = mixed((np.arange(start, self.read, dtype=np.uint64) + np.uint64(1)) * STEP)
        positions: list[int] = np.flatnonzero(hashes % np.uint64(self._every) == 0).tolist()
        return positions


def _positions(shape: Sequence[int], axis: int, rows: int | None) -> Tensor | None:
    """Choose the stored positions of outputs, flattened from `axis` of `(N, ...)` on; None for all."""
    beside, count = torch.Size(shape[: axis - 1]).numel(), torch.Size(shape[axis - 1 :]).numel()
    most = count
    while rows is not None and rows * beside * most > MOST_ENTRIES and most > 1:
        most //= 2
    return None if most == count else torch.randperm(count, generator=torch.Generator().manual_seed(count))[:most]


@dataclass(frozen=True)
class TermRows:
    """Hold the measurements on N validation rows for a fit of K outputs, or of all outputs together (K = 1)."""

    plan: Plan
    sites: Sites
    mean: Tensor  # (N, ...), with the cross-fitted correction if one was requested
    target: Tensor  # (N, ...)
    terms: tuple[Term, ...]  # fitted, with those of the guard
    columns: dict[str, Tensor]  # values of the terms by column name, each (N, ...)
    features: Features | None
    shape: tuple[int, ...]  # of one row's output; mean, target and columns may hold only some of its positions
    guards: tuple[str, ...] = ()  # names of the terms that measure novelty
    leverage: Tensor | None = None  # values of these terms, (N, terms, K)
    usual: Tensor | None = None  # their values on m reference rows, (m, terms, K); None without reference rows
    table: Tensor | None = None  # inputs (N, columns), if a term needs them and they are one table
    correction: Correction | None = None  # of the mean, if one was requested
    usual_sizes: dict[str, Tensor] = field(default_factory=dict)  # means of columns over the reference rows, (K,)
    reference_rows: int = 0  # 0 if the validation rows were used instead
    guard: Guard | None = None

    @property
    def per_output(self) -> bool:
        """Return True if axis 1 holds outputs, each with its own coefficients."""
        return self.plan.has_outputs((0, *self.shape))

    def entries(self, values: Tensor) -> Tensor:
        """Reshape values `(N, ...)` to `(N, K, entries)` in float64; K is 1 without separate outputs."""
        return values.double().reshape(len(values), values.shape[1] if self.per_output else 1, -1)

    @cached_property
    def error(self) -> Tensor:
        """Return target minus mean, `(N, K, I)`."""
        return self.entries(self.target - self.mean)

    @cached_property
    def stacked(self) -> Tensor:
        """Stack the J columns, `(N, K, I, J)`."""
        columns = [self.entries(column) for column in self.columns.values()]
        return torch.stack(columns, -1) if columns else self.error.new_zeros(*self.error.shape, 0)

    @cached_property
    def sizes(self) -> Tensor:
        """Return the mean of each column over reference or validation rows, `(K, J)`."""
        sizes = self.left.mean(self.stacked.mean(2))
        for j, name in enumerate(self.columns):
            if name in self.usual_sizes:
                usual = self.usual_sizes[name].double()
                sizes[:, j] = usual if self.per_output else usual.mean()
        return sizes

    @cached_property
    def novelty(self) -> Tensor | None:
        """Return the novelty of each row, `(N,)`; None without a guard."""
        if self.guard is None or self.leverage is None:
            return None
        return self.guard.ratio(self.leverage.unbind(1))

    @cached_property
    def left(self) -> CrossValidation:
        """Return the folds and row weights for cross-validation."""
        assert isinstance(self.plan.method, Terms)
        if self.plan.method.folds == "blocks":
            return CrossValidation.of_runs(len(self.target), self.plan.weights)
        return CrossValidation(self.plan.weights)


def learnable(rows: BatchContext, names: Iterable[str]) -> Parts:
    """Return quantities of a batch from which terms learn, by name, on the CPU; without those that are None.

    Name `"gradients"` before `"features"`, because one backward pass computes both.
    """
    values = {name: getattr(rows, name) for name in names}
    return {name: value.cpu() for name, value in values.items() if value is not None}


def joined(batches: Sequence[Parts]) -> Parts:
    """Join the tensors of several batches, name by name."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def measure_terms(network: Network, data: Labelled, plan: Plan) -> TermRows:
    """Run the network on the validation rows, and measure all terms there."""
    method = plan.method
    assert isinstance(method, Terms)
    choice = _RowChoice(data.row_total if plan.counted is None else None, MOST_ROWS)
    terms: tuple[Term, ...] = ()
    features: Features | None = None
    positions: Tensor | None = None
    shape: tuple[int, ...] = ()
    sites, axis, gradients = Sites(), 1, False
    asked: list[str] = []
    noted: list[Parts] = []
    measured: list[Parts] = []
    with closing(validation_batches(network.model, data, plan)) as stream:
        for x, y, sites, tick in stream:
            chosen = choice.next(len(y))
            nodes = rows_are_nodes(x)  # nodes run together, even if only some are chosen
            if chosen is not None:
                x, y = x if nodes else take_rows(x, chosen), y[chosen]
            if not len(y):
                tick()
                continue
            if not measured:
                features = usable_features(network, x, sites, plan.readout, method.features)
            rows = BatchContext(network, x, sites, plan.readout, features, gradients=gradients)
            if not measured:
                terms = _usable(method, rows)
                rows.wants_gradients = gradients = any(term.needs_gradients for term in terms)
                forest = any(isinstance(term, ErrorForest) for term in terms)
                wanted = {"gradients": gradients, "features": features is not None, "table": forest}
                asked = [name for name, is_wanted in wanted.items() if is_wanted]
                shape, axis = tuple(rows.mean.shape[1:]), 2 if plan.has_outputs(rows.mean.shape) else 1
                # A term that learns from errors needs those of all positions.
                every = any(term.needs_errors for term in terms)
                positions = _positions(shape, axis, None if every else choice.expected)
            if gradients:
                _ = rows.gradients  # this pass also computes the mean, the features and dropout
            batch = measured_columns([term for term in terms if not _learns(term)], rows)
            batch[_MEAN] = rows.mean
            parts = learnable(rows, asked)
            if nodes and chosen is not None:
                batch, parts = _at(batch, chosen), _at(parts, chosen)
            check_shapes([shape, rows.mean.shape[1:]])
            batch[_TARGET] = as_output(batch[_MEAN], y)
            if positions is not None:
                batch = {name: v.flatten(axis)[..., positions.to(v.device)] for name, v in batch.items()}
            measured.append({name: values.cpu() for name, values in batch.items()})
            noted.append(parts)
            tick()
    check_rows(sum(len(batch[_TARGET]) for batch in measured), stacklevel=3)
    columns = joined(measured)
    mean, target = columns.pop(_MEAN), columns.pop(_TARGET)
    return _with_learned(TermRows(plan, sites, mean, target, terms, columns, features, shape), network, joined(noted))


def _at(parts: Parts, rows: list[int]) -> Parts:
    return {name: values[rows] for name, values in parts.items()}


def _learns(term: Term) -> bool:
    """Return True if a term learns from reference rows or from errors before it is measured."""
    kind = type(term)
    return kind.learned_from is not Term.learned_from or kind.learned_from_errors is not Term.learned_from_errors


def usable_features(
    network: Network, x: Any, sites: Sites, readout: Readout, names: Sequence[str] | None = None
) -> Features | None:
    """Return the features that do not depend on the other rows of a batch; None if there are none."""
    features = Features.all(sites) if names is None else Features.named(names, sites)
    try:
        if features is not None and features.are_loose(sites):
            _ = BatchContext(network, x, sites, readout, features).features
        return None if features is None else features.steady(network, x, sites)
    except LatedropError:
        return None


def _usable(method: Terms, rows: BatchContext) -> tuple[Term, ...]:
    """Prepare the terms that this model supports; raise for those that the user named and it does not."""
    wanting = [term.name for term in method.objects if term.needs_features]
    if wanting and method.chosen and not rows.has_features:
        raise ArgumentError(
            f"expected a site whose inputs have an axis for the examples and do not depend on the other rows of a "
            f"batch, for terms {wanting}; found none. Leave these terms out."
        )
    terms = [term for term in method.objects if rows.has_features or not term.needs_features]
    if not method.chosen and method.folds == "blocks":
        # Neighbours of a left-out row would be in its trees.
        terms = [term for term in terms if not isinstance(term, ErrorForest)]
    rows.wants_gradients = any(term.needs_gradients for term in terms)
    usable: list[Term] = []
    for term in terms:
        try:
            usable.append(term.prepared(rows))
        except LatedropError as error:
            if method.chosen:
                raise
            _log.info("without %s: %s", term.name, error)
    return tuple(usable)


def _with_learned(measured: TermRows, network: Network, noted: Parts) -> TermRows:
    """Fit the terms that learn to reference rows and errors, then measure them on the validation rows."""
    plan, method = measured.plan, measured.plan.method
    assert isinstance(method, Terms)
    terms = list(measured.terms)
    names = [term.name for term in terms]
    ordered = [name for name in names if name in ("gradients", "forest")]
    if method.mean == "corrected" and ordered != ["gradients", "forest"]:
        raise ArgumentError(
            "expected terms with 'gradients' before 'forest' for mean='corrected', and a model with at "
            f"most 4 outputs that supports them; found {names}. Leave mean='corrected' out."
        )
    guard = [term for term in terms if isinstance(term, (Leverage, GradientLeverage))]
    if not guard and measured.features is not None:
        guard = [Leverage()]
        terms += guard
    learning = [term for term in terms if type(term).learned_from is not Term.learned_from]
    reference = learned_from_reference(network, plan, measured.sites, measured.features, noted, learning)
    learned = reference.terms
    warn_of_training_rows(reference.share_seen, stacklevel=4)
    rows = whole_batch(network, plan, measured.sites, measured.features, noted, measured.mean)
    rows.weights = plan.weights
    error, columns, correction = measured.target - measured.mean, dict(measured.columns), None
    for term in terms:
        own = [column for name, column in columns.items() if term_of(name) == term.name]
        rows.totals |= {term.name: torch.stack(own).sum(0)} if own else {}
    for i, term in enumerate(terms):
        if isinstance(term, ErrorForest) and method.mean == "corrected":
            correction, added = _corrected(term.looking_at(rows), terms[:i], rows, columns, error)
            error = error - added.to(error)
        try:
            terms[i] = learned.get(term, term).learned_from_errors(rows, error)
        except LatedropError:
            if method.chosen:
                raise
            continue
        if _learns(term) and term in measured.terms:
            columns |= measured_columns([terms[i]], rows)
    terms = [term for term in terms if not isinstance(term, ErrorForest) or term.grown is not None]
    order = [name for term in terms for name in columns if term_of(name) == term.name]
    guards = [learned[term] for term in guard]
    leverage, usual = leverages(guards, rows) if guards else (None, None)
    sizes = {} if usual is None else {term.name: usual[:, i].mean(0) for i, term in enumerate(guards)}
    return replace(
        measured,
        mean=measured.mean if correction is None else measured.target - error,
        correction=correction,
        terms=tuple(terms),
        columns={name: columns[name] for name in order},
        guards=tuple(term.name for term in guards),
        leverage=leverage,
        usual=usual,
        table=rows.table,
        usual_sizes={**sizes, **reference.dropout},
        reference_rows=reference.rows,
    )


def _corrected(
    forest: ErrorForest, terms: Sequence[Term], rows: BatchContext, columns: dict[str, Tensor], error: Tensor
) -> tuple[Correction, Tensor]:
    """Fit the correction of the mean; return it and its cross-fitted values on the validation rows."""
    metric = next(term for term in terms if isinstance(term, GradientLeverage))
    flat = error.double().reshape(len(error), -1)
    if not bool(flat.any(0).all()):
        refuse_no_errors()
    stacked = torch.stack([column.double().reshape(flat.shape) for column in columns.values()], -1)
    blocks = [block for term in terms for block in blocks_of(term, list(columns))]
    left = CrossValidation(rows.weights)

    def fit(rest: Tensor) -> Callable[[Tensor], Tensor]:
        fitted = fit_terms(flat[rest], stacked[rest], blocks, weights=left.at(rest))
        return lambda out: fitted.variance(stacked[out])

    variance, _ = crossed(flat, fit, True, left)
    inputs, directions = forest.numbers(rows), metric.directions(rows.gradients)
    correction, added = fit_correction(inputs, directions, flat, variance, rows.weights)
    return correction, added.reshape(error.shape)


def leverages(terms: Sequence[Any], rows: BatchContext) -> tuple[Tensor, Tensor | None]:
    """Return leverages of validation rows `(N, terms, K)`, and of reference rows or None if these are the same."""

    def stacked(values: Sequence[Tensor]) -> Tensor:  # of (n, K), (n, 1) or (n,) each
        flat = [part.double().cpu().reshape(len(part), -1) for part in values]
        outputs = max(part.shape[1] for part in flat)
        return torch.stack([part.expand(-1, outputs) for part in flat], 1)

    samples = [term.sample for term in terms]
    values = [rows.values_of(term) for term in terms]
    return stacked(values), None if None in samples else stacked(samples)


def whole_batch(
    network: Network, plan: Plan, sites: Sites, features: Features | None, noted: Parts, mean: Tensor | None
) -> BatchContext:
    """Return all validation rows as one batch with the stored quantities `noted`, and the mean if given."""
    index = torch.arange(len(next(iter(noted.values())) if mean is None else mean))
    rows = BatchContext(network, None, sites, plan.readout, features, index)
    rows.remember(mean=mean, **noted)
    return rows


@dataclass(frozen=True)
class Learned:
    """Hold terms fitted to the reference rows, or to the validation rows if there are none."""

    terms: dict[Term, Term]  # the fitted term for each unfitted one
    rows: int = 0  # number of reference rows that were read; 0 if the validation rows were used instead
    share_seen: float = 0.0  # estimated share of the validation rows that are among the reference rows
    dropout: Parts = field(default_factory=dict)  # mean first-order variance of each site, (K,), by column name


def learned_from_reference(
    network: Network, plan: Plan, sites: Sites, features: Features | None, validation: Parts, terms: Sequence[Term]
) -> Learned:
    """Fit terms to features and mask gradients of the reference rows, or of a subset if there are very many."""
    if plan.reference is None or not terms:
        return Learned(_taught(terms, [validation], own=True))
    gradients = any(term.needs_gradients for term in terms)
    names = [name for name in ("gradients", "features") if name in validation and (gradients or name == "features")]
    shapes = {name: validation[name].shape[1:] for name in names}
    numbers = sum(shape.numel() for shape in shapes.values())
    total, batches = _reference_batches(plan, network.model)
    choice = _RowChoice(total, min(MOST_ROWS, max(1000, _MOST_NUMBERS // max(1, numbers))))
    shown: list[Parts] = []
    sums: list[Tensor] = []
    run = 0
    for x in batches:
        x = as_items(x, None, sites)
        chosen, nodes = choice.next(row_count(x)), rows_are_nodes(x)
        try:
            x = x if chosen is None or nodes else take_rows(x, chosen)
            if not row_count(x):
                continue
            rows = BatchContext(network, x, sites, plan.readout, features, gradients=gradients)
            parts = learnable(rows, names)
            if {name: part.shape[1:] for name, part in parts.items()} != shapes:
                raise ValueError(f"numbers of other shapes than {shapes}")
            if gradients:
                sums.append(rows.linear.variance_by_site.double().sum(0).cpu())
        except (LatedropError, RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            if out_of_memory(error):
                raise
            raise DataError(
                f"expected reference rows that the model takes; it raised {type(error).__name__}: {error}. "
                "Pass the inputs of training rows in the form of the validation rows, or batches of them."
            ) from error
        run += row_count(x)
        shown.append(_at(parts, chosen) if nodes and chosen is not None else parts)
    share, dropout = 0.0, Parts()
    if sums:
        sizes = (torch.stack(sums).sum(0) / run).unbind(1)
        dropout = {f"{Dropout.name}:{site.name}": size for site, size in zip(sites, sizes, strict=True)}
    if "features" in validation and shown:
        marks = feature_marks(torch.cat([part["features"] for part in shown]))
        among = float(np.isin(feature_marks(validation["features"]), marks).mean())
        share = min(1.0, among * choice.read / len(marks))
    return Learned(_taught(terms, shown, own=False), choice.read, share, dropout)


def _taught(terms: Sequence[Term], batches: Sequence[Parts], *, own: bool) -> dict[Term, Term]:
    """Fit each term to batches of features or gradients; `own` is True if these are the validation rows."""
    names = ["gradients" if term.needs_gradients else "features" for term in terms]
    each = zip(terms, names, strict=True)
    return {term: term.learned_from([batch[name] for batch in batches], own) for term, name in each}


def _reference_batches(plan: Plan, model: nn.Module) -> tuple[int | None, Iterator[Any]]:
    """Return the number of reference rows, or None if unknown, and an iterator over batches of their inputs."""
    reference, collate, size = plan.reference, plan.batches.collate, plan.batches.size

    def placed(inputs: Any) -> Any:
        return place(as_items(in_order(inputs, plan.columns), collate), model)

    arrays = isinstance(reference, (Tensor, dict, tuple)) or hasattr(reference, "__array__") or is_table(reference)
    listed = hasattr(reference, "__len__") and hasattr(reference, "__getitem__")
    if listed if collate is not None else arrays:
        inputs = placed(reference if collate is not None else inputs_of(reference, model))
        return row_count(inputs), row_batches(inputs, size)
    try:
        batches = dataset_batches(reference, size)
    except TypeError as error:
        raise DataError(
            f"expected reference rows as inputs, or an iterable of batches of them; found {type(reference).__name__}. "
            "Pass an array, a list of batches or a DataLoader."
        ) from error
    total = row_total(reference) if is_dataset(reference) or hasattr(reference, "dataset") else None
    return total, (placed(inputs_of(batch, model, plan.batches.unpack, collate)) for batch in batches)
