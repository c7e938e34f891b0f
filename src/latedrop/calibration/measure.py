"""The validation rows, measured: what a network gives for them, and what may explain its errors.

The data are read once. Terms that need no reference are measured on the way; features are kept, and the terms that
learn from reference rows are measured afterwards. Of very many rows some are kept (`RowSample`); no others are run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.calibration.collecting import MOST_ROWS, Entries, RowSample
from latedrop.calibration.fitted_terms import KINDS, measured_columns, term_of
from latedrop.calibration.methods import PAPER_RATES, FirstOrder, Plan, Sampling, Terms
from latedrop.calibration.seen import feature_marks, warn_of_training_rows
from latedrop.calibration.targets import as_output, check_rows, joined
from latedrop.data.arrays import is_table, place
from latedrop.data.batches import first_rows, row_batches, row_total
from latedrop.data.datasets import dataset_batches, inputs_of, is_dataset
from latedrop.data.items import as_items
from latedrop.data.names import in_order
from latedrop.data.rows import row_count, take_rows, tensors
from latedrop.dropout.first_order import linearize
from latedrop.dropout.moments import Moments, out_of_memory
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import own_output, sample_rates
from latedrop.errors import ArgumentError, DataError, LatedropError, SiteError
from latedrop.network.find_sites import find_sites
from latedrop.network.network import Network
from latedrop.network.sites import Rate, Sites
from latedrop.progress import progress
from latedrop.propagation.propagate import propagate
from latedrop.terminal import listed
from latedrop.terms import BatchContext, Leverage, Term
from latedrop.terms.features import Features

__all__ = [
    "MeasuredRates",
    "MeasuredTerms",
    "Reference",
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
_MEAN, _TARGET = "(mean)", "(target)"  # beside columns, whose names are those of terms


def validation_batches(
    model: nn.Module, data: Any, plan: Plan, per_batch: int = 1
) -> Generator[tuple[Any, Tensor, Sites, Callable[[], Any]], None, None]:
    """Inputs, targets in the model's unit, sites, found on the first inputs, and what to call after every step."""
    sites = plan.sites if isinstance(plan.sites, Sites) else None
    with progress("calibrating", row_total(data), show=plan.progress) as done:
        for x, y in plan.batches.read(data, model):
            if sites is None:
                # Of a pair more rows than the first batch are there, should it not take every branch.
                pair = plan.batches.is_one_pair(data)
                examples = first_rows(data, model, _EXAMPLES, plan.batches.collate) if pair else x
                sites = find_sites(model, examples, select=plan.sites)  # type: ignore[arg-type]
                _log.info("sites found: %s", listed([site.name for site in sites], _SHOWN))
            y = y if plan.target is None else plan.target.forward(y)
            yield x, y, sites, partial(done, len(y) / per_batch)


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
    target = joined(targets, stacklevel=4)
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
    guard: Leverage | None = None
    leverage: Tensor | None = None
    reference_rows: int = 0


def measure_terms(network: Network, data: Any, plan: Plan) -> MeasuredTerms:
    """Measure the terms on all validation rows."""
    method = plan.method
    assert isinstance(method, Terms)
    terms: tuple[Term, ...] = ()
    features: Features | None = None
    entries: Entries | None = None
    sites = Sites()
    noted: list[Tensor] = []
    inputs: list[Any] = []
    sample = RowSample(MOST_ROWS if plan.row_weights is None else None)
    with closing(validation_batches(network.model, data, plan)) as stream:
        for x, y, sites, tick in stream:
            chosen = sample.add(len(y))
            if chosen is not None:
                x, y = take_rows(x, chosen), y[chosen]
            if not len(y):
                tick()
                continue
            if entries is None:
                features = usable_features(network, x, sites, method.features)
                terms, features = _usable_terms(method, network, x, sites, features, plan)
            rows = BatchContext(network, x, sites, plan.readout, features)
            columns = measured_columns([term for term in terms if not term.needs_features], rows)
            entries = entries or _entries(rows.mean, terms, plan)
            entries.add({_MEAN: rows.mean, _TARGET: as_output(rows.mean, y), **columns})
            if features is not None:
                noted.append(rows.features.cpu())
                inputs += [x] if any(map(_is_custom, terms)) else []
            stay = sample.halved()
            if stay is not None:
                entries.keep(stay)
                noted, inputs = _thinned(noted, inputs, stay)
            tick()
    columns = dict(entries.items()) if entries is not None else {}
    check_rows(len(columns.get(_TARGET, ())), stacklevel=4)
    assert entries is not None
    mean, target = columns.pop(_MEAN), columns.pop(_TARGET)
    per_output = plan.has_outputs((0, *entries.shape))
    result = MeasuredTerms(sites, mean, target, terms, columns, features, entries.shape, per_output)
    return result if features is None else _with_learned(result, network, noted, inputs, plan, entries)


def _thinned(noted: list[Tensor], inputs: list[Any], stay: Tensor) -> tuple[list[Tensor], list[Any]]:
    """Features, and inputs where these are noted too, of the rows that stay."""
    if not inputs:
        return [torch.cat(noted)[stay]] if noted else [], []
    parts = stay.split([len(part) for part in noted])
    both = zip(inputs, parts, strict=True)
    inputs = [take_rows(x, part.nonzero()[:, 0].tolist()) for x, part in both if bool(part.any())]
    return [part[at] for part, at in zip(noted, parts, strict=True) if bool(at.any())], inputs


def _entries(mean: Tensor, terms: tuple[Term, ...], plan: Plan) -> Entries:
    """For outputs like these; all of their entries where a term learns from the errors of each."""
    most: dict[str, Any] = {"most": None} if any(term.needs_errors for term in terms) else {}
    return Entries(tuple(mean.shape[1:]), axis=2 if plan.has_outputs(mean.shape) else 1, **most)


