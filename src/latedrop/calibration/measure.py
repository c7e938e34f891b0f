"""The validation rows, measured: what a network gives for them, and what may explain its errors.

The data are read once. Terms that need no reference are measured on the way; features are kept, and the terms that
learn from reference rows are measured afterwards. Of very many rows some are kept (`RowSample`); no others are run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from warnings import warn

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.calibration.collecting import MOST_ROWS, Entries, RowSample
from latedrop.calibration.corrected_mean import Correction, fit_correction
from latedrop.calibration.cross_validation import CrossValidation, crossed
from latedrop.calibration.fitted_terms import KINDS, add_totals, measured_columns, term_of
from latedrop.calibration.methods import PAPER_RATES, FirstOrder, Plan, Sampling, Terms
from latedrop.calibration.scale_fit import refuse_no_errors
from latedrop.calibration.seen import feature_marks, warn_of_training_rows
from latedrop.calibration.shape import blocks_of, fit_terms
from latedrop.calibration.targets import as_output, check_rows, joined
from latedrop.data.arrays import is_table, place
from latedrop.data.batches import first_rows, row_batches, row_total
from latedrop.data.datasets import dataset_batches, inputs_of, is_dataset
from latedrop.data.items import as_items, rows_are_nodes
from latedrop.data.names import in_order
from latedrop.data.rows import row_count, take_rows, tensors
from latedrop.dropout.first_order import linearize
from latedrop.dropout.moments import Moments, out_of_memory
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import own_output, sample_rates
from latedrop.errors import ArgumentError, DataError, LatedropError, LatedropWarning
from latedrop.network.calling import Readout
from latedrop.network.find_sites import find_sites
from latedrop.network.network import Network
from latedrop.network.sites import Rate, Sites
from latedrop.progress import progress
from latedrop.propagation.propagate import propagate
from latedrop.terminal import listed
from latedrop.terms import BatchContext, Dropout, ErrorForest, GradientLeverage, Leverage, Term
from latedrop.terms.features import Features

__all__ = [
    "MeasuredRates",
    "MeasuredTerms",
    "Reference",
    "RowParts",
    "leverages",
    "measure_rates",
    "measure_terms",
    "moments",
    "usable_features",
    "validation_batches",
]

_log = logging.getLogger(__name__)
_SHOWN = 6
_EXAMPLES = 1024  # rows that sites are found on, at most
_ROWS, _VALUES = 8, 2**18  # of the inputs that a few draws run on
_MOST_NUMBERS = 2**25  # of the reference rows that are held
_MEAN, _TARGET = "(mean)", "(target)"  # beside columns, whose names are those of terms


def validation_batches(
    model: nn.Module, data: Any, plan: Plan, per_batch: int = 1
) -> Generator[tuple[Any, Tensor, Sites, Callable[[], Any]], None, None]:
    """Inputs, targets in the model's unit, sites, found on the first inputs, and what to call after every step.

    Rows of weight 0 are left out, as if they were not in the data.
    """
    sites, count = plan.sites if isinstance(plan.sites, Sites) else None, 0
    weights = None if plan.weighs_later else plan.counted
    with progress("calibrating", row_total(data), show=plan.progress) as done:
        for x, y in plan.batches.read(data, model):
            rows, count = len(y), count + len(y)
            if weights is not None and not bool(weights[count - rows : count].all()):
                some = weights[count - rows : count].nonzero()[:, 0]
                if not len(some):
                    continue
                x, y = take_rows(x, some.tolist()), y[some]
            if sites is None:
                # Of a pair more rows than the first batch are there, should it not take every branch.
                pair = plan.batches.is_one_pair(data)
                examples = first_rows(data, model, _EXAMPLES, plan.batches.collate) if pair else x
                sites = find_sites(model, examples, select=plan.sites)  # type: ignore[arg-type]
                _log.info("sites found: %s", listed([site.name for site in sites], _SHOWN))
            y = y if plan.target is None else plan.target.forward(y)
            yield x, y, sites, partial(done, rows / per_batch)
    plan.check_weights(count)


def moments(
    model: nn.Module | Network,
    x: Any,
    rates: Sequence[Rate],
    sites: Sites,
    method: str,
    options: DrawOptions,
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """Mean and raw variance of `x`, which was placed, at each rate; `tick` is called after each. Not for terms.

    Calibration and prediction measure in the same way, so that a scale fitted to one holds for the other. Of the
    options, methods other than `"sample"` need the readout alone.
    """
    if method == "sample":
        return sample_rates(model, x, rates, sites, options, tick)
    if method == "linear":
        result = linearize(model, x, sites, options.readout)
        return [Moments(result.mean, result.variance(rate), 0) for rate in rates]
    found = []
    for rate in rates:
        found.append(propagate(model, x, rate, sites, options.readout))
        tick()
    return found


@dataclass(frozen=True)
class MeasuredRates:
    """The validation rows, measured by draws, by propagation, or to first order.

    Attributes:
        sites: where dropout goes.
        target: `(N, ...)`.
        means: `(N, ...)` for each rate; to first order one.
        variances: `(N, ...)` for each rate, raw; to first order `(N, outputs, sites)` per unit of `rate / (1 - rate)`.
        few: inputs of a few rows.
    """

    sites: Sites
    target: Tensor
    means: list[Tensor]
    variances: list[Tensor]
    few: Any


def measure_rates(network: Network, data: Any, plan: Plan) -> MeasuredRates:
    """Measure all validation rows at every rate, with the same random numbers."""
    method, sites, few = plan.method, Sites(), None
    assert not isinstance(method, Terms)
    rates: Sequence[Rate] = () if isinstance(method, FirstOrder) else method.rates or PAPER_RATES
    count = max(1, len(rates))
    means: list[list[Tensor]] = [[] for _ in range(count)]
    variances: list[list[Tensor]] = [[] for _ in range(count)]
    targets: list[Tensor] = []
    with closing(validation_batches(network.model, data, plan, per_batch=count)) as stream:
        for x, y, sites, tick in stream:
            few = _few_rows(x, sites) if few is None else few
            if isinstance(method, FirstOrder):
                result = linearize(network, x, sites, plan.readout)
                pairs = [(result.mean, result.variance_by_site)]
                tick()
            else:
                own = own_output(network, x, plan.readout) if method.mean == "model" else None
                found = moments(network, x, rates, sites, method.name, draw_options(plan), tick)
                pairs = [(moment.mean if own is None else own, moment.variance) for moment in found]
            targets.append(as_output(pairs[0][0], y).cpu())
            for i, (mean, variance) in enumerate(pairs):
                means[i].append(mean.cpu())
                variances[i].append(variance.cpu())
    target = joined(targets, stacklevel=3)
    return MeasuredRates(sites, target, list(map(torch.cat, means)), list(map(torch.cat, variances)), few)


def draw_options(plan: Plan) -> DrawOptions:
    """How draws of a method are run; methods without draws need the readout alone."""
    method = plan.method
    if not isinstance(method, Sampling):
        return DrawOptions(2, method.seed, plan.readout)
    return DrawOptions(method.draws, method.seed, plan.readout, method.chunk, method.shared, engine=plan.engine)


def _few_rows(x: Any, sites: Sites) -> Any:
    """The first rows of a batch; all of them where they belong together."""
    if any(site.coupled or site.batch_axis is None for site in sites):
        return x
    row = sum(value.numel() for value in tensors(x)) / max(row_count(x), 1)
    return take_rows(x, slice(max(1, min(_ROWS, int(_VALUES / max(row, 1))))))


@dataclass(frozen=True)
class MeasuredTerms:
    """The validation rows, measured.

    Attributes:
        sites: where dropout goes.
        mean, target: `(N, ...)`; the mean is corrected where that was asked for, by rows of other folds.
        terms: after they learned, those of the guard among them.
        columns: `(N, ...)` each, by name, of the terms that may have a coefficient.
        features: which they are; None where there are none.
        shape: of one row's output, of which `mean`, `target` and `columns` may hold some entries alone.
        per_output: whether axis 1 holds outputs.
        guard: the names of the terms that tell novel rows; empty where none can.
        leverage: their values, `(N, terms, K)`, one for each of K outputs or one for all.
        usual: the same of reference rows, `(m, terms, K)`, where these are not the validation rows.
        table: `(N, columns)`, the inputs, where they are one table and a term asked for it.
        correction: of the mean, where that was asked for.
        sizes: `(K,)` or `(1,)`, what columns are on average over the reference rows; of others the validation
            rows tell.
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
    guard: tuple[str, ...] = ()
    leverage: Tensor | None = None
    usual: Tensor | None = None
    table: Tensor | None = None
    correction: Correction | None = None
    sizes: dict[str, Tensor] = field(default_factory=dict)
    reference_rows: int = 0

    def entries(self, values: Tensor) -> Tensor:
        """Return values `(N, ...)` as `(N, K, entries)`, of K outputs or of all as one, in double precision."""
        return values.double().reshape(len(values), values.shape[1] if self.per_output else 1, -1)


