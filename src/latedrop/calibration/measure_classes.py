"""Measure logits, labels and novelty of the validation rows of a classifier.

The data are read once. Novelty comes from leverage of features and, where the model can be differentiated, of the mask
gradients of the largest logit: one backward pass, whatever the number of classes. Logits of draws are stored for all
rates, because a temperature is fitted at each rate.

For maps, pixels are sampled at random among those with a label, at most the same number from every image: some ten
thousand are enough to fit a few numbers. Images may differ in size.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.fit_classes import Measured
from latedrop.calibration.guard import Guard
from latedrop.calibration.measure import (
    Parts,
    joined,
    learnable,
    learned_from_reference,
    leverages,
    usable_features,
    validation_batches,
    whole_batch,
)
from latedrop.calibration.methods import Classification, Plan, Sampling, Terms
from latedrop.calibration.rates import draw_options
from latedrop.calibration.targets import as_labels, as_logits, check_classes, check_row_count
from latedrop.data.batches import Labelled
from latedrop.data.rows import take_rows
from latedrop.dropout.sampling import own_output, sample_rates
from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.network.network import Network, part_of
from latedrop.network.sites import Sites
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import Features

__all__ = ["MOST", "largest_logit", "measure_classes", "pixels_of"]

MOST = 2**18
"""Numbers in the logits of all pixels that are kept, where the number of images is known."""
RATES = (0.01, 0.05, 0.1, 0.2, 0.3)
_EACH = 2**14  # pixels of one image, at most
_IMAGES = 100  # where their number is not known
_MOST_NUMBERS = 2**28  # of logits of draws that are kept


def measure_classes(network: Network, data: Labelled, plan: Plan) -> Measured:
    """Measure all validation rows, or pixels of the validation images."""
    task, rates, names = plan.task, _rates(plan.method), _names(plan.method)
    assert isinstance(task, Classification)
    features: Features | None = None
    gradients, binary, maps, sites = False, False, False, Sites()
    measured: list[Parts] = []  # of each batch, or of each image that has any label
    noted: list[Parts] = []
    read = numbers = 0
    with closing(validation_batches(network.model, data, plan)) as stream:
        for x, y, sites, tick in stream:
            if not read:
                output = own_output(network, x, plan.readout)
                binary, maps = output.dim() == 1 or output.shape[1] == 1, _are_maps(output, y, plan, task)
                if not maps:
                    check_row_count(data.row_total, 2 if binary else output.shape[1])
                features = usable_features(network, x, sites, plan.readout)
                gradients = not maps and features is not None and "gradients" in names
                gradients = gradients and _has_gradients(network, x, sites, plan)
            batch = BatchContext(network, x, sites, plan.readout, features, of=largest_logit)
            if features is not None:
                noted.append(learnable(batch, ["gradients", "features"] if gradients else ["features"]))
            if maps:
                measured += pixels_of(batch.mean, y, task.ignore_index, read, data.row_total or _IMAGES)
            else:
                logits = as_logits(batch.mean)
                labels = as_labels(y.to(logits.device), logits.shape[1], (len(logits),))
                drawn = _drawn(network, x, sites, plan, rates)
                measured.append({"logits": logits.cpu(), "labels": labels.cpu(), **drawn})
                numbers += sum(values.numel() for values in drawn.values())
                if numbers > _MOST_NUMBERS:
                    raise ArgumentError(
                        f"expected draws, rates, rows and classes of which at most {_MOST_NUMBERS:,} logits come; "
                        "found more. Pass fewer rates=, draws= or validation rows."
                    )
            read += len(y)
            tick()
    if maps and len(measured) < 2:
        raise DataError(
            f"expected at least 2 validation images with labels, and better fifty; found {len(measured)} among {read}. "
            f"Check the labels and ignore_index={task.ignore_index}, which counts as no label."
        )
    if not measured:
        raise DataError("expected at least 2 validation rows, and better a thousand; found 0.")
    columns = joined(measured)
    logits, labels, image = columns["logits"], columns["labels"], columns.get("image")
    check_classes(logits, labels, binary=binary)
    by_rate = {rate: columns[str(rate)].movedim(1, 0) for rate in rates}
    rows = Measured(logits, labels, None, image, by_rate, sites, features, binary=binary)
    if features is None:
        return rows
    parts = joined(noted)
    if gradients and not bool(parts["gradients"].isfinite().all()):
        gradients = False
        del parts["gradients"]
    kinds: list[GradientLeverage | Leverage] = [GradientLeverage()] if gradients else []
    if "leverage" in names or not gradients:
        kinds.append(Leverage())
    if gradients:
        readout = plan.readout
        plan = replace(plan, readout=lambda output: largest_logit(part_of(output, readout)))
    reference = learned_from_reference(network, plan, sites, features, parts, kinds)
    terms: list[Any] = list(reference.terms.values())
    validation = whole_batch(network, plan, sites, features, parts, logits if gradients else None)
    leverage, usual = leverages(terms, validation)
    guard = Guard.of([term.name for term in terms], leverage, usual)
    novelty = guard.ratio(leverage.unbind(1))
    novelty = novelty if image is None else novelty[image]
    return replace(rows, novelty=novelty, terms=tuple(terms), guard=guard, reference_rows=reference.rows)


def largest_logit(output: Tensor) -> Tensor:
    """Return the logit of the likeliest class, `(N, 1)`; for a binary classifier with one logit, its absolute value."""
    flat = output.reshape(len(output), -1)
    return flat.abs() if flat.shape[1] == 1 else flat.amax(1, keepdim=True)


def pixels_of(output: Tensor, labels: Tensor, ignored: int | None, first: int, images: int) -> list[Parts]:
    """Sample labelled pixels from each image of outputs `(n, K, ...)`, at most `MOST` numbers from all `images`.

    Image numbers start at `first`; images without any label are left out.
    """
    logits = as_logits(output, maps=True)
    truth = as_labels(labels.to(logits.device), logits.shape[1], (len(logits), *logits.shape[2:]), ignored)
    most = _EACH
    while images * min(most, truth[0].numel()) * logits.shape[1] > MOST and most > 1:
        most //= 2
    drawn: list[Parts] = []
    for number, (z, y) in enumerate(zip(logits.flatten(2), truth.flatten(1), strict=True), first):
        usable = torch.arange(len(y)) if ignored is None else (y != ignored).nonzero()[:, 0].cpu()
        order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(number))
        chosen = usable[order[:most]]
        if len(chosen):
            at, image = chosen.to(z.device), torch.full_like(chosen, number)
            drawn.append({"logits": z[:, at].T.cpu(), "labels": y[at].cpu(), "image": image})
    return drawn


def _drawn(network: Network, x: Any, sites: Sites, plan: Plan, rates: list[float]) -> Parts:
    """Return the logits of draws at each rate, `(N, T, K)`."""
    options = replace(draw_options(plan), readout=lambda output: as_logits(part_of(output, plan.readout)), keep=True)
    each = sample_rates(network, x, rates, sites, options) if rates else ()
    return {
        str(rate): torch.stack([*moments.outputs], 1).cpu()  # type: ignore[misc]
        for rate, moments in zip(rates, each, strict=True)
    }


def _are_maps(output: Tensor, labels: Tensor, plan: Plan, task: Classification) -> bool:
    """Return True if the model and the labels give maps."""
    maps = output.dim() > 2 and labels.dim() > 1
    if not maps and task.ignore_index is not None:
        raise ArgumentError(
            f"expected ignore_index with maps of logits (N, K, H, W) alone; found outputs of shape "
            f"{tuple(output.shape)}. Leave out rows that have no label."
        )
    if maps and isinstance(plan.method, Sampling):
        raise ArgumentError(
            "expected method=Terms(...), the default, for maps of classes; found Sampling. How far thinned networks "
            "disagree about a pixel is predict(x, rate=0.1).mutual_information."
        )
    if maps and isinstance(plan.method, Terms) and plan.method.chosen and "gradients" in _names(plan.method):
        raise ArgumentError(
            "expected Terms(['leverage']) for maps of classes; found 'gradients', which would take a backward pass for "
            "every pixel."
        )
    return maps


def _names(method: Any) -> set[str]:
    """Return the names of the terms that measure novelty: both kinds of leverage, or those that the user named."""
    both = {"leverage", "gradients"}
    names = {term.name for term in method.objects} if isinstance(method, Terms) and method.chosen else both
    if names - both:
        raise ArgumentError(
            f"expected terms 'leverage' and 'gradients' for classes; found {sorted(names - both)}. For dropout pass "
            "method='sample'."
        )
    return names


def _has_gradients(network: Network, x: Any, sites: Sites, plan: Plan) -> bool:
    """Return True if the largest logit has mask gradients, row by row; raise where these were asked for and fail."""
    if any(site.moved or site.coupled for site in sites):
        return False
    try:
        _ = BatchContext(network, take_rows(x, slice(1)), sites, plan.readout, None, of=largest_logit).gradients
    except LatedropError:
        if isinstance(plan.method, Terms) and plan.method.chosen:
            raise
        return False
    return True


def _rates(method: Any) -> list[float]:
    """Return the rates of draws that are tried; none with terms."""
    given = (method.rates or RATES) if isinstance(method, Sampling) else ()
    rates = [rate for rate in given if isinstance(rate, float)]
    if len(rates) < len(given):
        raise ArgumentError("expected one rate for all sites for classes; found rates by site.")
    return rates
