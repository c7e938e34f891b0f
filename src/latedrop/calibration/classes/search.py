"""The calibration of a classifier: logits, leverage and spread of the validation rows, then a fit.

The validation data are read once. Logits of draws are kept for all rates, as every temperature is tried on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.calibration.classes.fit import Chosen, Measured, Scaling, chosen, losses
from latedrop.calibration.classes.labels import as_labels, as_logits, check_labels, check_logits
from latedrop.calibration.classes.pixels import Pixels, as_logit_maps
from latedrop.calibration.classes.record import ClassCalibration, ClassVerdict
from latedrop.calibration.classes.softmax import read_classes
from latedrop.calibration.seen import marks_of, sketch
from latedrop.calibration.setup import Setup
from latedrop.calibration.term_search import reference_features
from latedrop.calibration.weights import fingerprint
from latedrop.data.rows import take_rows
from latedrop.dropout.first_order import differences
from latedrop.dropout.moments import Sampling
from latedrop.dropout.sampling import own_output, sample_rates
from latedrop.errors import ArgumentError, DataError, LatedropError, LatedropWarning
from latedrop.metrics.classes import accuracy, ece
from latedrop.network.calling import Readout, part_of
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.terms import Leverage, Rows
from latedrop.terms.features import Features

__all__ = ["RATES", "classes_of", "search_classes", "spread_of"]

RATES = (0.01, 0.05, 0.1, 0.2, 0.3)
_DRAWS = 30
_INSIDE = 0.9
_MOST_NUMBERS = 2**28  # of logits of draws that are kept
_MOST_APART = 1024  # numbers per row in the spreads of single sites; beyond, only their sum is kept

Batches = Iterator[tuple[Any, Tensor, Sites, Callable[[], Any]]]


_FEWEST = 10
"""Validation rows of a class below which it has no weight and no bias of its own."""


def classes_of(readout: Readout) -> Callable[[Any], Tensor]:
    """A readout of the logits whose differences count."""
    return lambda output: read_classes(as_logits(part_of(output, readout)))


def search_classes(
    model: nn.Module,
    stream: Batches,
    setup: Setup,
    names: tuple[str, ...],
    ignore_index: int | None = None,
    scaling: Scaling = "temperature",
) -> ClassCalibration:
    """Measure the validation rows, or pixels of the validation images, and record what fits them best."""
    network = Network(model)
    found = _measured(network, stream, setup, ignore_index)
    check_labels(found.labels, found.classes)
    check_logits(found.logits, found.labels, binary=found.binary)
    leverage, values, count = _leverage(found, network, setup)
    limit, strange = 1.0, None
    if values is not None:
        limit = float(torch.quantile(values.double(), _INSIDE, interpolation="higher"))
        strange = values.double() / limit
        strange = strange if found.image is None else strange[found.image]
    rows = Measured(found.logits, found.labels, strange, found.spread, found.image)
    if found.image is not None and scaling != "temperature":
        raise ArgumentError(f"expected scaling='temperature' for maps of classes; found {scaling!r}.")
    picked = chosen(rows, found.drawn, guard=setup.guard, scaling=_affordable(scaling, found.labels, found.classes))
    readout = setup.readout
    return ClassCalibration(
        classes=found.classes,
        names=names,
        binary=found.binary,
        fit=picked.fit,
        alone=picked.temperature,
        rate=picked.rate,
        draws=setup.draws if picked.rate is not None else 0,
        seed=setup.seed,
        sites=found.sites,
        features=found.features if leverage is not None else None,
        leverage=leverage,
        limit=limit,
        reference_rows=count,
        rows=len(found.labels) if found.image is None else len(found.image.unique()),
        choice=picked.name,
        candidates=picked.candidates,
        verdict=_verdict(picked, rows),
        readout=None if callable(readout) else readout,
        custom_readout=getattr(readout, "__qualname__", type(readout).__name__) if callable(readout) else None,
        fingerprint=fingerprint(model),
        columns=None if setup.columns is None else {name: tuple(found) for name, found in setup.columns.items()},
        maps=found.image is not None,
        ignore_index=ignore_index,
        seen="" if found.image is not None else sketch(marks_of(found.logits, found.labels)),
    )


def _affordable(scaling: Scaling, labels: Tensor, classes: int) -> Scaling:
    """What can be fitted for each class: nothing where one has few rows, or it would be learned never to occur."""
    counts = torch.bincount(labels, minlength=classes)
    if scaling == "temperature" or int(counts.min()) >= _FEWEST:
        return scaling
    warn(
        f"expected {_FEWEST} validation rows or more of every class with scaling={scaling!r}; found "
        f"{int(counts.min())} of class {int(counts.argmin())}. One temperature is used for all classes.",
        LatedropWarning,
        stacklevel=5,
    )
    return "temperature"


def _verdict(picked: Chosen, rows: Measured) -> ClassVerdict:
    labels, p = rows.labels, picked.held.exp()
    gain = losses(picked.alone, labels) - losses(picked.held, labels)
    return ClassVerdict(
        rows=len(labels),
        fitted="cross-validation",
        gain=float(gain.mean()),
        gain_error=rows.error_of_mean(gain),
        nll=float(losses(picked.held, labels).mean()),
        accuracy=float(accuracy(p, labels)),
        ece=float(ece(p, labels, mass=True)),
        unit="rows" if rows.image is None else "pixels",
    )


@dataclass
class _Found:
    sites: Sites
    features: Features | None
    logits: Tensor
    labels: Tensor
    spread: Tensor | None
    drawn: dict[float, Tensor]
    kept: list[Tensor]
    binary: bool
    image: Tensor | None = None

    @property
    def classes(self) -> int:
        return self.logits.shape[1]


def _measured(network: Network, stream: Batches, setup: Setup, ignore_index: int | None) -> _Found:
    features: Features | None = None
    dropout, binary, sites = False, False, Sites()
    pixels: Pixels | None = None
    logits: list[Tensor] = []
    labels, spreads, kept = [], [], []
    drawn: dict[float, list[Tensor]] = {}
    first = True
    with closing(stream) as rows:  # type: ignore[type-var]
        for x, y, sites, tick in rows:
            output = own_output(network, x, setup.readout)
            if first:
                first, binary = False, output.dim() == 1 or output.shape[1] == 1
                pixels = _pixels(output, y, setup, ignore_index)
                features = _features(network, x, sites, setup)
                dropout = pixels is None and "dropout" in _names(setup) and _differentiable(network, x, sites, setup)
            if features is not None:
                kept.append(features.of(network, x, sites).cpu())
            if pixels is not None:
                _add_pixels(pixels, output, y, network, x, sites, setup)
                tick()
                continue
            z = as_logits(output)
            logits.append(z.cpu())
            labels.append(as_labels(y, z.shape[1]).cpu())
            if dropout:
                spreads.append(spread_of(network, x, sites, setup.readout).cpu())
            if setup.method == "sample":
                _draw(drawn, network, x, sites, setup)
            tick()
    if first:
        raise DataError("expected at least 2 validation rows, and better a thousand; found 0.")
    if pixels is not None:
        pixels.check()
        columns = pixels.column("logits"), pixels.column("labels")
        return _Found(sites, features, *columns, None, pixels.drawn(), kept, binary, pixels.images)
    together = {rate: torch.cat(parts, 1) for rate, parts in drawn.items()}
    spread = torch.cat(spreads) if spreads and all(bool(part.isfinite().all()) for part in spreads) else None
    return _Found(sites, features, torch.cat(logits), torch.cat(labels), spread, together, kept, binary)


def _pixels(output: Tensor, labels: Tensor, setup: Setup, ignore_index: int | None) -> Pixels | None:
    """What collects them, where the model and the labels give maps."""
    if output.dim() < 3 or labels.dim() == 1:
        if ignore_index is not None:
            raise ArgumentError(
                f"expected ignore_index with maps of logits (N, K, H, W) alone; found outputs of shape "
                f"{tuple(output.shape)}. Leave out rows that have no label."
            )
        return None
    if setup.terms_given and "dropout" in _names(setup):
        raise ArgumentError(
            "expected terms=['leverage'] for maps of classes; found 'dropout', which to first order would take a "
            "backward pass for every pixel. Pass method='sample' for dropout by draws."
        )
    return Pixels(ignore_index)


def _add_pixels(
    pixels: Pixels, output: Tensor, y: Tensor, network: Network, x: Any, sites: Sites, setup: Setup
) -> None:
    """Pixels of a batch of images; of draws, too, image by image."""
    places = pixels.add(output, y)
    rates = _rates(setup) if setup.method == "sample" else []
    for number, (row, place) in enumerate(places.items(), -len(places)):
        for rate, logits in zip(rates, _pixel_draws(network, x, row, place, rates, sites, setup), strict=True):
            pixels.add_drawn(number, rate, logits)
    pixels.thin()


def _pixel_draws(
    network: Network, x: Any, row: int, place: Tensor, rates: list[float], sites: Sites, setup: Setup
) -> Iterator[Tensor]:
    """`(T, pixels, K)` for each rate; of every draw only these pixels are kept."""

    def taken(output: Any) -> Tensor:
        maps = as_logit_maps(part_of(output, setup.readout)).flatten(2)
        return maps[:, :, place.to(maps.device)]

    options = Sampling(setup.draws, setup.seed, taken, setup.chunk, setup.shared, True, setup.engine)
    if rates:
        for moments in sample_rates(network, take_rows(x, slice(row, row + 1)), rates, sites, options):
            assert moments.outputs is not None
            yield torch.stack([part[0].T for part in moments.outputs]).cpu()


def spread_of(network: nn.Module | Network, x: Any, sites: Sites, readout: Readout) -> Tensor:
    """`(N, sites, k, k)`, or `(N, 1, k, k)` for all sites together where that would be much."""
    found = differences(network, x, sites, classes_of(readout))
    return found if found[0].numel() <= _MOST_APART else found.sum(1, keepdim=True)


def _names(setup: Setup) -> set[str]:
    names = {term.name for term in setup.terms}
    unknown = names - {"dropout", "leverage"}
    if unknown:
        raise ArgumentError(f"expected terms 'dropout' and 'leverage' for classes; found {sorted(unknown)}.")
    return names


def _features(network: Network, x: Any, sites: Sites, setup: Setup) -> Features | None:
    found = Features.all(sites) if "leverage" in _names(setup) else None
    try:
        return None if found is None else found.steady(network, x, sites)
    except LatedropError:
        return None


def _differentiable(network: Network, x: Any, sites: Sites, setup: Setup) -> bool:
    if setup.method == "sample" or any(site.coupled for site in sites):
        return False
    try:
        differences(network, take_rows(x, slice(1)), sites, classes_of(setup.readout))
    except LatedropError:
        if setup.terms_given:
            raise
        return False
    return True


def _draw(drawn: dict[float, list[Tensor]], network: Network, x: Any, sites: Sites, setup: Setup) -> None:
    rates = _rates(setup)
    options = Sampling(setup.draws, setup.seed, setup.readout, setup.chunk, setup.shared, True, setup.engine)
    for rate, moments in zip(rates, sample_rates(network, x, rates, sites, options), strict=True):
        assert moments.outputs is not None
        drawn.setdefault(rate, []).append(torch.stack([as_logits(part) for part in moments.outputs]).cpu())
    if sum(part.numel() for parts in drawn.values() for part in parts) > _MOST_NUMBERS:
        raise ArgumentError(
            f"expected draws, rates, rows and classes of which at most {_MOST_NUMBERS:,} logits come; found more. Pass "
            "fewer rates=, draws= or validation rows."
        )


def _rates(setup: Setup) -> list[float]:
    rates = [rate for rate in setup.rates if isinstance(rate, float)]
    if len(rates) < len(setup.rates):
        raise ArgumentError("expected one rate for all sites for classes; found rates by site.")
    return rates


def _leverage(found: _Found, network: Network, setup: Setup) -> tuple[Leverage | None, Tensor | None, int]:
    """What tells strange rows, its values of the validation rows, and how many reference rows there were."""
    if found.features is None:
        return None, None, 0
    own, count = setup.reference is None, 0

    def reference() -> Iterator[Tensor]:
        nonlocal count
        width = found.kept[0].shape[1]
        for part in found.kept if own else reference_features(network, setup, found.sites, found.features, width):
            count += 0 if own else len(part)
            yield part

    learned = Leverage().learned_from(reference(), own)
    features = torch.cat(found.kept)
    rows = Rows(network, None, found.sites, setup.readout, found.features, torch.arange(len(features)))
    rows.remember(features)
    return learned, learned.values(rows), count