class RowParts(NamedTuple):
    """What terms that learn look at, of some rows, on the CPU: None where nobody asked for it.

    Attributes:
        features: `(n, F)`.
        gradients: `(n, K, D)`, of the masks.
        table: `(n, columns)`, the inputs themselves.
    """

    features: Tensor | None
    gradients: Tensor | None = None
    table: Tensor | None = None

    @classmethod
    def of(cls, rows: BatchContext, *, features: bool, gradients: bool = False, table: bool = False) -> RowParts:
        """Those that are asked for, of a batch."""
        phi = rows.gradients.cpu() if gradients else None  # first, as the same pass notes the features
        own = rows.table if table else None
        return cls(rows.features.cpu() if features else None, phi, None if own is None else own.cpu())

    @classmethod
    def joined(cls, parts: Sequence[RowParts]) -> RowParts:
        """Those of several batches as one."""
        return cls(*(None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)))

    def at(self, rows: Any) -> RowParts:
        """Those of some rows."""
        return RowParts(*(None if part is None else part[rows] for part in self))

    @property
    def numbers(self) -> int:
        """How many numbers a row has."""
        return sum(part[0].numel() for part in self if part is not None and len(part))


def measure_terms(network: Network, data: Any, plan: Plan) -> MeasuredTerms:
    """Measure the terms on all validation rows."""
    method = plan.method
    assert isinstance(method, Terms)
    terms: tuple[Term, ...] = ()
    features: Features | None = None
    entries: Entries | None = None
    sites = Sites()
    asked: dict[str, bool] = {}
    noted: list[RowParts] = []
    inputs: list[Any] = []
    sample = RowSample(None if plan.weighs_later or plan.counted is not None else MOST_ROWS)
    with closing(validation_batches(network.model, data, plan)) as stream:
        for x, y, sites, tick in stream:
            chosen = sample.add(len(y))
            nodes = rows_are_nodes(x)  # which run together, however many are chosen
            if chosen is not None:
                x, y = x if nodes else take_rows(x, chosen), y[chosen]
            if not len(y):
                tick()
                continue
            if entries is None:
                features = usable_features(network, x, sites, plan.readout, method.features)
                terms = _usable_terms(method, network, x, sites, features, plan)
                gradients = any(term.needs_gradients for term in terms)
                forest = any(isinstance(term, ErrorForest) for term in terms)
                asked = {"features": features is not None, "gradients": gradients, "table": forest}
            rows = BatchContext(network, x, sites, plan.readout, features, gradients=asked["gradients"])
            columns = {_MEAN: rows.mean} | measured_columns([term for term in terms if not _learns(term)], rows)
            parts = RowParts.of(rows, **asked)
            if nodes and chosen is not None:
                columns, parts = {name: column[chosen] for name, column in columns.items()}, parts.at(chosen)
            entries = entries or _entries(rows.mean, terms, plan)
            entries.add({_TARGET: as_output(columns[_MEAN], y), **columns})
            noted.append(parts)
            inputs += [x] if any(map(_is_custom, terms)) else []
            stay = sample.halved()
            if stay is not None:
                entries.keep(stay)
                noted, inputs = _thinned(noted, inputs, stay)
            tick()
    columns = dict(entries.items()) if entries is not None else {}
    check_rows(len(columns.get(_TARGET, ())), stacklevel=3)
    assert entries is not None
    mean, target = columns.pop(_MEAN), columns.pop(_TARGET)
    per_output = plan.has_outputs((0, *entries.shape))
    result = MeasuredTerms(sites, mean, target, terms, columns, features, entries.shape, per_output)
    return _with_learned(result, network, noted, inputs, plan, entries)


