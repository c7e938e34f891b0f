"""The validation rows of a classifier, measured: logits and labels, novelty, and what dropout does to the logits.

The data are read once. Novelty comes from leverage of features and, where the model can be differentiated, of the mask
gradients of the largest logit: one backward pass, whatever the number of classes. Logits of draws are kept for all
rates, as every temperature is tried on them. Of maps some pixels of every image are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.calibration.fit_classes import Measured
from latedrop.calibration.guard import Guard
from latedrop.calibration.labels import (
    Pixels,
    as_labels,
    as_logit_maps,
    as_logits,
    check_labels,
    check_logits,
    check_row_count,
)
from latedrop.calibration.measure import (
    Reference,
    RowParts,
    draw_options,
    leverages,
    usable_features,
    validation_batches,
)
from latedrop.calibration.methods import Classification, Plan, Sampling, Terms
from latedrop.calibration.softmax import read_classes
from latedrop.data.batches import row_total
from latedrop.data.rows import take_rows
from latedrop.dropout.first_order import differences
from latedrop.dropout.sampling import own_output, sample_rates
from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.network.calling import Readout, part_of
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import Features

__all__ = ["MeasuredClasses", "classes_of", "largest_logit", "measure_classes", "spread_of"]

RATES = (0.01, 0.05, 0.1, 0.2, 0.3)
_MOST_NUMBERS = 2**28  # of logits of draws that are kept
_MOST_APART = 1024  # numbers per row in the spreads of single sites; beyond, only their sum is kept


@dataclass(frozen=True)
class MeasuredClasses(Measured):
    """The validation rows, or pixels of the validation images.

    Attributes:
        drawn: logits of draws `(T, N, K)` by rate.
        sites: where dropout goes.
        features: which the leverage looks at; None where there are none.
        terms, guard: what tells novel rows, after they learned, and their limits.
        reference_rows: how many there were; 0 where the validation rows stood in.
        binary: whether the model has one logit for two classes.
    """

    drawn: dict[float, Tensor] = field(default_factory=dict)
    sites: Sites = field(default_factory=Sites)
    features: Features | None = None
    terms: tuple[GradientLeverage | Leverage, ...] = ()
    guard: Guard | None = None
    reference_rows: int = 0
    binary: bool = False

    @property
    def rows(self) -> int:
        """How many validation rows, or images, there are."""
        return len(self.labels) if self.image is None else len(self.image.unique())


def measure_classes(network: Network, data: Any, plan: Plan) -> MeasuredClasses:
    """Measure all validation rows, or pixels of the validation images."""
    method, task, total = plan.method, plan.task, row_total(data)
    assert isinstance(task, Classification)
    names = _names(method)
    features: Features | None = None
    first, dropout, gradients, binary, sites = True, False, False, False, Sites()
    pixels: Pixels | None = None
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    spreads: list[Tensor] = []
    noted: list[RowParts] = []
    drawn: dict[float, list[Tensor]] = {}
    with closing(validation_batches(network.model, data, plan)) as stream:
        for x, y, sites, tick in stream:
            if first:
                first, output = False, own_output(network, x, plan.readout)
                binary = output.dim() == 1 or output.shape[1] == 1
                pixels = _pixels(output, y, plan, task)
                if pixels is None:
                    check_row_count(total, 2 if binary else output.shape[1])
                features = usable_features(network, x, sites, plan.readout)
                apart = pixels is None and not any(site.coupled for site in sites)
                dropout = apart and "dropout" in names
                gradients = apart and features is not None and "gradients" in names
                gradients = gradients and _has_gradients(network, x, sites, plan)
            rows = BatchContext(network, x, sites, plan.readout, features, of=largest_logit)
            if features is not None:
                noted.append(RowParts.of(rows, features=True, gradients=gradients))
            output = rows.mean
            if pixels is not None:
                _add_pixels(pixels, output, y, network, x, sites, plan)
                tick()
                continue
            z = as_logits(output)
            logits.append(z.cpu())
            labels.append(as_labels(y, z.shape[1]).cpu())
            if dropout:
                spreads.append(spread_of(network, x, sites, plan.readout).cpu())
            if isinstance(method, Sampling):
                _draw(drawn, network, x, sites, plan)
            tick()
    if first:
        raise DataError("expected at least 2 validation rows, and better a thousand; found 0.")
    found: dict[str, Any] = {"sites": sites, "features": features, "binary": binary}
    if pixels is not None:
        pixels.check()
        found |= {"logits": pixels.column("logits"), "labels": pixels.column("labels")}
        found |= {"drawn": pixels.drawn(), "image": pixels.images}
    else:
        finite = spreads and all(bool(part.isfinite().all()) for part in spreads)
        found |= {"logits": torch.cat(logits), "labels": torch.cat(labels)}
        found |= {"drawn": {rate: torch.cat(parts, 1) for rate, parts in drawn.items()}}
        found |= {"spread": torch.cat(spreads) if finite else None}
    check_labels(found["labels"], found["logits"].shape[1])
    check_logits(found["logits"], found["labels"], binary=binary)
    if features is not None:
        if gradients and not all(bool(part.gradients.isfinite().all()) for part in noted):  # type: ignore[union-attr]
            gradients, noted = False, [RowParts(part.features) for part in noted]
        kinds: list[GradientLeverage | Leverage] = [GradientLeverage()] if gradients else []
        if "leverage" in names or not gradients:
            kinds.append(Leverage())
        scalar = replace(plan, readout=lambda output: largest_logit(part_of(output, plan.readout)))
        reference = Reference(network, scalar if gradients else plan, sites, features, noted)
        rows = reference.validation_rows(found["logits"] if gradients else None)
        terms: list[Any] = list(reference.teach(kinds).values())
        leverage, usual = leverages(terms, rows)
        guard = Guard.of([term.name for term in terms], leverage, usual)
        novelty = guard.ratio(leverage.unbind(1))
        found |= {"terms": tuple(terms), "guard": guard, "reference_rows": reference.count}
        found |= {"novelty": novelty if pixels is None else novelty[found["image"]]}
    return MeasuredClasses(**found)


def largest_logit(output: Tensor) -> Tensor:
    """Return `(N, 1)`, the logit of the likeliest class; of a binary classifier with one logit, its size."""
    flat = output.reshape(len(output), -1)
    return flat.abs() if flat.shape[1] == 1 else flat.amax(1, keepdim=True)


def classes_of(readout: Readout) -> Callable[[Any], Tensor]:
    """A readout of the logits whose differences count."""
    return lambda output: read_classes(as_logits(part_of(output, readout)))


def _pixels(output: Tensor, labels: Tensor, plan: Plan, task: Classification) -> Pixels | None:
    """What collects them, where the model and the labels give maps."""
    if output.dim() < 3 or labels.dim() == 1:
        if task.ignore_index is not None:
            raise ArgumentError(
                f"expected ignore_index with maps of logits (N, K, H, W) alone; found outputs of shape "
                f"{tuple(output.shape)}. Leave out rows that have no label."
            )
        return None
    named = {term.name for term in plan.method.objects} if isinstance(plan.method, Terms) else set()
    costly = sorted(named & {"dropout", "gradients"})
    if isinstance(plan.method, Terms) and plan.method.chosen and costly:
        raise ArgumentError(
            f"expected Terms(['leverage']) for maps of classes; found {costly}, which to first order would take a "
            "backward pass for every pixel. Pass method='sample' for dropout by draws."
        )
    return Pixels(task.ignore_index)


def _add_pixels(pixels: Pixels, output: Tensor, y: Tensor, network: Network, x: Any, sites: Sites, plan: Plan) -> None:
    """Pixels of a batch of images; of draws, too, image by image."""
    places = pixels.add(output, y)
    rates = _rates(plan.method) if isinstance(plan.method, Sampling) else []
    for number, (row, place) in enumerate(places.items(), -len(places)):
        for rate, logits in zip(rates, _pixel_draws(network, x, row, place, rates, sites, plan), strict=True):
            pixels.add_drawn(number, rate, logits)
    pixels.thin()


def _pixel_draws(
    network: Network, x: Any, row: int, place: Tensor, rates: list[float], sites: Sites, plan: Plan
) -> Iterator[Tensor]:
    """`(T, pixels, K)` for each rate; of every draw only these pixels are kept."""

    def taken(output: Any) -> Tensor:
        maps = as_logit_maps(part_of(output, plan.readout)).flatten(2)
        return maps[:, :, place.to(maps.device)]

    options = replace(draw_options(plan), readout=taken, keep=True)
    if rates:
        for moments in sample_rates(network, take_rows(x, slice(row, row + 1)), rates, sites, options):
            assert moments.outputs is not None
            yield torch.stack([part[0].T for part in moments.outputs]).cpu()


def spread_of(network: nn.Module | Network, x: Any, sites: Sites, readout: Readout) -> Tensor:
    """`(N, sites, k, k)`, or `(N, 1, k, k)` for all sites together where that would be much."""
    found = differences(network, x, sites, classes_of(readout))
    return found if found[0].numel() <= _MOST_APART else found.sum(1, keepdim=True)


def _names(method: Any) -> set[str]:
    """Return the names of the terms; both kinds of leverage tell novel rows unless one of them was named."""
    guard = {"leverage", "gradients"}
    names = {term.name for term in method.objects} if isinstance(method, Terms) and method.chosen else guard
    unknown = names - guard - {"dropout"}
    if unknown:
        raise ArgumentError(
            f"expected terms 'dropout', 'leverage' and 'gradients' for classes; found {sorted(unknown)}."
        )
    return names if names & guard else names | guard


def _has_gradients(network: Network, x: Any, sites: Sites, plan: Plan) -> bool:
    """Return True if the largest logit has mask gradients, row by row; raise where these were asked for and fail."""
    if any(site.moved or (site.batch_axis is None and site.coupled) for site in sites):
        return False
    try:
        _ = BatchContext(network, take_rows(x, slice(1)), sites, plan.readout, None, of=largest_logit).gradients
    except LatedropError:
        if isinstance(plan.method, Terms) and plan.method.chosen:
            raise
        return False
    return True


def _draw(drawn: dict[float, list[Tensor]], network: Network, x: Any, sites: Sites, plan: Plan) -> None:
    rates = _rates(plan.method)
    options = replace(draw_options(plan), keep=True)
    for rate, moments in zip(rates, sample_rates(network, x, rates, sites, options), strict=True):
        assert moments.outputs is not None
        drawn.setdefault(rate, []).append(torch.stack([as_logits(part) for part in moments.outputs]).cpu())
    if sum(part.numel() for parts in drawn.values() for part in parts) > _MOST_NUMBERS:
        raise ArgumentError(
            f"expected draws, rates, rows and classes of which at most {_MOST_NUMBERS:,} logits come; found more. Pass "
            "fewer rates=, draws= or validation rows."
        )


def _rates(method: Any) -> list[float]:
    given = method.rates or RATES
    rates = [rate for rate in given if isinstance(rate, float)]
    if len(rates) < len(given):
        raise ArgumentError("expected one rate for all sites for classes; found rates by site.")
    return rates