def _is_custom(term: Term) -> bool:
    """Return True if a term is the user's and looks at features: it may look at the inputs beside them."""
    return term.needs_features and type(term) not in KINDS.values()


def usable_features(network: Network, x: Any, sites: Sites, names: Sequence[str] | None = None) -> Features | None:
    """The features that a row has alone as in its batch; None where there are none."""
    features = Features.all(sites) if names is None else Features.named(names, sites)
    try:
        return None if features is None else features.steady(network, x, sites)
    except LatedropError:
        return None


def _usable_terms(
    method: Terms, network: Network, x: Any, sites: Sites, features: Features | None, plan: Plan
) -> tuple[tuple[Term, ...], Features | None]:
    """The terms that this model can have, ready to measure."""
    terms = method.objects
    wanting = [term.name for term in terms if term.needs_features]
    if features is None and wanting:
        if method.chosen:
            raise ArgumentError(
                f"expected a site whose inputs have an axis for the examples and do not depend on the other rows of a "
                f"batch, which terms {wanting} look at; found none. Leave these terms out."
            )
        terms = tuple(term for term in terms if not term.needs_features)
    rows = BatchContext(network, x, sites, plan.readout, features)
    return tuple(term.prepared(rows) for term in terms), features


def _with_learned(
    found: MeasuredTerms, network: Network, noted: list[Tensor], inputs: list[Any], plan: Plan, entries: Entries
) -> MeasuredTerms:
    """Terms that look at features, after they saw those of the reference rows."""
    reference = Reference(network, plan, found.sites, found.features, noted)
    learners = [term for term in found.terms if type(term).learned_from is not Term.learned_from]
    guard = next((term for term in learners if isinstance(term, Leverage)), Leverage())
    learners += [guard] if guard not in learners else []
    learned = reference.teach(learners)
    warn_of_training_rows(reference.share_seen, stacklevel=5)
    rows = reference.validation_rows(found.mean)
    error = found.target - found.mean
    terms = [learned.get(term, term).learned_from_errors(rows, error) for term in found.terms]
    measure = learned[guard]
    assert isinstance(measure, Leverage)
    ours = [term for term in terms if term.needs_features and not _is_custom(term)]
    columns = {**found.columns, **measured_columns(ours, rows)}
    if inputs:
        places = torch.arange(len(rows.features)).split([len(part) for part in noted])
        theirs = entries.like()
        for x, at in zip(inputs, places, strict=True):
            batch = BatchContext(network, x, found.sites, plan.readout, found.features, at)
            theirs.add(measured_columns(list(filter(_is_custom, terms)), batch))
        columns |= theirs.items()
    order = [name for term in terms for name in columns if term_of(name) == term.name]
    return replace(
        found,
        terms=tuple(terms),
        columns={name: columns[name] for name in order},
        guard=measure,
        leverage=measure.values(rows),
        reference_rows=reference.count,
    )


class Reference:
    """The reference rows: what is usual. Without any, the validation rows stand in.

    Attributes:
        count: how many reference rows were read; 0 where the validation rows stood in.
    """

    def __init__(
        self, network: Network, plan: Plan, sites: Sites, features: Features | None, noted: list[Tensor]
    ) -> None:
        """`noted` are the features of the validation rows, in batches."""
        self.count = 0
        self._network, self._plan, self._sites, self._features, self._noted = network, plan, sites, features, noted
        self._marks = feature_marks(torch.cat(noted))
        self._seen = np.zeros(len(self._marks), dtype=bool)

    @property
    def share_seen(self) -> float:
        """The share of the validation rows that are among the reference rows."""
        return float(self._seen.mean())

    def teach(self, terms: Sequence[Term]) -> dict[Term, Term]:
        """Show the features of all reference rows to each term; return what each has become."""
        own = self._plan.reference is None
        # Several look at the same rows, which can perhaps be read but once.
        shown = self._noted if own else self._read() if len(terms) == 1 else _gathered(self._read())
        return {term: term.learned_from(shown, own) for term in terms}

    def validation_rows(self, mean: Tensor | None = None) -> BatchContext:
        """Return all validation rows as one batch, of which the features, and perhaps the mean, are known."""
        features = torch.cat(self._noted)
        index = torch.arange(len(features))
        rows = BatchContext(self._network, None, self._sites, self._plan.readout, self._features, index)
        rows.remember(features, mean)
        return rows

    def _read(self) -> Iterator[Tensor]:
        """Features of the reference rows in batches, as many for each as the validation rows have."""
        self.count, width = 0, self._noted[0].shape[1]
        for x in _reference_inputs(self._plan, self._network.model):
            try:
                features = BatchContext(self._network, x, self._sites, self._plan.readout, self._features).features
                features = features.cpu()
                if features.shape[1] != width:
                    raise ValueError(f"{features.shape[1]} features in place of {width}")
            except (SiteError, RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
                if out_of_memory(error):
                    raise
                raise DataError(
                    f"expected reference rows that the model takes; it raised {type(error).__name__}: {error}. "
                    "Pass the inputs of training rows in the form of the validation rows, or batches of them."
                ) from error
            self.count += len(features)
            self._seen[np.isin(self._marks, feature_marks(features))] = True
            yield features


def _gathered(parts: Iterator[Tensor]) -> list[Tensor]:
    """All rows, or as many as memory should hold."""
    sample, found = RowSample(), []
    for part in parts:
        chosen = sample.add(len(part))
        found.append(part if chosen is None else part[chosen])
        stay = sample.halved()
        found = found if stay is None else [torch.cat(found)[stay]]
    return found


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