def _learns(term: Term) -> bool:
    """Return True if a term is measured after the reference rows, or the errors, were seen."""
    return term.needs_features or term.needs_gradients or term.needs_errors


def _thinned(noted: list[RowParts], inputs: list[Any], stay: Tensor) -> tuple[list[RowParts], list[Any]]:
    """What was noted, and inputs where these are noted too, of the rows that stay."""
    if not inputs:
        return [RowParts.joined(noted).at(stay)], []
    parts = stay.split([row_count(x) for x in inputs])
    some = [bool(at.any()) for at in parts]
    inputs = [
        take_rows(x, at.nonzero()[:, 0].tolist()) for x, at, any_ in zip(inputs, parts, some, strict=True) if any_
    ]
    return [one.at(at) for one, at, any_ in zip(noted, parts, some, strict=True) if any_], inputs


def _entries(mean: Tensor, terms: tuple[Term, ...], plan: Plan) -> Entries:
    """For outputs like these; all of their entries where a term learns from the errors of each."""
    most: dict[str, Any] = {"most": None} if any(term.needs_errors for term in terms) else {}
    return Entries(tuple(mean.shape[1:]), axis=2 if plan.has_outputs(mean.shape) else 1, **most)


def _is_custom(term: Term) -> bool:
    """Return True if a term is the user's and looks at features: it may look at the inputs beside them."""
    return _learns(term) and type(term) not in KINDS.values()


def usable_features(
    network: Network, x: Any, sites: Sites, readout: Readout, names: Sequence[str] | None = None
) -> Features | None:
    """The features that a row has alone as in its batch; None where there are none."""
    features = Features.all(sites) if names is None else Features.named(names, sites)
    try:
        if features is not None and features.are_loose(sites):
            _ = BatchContext(network, x, sites, readout, features).features
        return None if features is None else features.steady(network, x, sites)
    except LatedropError:
        return None


def _usable_terms(
    method: Terms, network: Network, x: Any, sites: Sites, features: Features | None, plan: Plan
) -> tuple[Term, ...]:
    """The terms that this model can have, ready to measure; of the default some may be left out."""
    wanting = [term.name for term in method.objects if term.needs_features]
    if features is None and wanting and method.chosen:
        raise ArgumentError(
            f"expected a site whose inputs have an axis for the examples and do not depend on the other rows of a "
            f"batch, which terms {wanting} look at; found none. Leave these terms out."
        )
    terms = [term for term in method.objects if features is not None or not term.needs_features]
    if not method.chosen and method.folds == "blocks":
        terms = [term for term in terms if not isinstance(term, ErrorForest)]  # neighbours would be in its bags
    rows = BatchContext(network, x, sites, plan.readout, features, gradients=any(t.needs_gradients for t in terms))
    found: list[Term] = []
    for term in terms:
        try:
            found.append(term.prepared(rows))
        except LatedropError as error:
            if method.chosen:
                raise
            if isinstance(term, ErrorForest) and "scikit-learn" in str(error):
                warn(f"{error} Until then the default goes without it.", LatedropWarning, stacklevel=4)
            _log.info("without %s: %s", term.name, error)
    return tuple(found)


def _with_learned(
    found: MeasuredTerms, network: Network, noted: list[RowParts], inputs: list[Any], plan: Plan, entries: Entries
) -> MeasuredTerms:
    """Terms that learn, after they saw the reference rows and the errors."""
    method = plan.method
    assert isinstance(method, Terms)
    terms = list(found.terms)
    guard = [term for term in terms if isinstance(term, (Leverage, GradientLeverage))]
    if not guard and found.features is not None:
        guard = [Leverage()]
        terms += guard
    reference = Reference(network, plan, found.sites, found.features, noted)
    learners = [term for term in terms if type(term).learned_from is not Term.learned_from]
    learned = reference.teach(learners)
    warn_of_training_rows(reference.share_seen, stacklevel=4)
    rows = reference.validation_rows(found.mean)
    rows.weights = plan.weights
    error, columns, correction = found.target - found.mean, dict(found.columns), None
    add_totals(rows, columns)
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
        if _learns(term) and not _is_custom(term) and term in found.terms:
            columns |= measured_columns([terms[i]], rows)
    terms = [term for term in terms if not isinstance(term, ErrorForest) or term.grown is not None]
    if inputs:
        index = torch.arange(len(found.mean)).split([row_count(x) for x in inputs])
        theirs = entries.like()
        for x, at in zip(inputs, index, strict=True):
            batch = BatchContext(network, x, found.sites, plan.readout, found.features, at)
            theirs.add(measured_columns(list(filter(_is_custom, terms)), batch))
        columns |= theirs.items()
    if method.mean == "corrected" and correction is None:
        raise ArgumentError(
            "expected terms with 'gradients' before 'forest' for mean='corrected', and a model that can have them, of "
            f"at most 4 outputs; found {[term.name for term in terms]}. Leave mean='corrected' out."
        )
    order = [name for term in terms for name in columns if term_of(name) == term.name]
    guards = [learned[term] for term in guard]
    leverage, usual = leverages(guards, rows) if guards else (None, None)
    sizes = {} if usual is None else {term.name: usual[:, i].mean(0) for i, term in enumerate(guards)}
    return replace(
        found,
        mean=found.mean if correction is None else found.target - error,
        correction=correction,
        terms=tuple(terms),
        columns={name: columns[name] for name in order},
        guard=tuple(term.name for term in guards),
        leverage=leverage,
        usual=usual,
        table=rows.table,
        sizes={**sizes, **reference.dropout},
        reference_rows=reference.count,
    )


def _corrected(
    forest: ErrorForest, terms: Sequence[Term], rows: BatchContext, columns: dict[str, Tensor], error: Tensor
) -> tuple[Correction | None, Tensor]:
    """The correction of the mean, None where there are no mask gradients, and what it adds to validation rows."""
    metric = next((term for term in terms if isinstance(term, GradientLeverage)), None)
    if metric is None:
        return None, torch.zeros_like(error)
    flat = error.double().reshape(len(error), -1)
    if not bool(flat.any(0).all()):
        refuse_no_errors()
    stacked = torch.stack([column.double().reshape(flat.shape) for column in columns.values()], -1)
    blocks = [block for term in terms for block in blocks_of(term, list(columns))]
    left = CrossValidation(weights=rows.weights)

    def fit(rest: Tensor) -> Callable[[Tensor], Tensor]:
        fitted = fit_terms(flat[rest], stacked[rest], blocks, weights=left.at(rest))
        return lambda out: fitted.variance(stacked[out])

    variance, _ = crossed(flat, fit, True, left)
    inputs, directions = forest.numbers(rows), metric.directions(rows.gradients)
    correction, added = fit_correction(inputs, directions, flat, variance, rows.weights)
    return correction, added.reshape(error.shape)


def leverages(terms: Sequence[Any], rows: BatchContext) -> tuple[Tensor, Tensor | None]:
    """Return the leverage of validation rows `(N, terms, K)`; of reference rows, too, where these are other rows."""
    samples = [term.sample for term in terms]
    values = [rows.values_of(term) for term in terms]
    return _stacked(values), None if None in samples else _stacked(samples)


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Return `(n, terms, K)` from `(n, K)`, `(n, 1)` or `(n,)` of each term."""
    flat = [part.double().cpu().reshape(len(part), -1) for part in values]
    outputs = max(part.shape[1] for part in flat)
    return torch.stack([part.expand(-1, outputs) for part in flat], 1)


class Reference:
    """The reference rows: what is usual. Without any, the validation rows stand in.

    Attributes:
        count: how many reference rows were read; 0 where the validation rows stood in.
        dropout: what the first-order variance of each site is on average over them, `(K,)` by the names of columns;
            empty where that was not measured.
    """

    def __init__(
        self, network: Network, plan: Plan, sites: Sites, features: Features | None, noted: Sequence[RowParts]
    ) -> None:
        """`noted` are those of the validation rows, in batches."""
        self.count = 0
        self.dropout: dict[str, Tensor] = {}
        self._network, self._plan, self._sites, self._features, self._noted = network, plan, sites, features, noted
        self._all = RowParts.joined(noted)
        self._marks = feature_marks(self._all.features) if self._all.features is not None else np.zeros(0)
        self._seen = np.zeros(len(self._marks), dtype=bool)

    @property
    def share_seen(self) -> float:
        """The share of the validation rows that are among the reference rows."""
        return float(self._seen.mean()) if len(self._seen) else 0.0

    def teach(self, terms: Sequence[Term]) -> dict[Term, Term]:
        """Show all reference rows to each term, its features or mask gradients; return what each has become."""
        if not terms:
            return {}
        own = self._plan.reference is None
        shown = [self._all] if own else self._read(any(term.needs_gradients for term in terms))
        parts = [("gradients" if term.needs_gradients else "features", term) for term in terms]
        return {term: term.learned_from([getattr(one, name) for one in shown], own) for name, term in parts}

    def validation_rows(self, mean: Tensor | None = None) -> BatchContext:
        """Return all validation rows as one batch, of which all that was noted, and perhaps the mean, is known."""
        rows = len(mean) if mean is not None else len(self._all.features)  # type: ignore[arg-type]
        index = torch.arange(rows)
        found = BatchContext(self._network, None, self._sites, self._plan.readout, self._features, index)
        found.remember(self._all.features, mean, self._all.gradients, self._all.table)
        return found

    def _read(self, gradients: bool) -> list[RowParts]:
        """What the reference rows have in the place of what the validation rows have; of very many some are kept."""
        self.count, known = 0, self._all
        shapes = [None if part is None else part.shape[1:] for part in known[:2]]
        most = min(MOST_ROWS, max(1000, _MOST_NUMBERS // max(1, known.numbers)))
        sample, found, total, run = RowSample(most), [], None, 0
        for x in _reference_inputs(self._plan, self._network.model):
            x = as_items(x, None, self._sites)
            chosen = sample.add(row_count(x))
            together = not gradients or rows_are_nodes(x)  # all run, and some are chosen afterwards
            features = self._features is not None
            try:
                rows = BatchContext(
                    self._network, x, self._sites, self._plan.readout, self._features, gradients=gradients
                )
                if chosen is not None and not together:
                    self._mark(rows.features if features else None)
                    part = take_rows(x, chosen)
                    rows = BatchContext(
                        self._network, part, self._sites, self._plan.readout, self._features, gradients=gradients
                    )
                if row_count(rows.x):
                    parts = RowParts.of(rows, features=features, gradients=gradients)
                    if [None if part is None else part.shape[1:] for part in parts[:2]] != shapes:
                        raise ValueError(f"numbers of other shapes than {shapes}")
                    self._mark(parts.features)
                    found.append(parts.at(chosen) if together and chosen is not None else parts)
                    if gradients:
                        sums = rows.linear.variance_by_site.double().sum(0).cpu()
                        total, run = sums if total is None else total + sums, run + row_count(rows.x)
            except (LatedropError, RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
                if out_of_memory(error):
                    raise
                raise DataError(
                    f"expected reference rows that the model takes; it raised {type(error).__name__}: {error}. "
                    "Pass the inputs of training rows in the form of the validation rows, or batches of them."
                ) from error
            self.count += row_count(x)
            stay = sample.halved()
            found = found if stay is None else [RowParts.joined(found).at(stay)]
        if total is not None:
            named = zip(self._sites, (total / run).unbind(1), strict=True)
            self.dropout = {f"{Dropout.name}:{site.name}": size for site, size in named}
        return found

    def _mark(self, features: Tensor | None) -> None:
        if features is not None:
            self._seen[np.isin(self._marks, feature_marks(features.cpu()))] = True


def _reference_inputs(plan: Plan, model: nn.Module) -> Iterator[Any]:
    """Reference inputs in batches: rows, or an iterable of batches whose targets, if any, are left out."""
    reference, collate = plan.reference, plan.batches.collate
    arrays = isinstance(reference, (Tensor, dict, tuple)) or hasattr(reference, "__array__") or is_table(reference)
    listed = hasattr(reference, "__len__") and hasattr(reference, "__getitem__")
    if listed if collate is not None else arrays:
        rows = in_order(reference if collate is not None else inputs_of(reference, model), plan.columns)
        yield from row_batches(place(as_items(rows, collate), model), plan.batches.size)
        return
    try:
        batches = dataset_batches(reference, plan.batches.size) if is_dataset(reference) else iter(reference)
    except TypeError as error:
        raise DataError(
            f"expected reference rows as inputs, or an iterable of batches of them; found {type(reference).__name__}."
        ) from error
    for batch in batches:
        inputs = in_order(inputs_of(batch, model, plan.batches.unpack, collate), plan.columns)
        yield place(as_items(inputs, collate), model)
