"""The validation rows of a classifier, measured: logits, labels and novelty.

The data are read once. Novelty comes from leverage of features and, where the model can be differentiated, of the mask
gradients of the largest logit: one backward pass, whatever the number of classes. Logits of draws are kept for all
rates, as every temperature is tried on them.

Of maps some pixels are drawn by chance. A fit of a few numbers needs no more than some ten thousand. Every image gives
the same number at most, among its pixels that have a label; whenever the logits that are kept are more than `MOST`
numbers, half of each image's go. So memory does not grow with the size of the images, nor with their number as long as
a pixel of each is kept. Images may differ in size.
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
from latedrop.calibration.targets import as_labels, as_logits, check_labels, check_logits, check_row_count
from latedrop.data.batches import row_total
from latedrop.data.rows import take_rows
from latedrop.dropout.sampling import own_output, sample_rates
from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.network.network import Network, part_of
from latedrop.network.sites import Sites
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import Features

__all__ = ["MOST", "Labelled", "largest_logit", "measure_classes"]

MOST = 2**18
"""Numbers in the logits of all pixels that are kept."""
RATES = (0.01, 0.05, 0.1, 0.2, 0.3)
_EACH = 2**14  # pixels of one image, at most
_MOST_NUMBERS = 2**28  # of logits of draws that are kept


def measure_classes(network: Network, data: Any, plan: Plan) -> Measured:
    """Measure all validation rows, or pixels of the validation images."""
    task, rates, names = plan.task, _rates(plan.method), _names(plan.method)
    assert isinstance(task, Classification)
    features: Features | None = None
    collected: Labelled | None = None
    gradients, binary, sites = False, False, Sites()
    noted: list[Parts] = []
    with closing(validation_batches(network.model, data, plan)) as stream:
        for x, y, sites, tick in stream:
            if collected is None:
                output = own_output(network, x, plan.readout)
                binary, maps = output.dim() == 1 or output.shape[1] == 1, _are_maps(output, y, plan, task)
                collected = Labelled(maps, task.ignore_index)
                if not maps:
                    check_row_count(row_total(data), 2 if binary else output.shape[1])
                features = usable_features(network, x, sites, plan.readout)
                gradients = not maps and features is not None and "gradients" in names
                gradients = gradients and _has_gradients(network, x, sites, plan)
            batch = BatchContext(network, x, sites, plan.readout, features, of=largest_logit)
            if features is not None:
                noted.append(learnable(batch, ["gradients", "features"] if gradients else ["features"]))
            collected.add(batch.mean, y)
            if rates:
                collected.add_draws(rates, network, x, sites, plan)
            tick()
    if collected is None:
        raise DataError("expected at least 2 validation rows, and better a thousand; found 0.")
    columns = collected.columns()
    logits, labels, image = columns["logits"], columns["labels"], columns.get("image")
    check_labels(labels, logits.shape[1])
    check_logits(logits, labels, binary=binary)
    drawn = {rate: columns[str(rate)].movedim(1, 0) for rate in rates}
    rows = Measured(logits, labels, None, image, drawn, sites, features, binary=binary)
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
    """Return `(N, 1)`, the logit of the likeliest class; of a binary classifier with one logit, its size."""
    flat = output.reshape(len(output), -1)
    return flat.abs() if flat.shape[1] == 1 else flat.amax(1, keepdim=True)


class Labelled:
    """Logits and labels of all rows, or of some pixels of images, in an order of chance: the first are a sample.

    Args:
        maps: whether every pixel has a class.
        ignored: the label of pixels that have none.
        most: numbers in all logits of pixels.
    """

    def __init__(self, maps: bool, ignored: int | None = None, most: int = MOST) -> None:
        self._maps, self._ignored, self._most, self._each = maps, ignored, most, _EACH
        self._parts: list[Parts] = []  # for each batch of rows, or each image that has any label
        self._last: list[tuple[Parts, Any, Tensor | None]] = []  # of the last batch: rows, and their pixels
        self._seen = 0

    def add(self, output: Tensor, labels: Tensor) -> None:
        """Take the next rows of outputs `(N, K)`, or images of outputs `(N, K, ...)`."""
        logits = as_logits(output, maps=self._maps)
        shape = len(logits), *logits.shape[2:]
        truth = as_labels(labels.to(logits.device), logits.shape[1], shape, self._ignored)
        if not self._maps:
            self._parts.append({"logits": logits.cpu(), "labels": truth.cpu()})
            self._last = [(self._parts[-1], None, None)]
            return
        self._thin()
        self._last = []
        for row, (z, y) in enumerate(zip(logits.flatten(2), truth.flatten(1), strict=True)):
            usable = torch.arange(len(y)) if self._ignored is None else (y != self._ignored).nonzero()[:, 0].cpu()
            order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(self._seen))
            chosen = usable[order[: self._each]]
            if len(chosen):
                at = chosen.to(z.device)
                image = torch.full_like(chosen, self._seen)
                self._parts.append({"logits": z[:, at].T.cpu(), "labels": y[at].cpu(), "image": image})
                self._last.append((self._parts[-1], slice(row, row + 1), chosen))
            self._seen += 1

    def add_draws(self, rates: list[float], network: Network, x: Any, sites: Sites, plan: Plan) -> None:
        """Take the logits of draws of the last rows, or pixels, of inputs `x`."""
        for part, rows, pixels in self._last:

            def taken(output: Any, pixels: Tensor | None = pixels) -> Tensor:
                logits = as_logits(part_of(output, plan.readout), maps=self._maps)
                return logits if pixels is None else logits.flatten(2)[:, :, pixels.to(logits.device)]

            options = replace(draw_options(plan), readout=taken, keep=True)
            some = x if rows is None else take_rows(x, rows)
            for rate, moments in zip(rates, sample_rates(network, some, rates, sites, options), strict=True):
                assert moments.outputs is not None
                part[str(rate)] = torch.stack([one[0].T if self._maps else one for one in moments.outputs], 1).cpu()
        if sum(part[str(rate)].numel() for part in self._parts for rate in rates) > _MOST_NUMBERS:
            raise ArgumentError(
                f"expected draws, rates, rows and classes of which at most {_MOST_NUMBERS:,} logits come; found more. "
                "Pass fewer rates=, draws= or validation rows."
            )

    def columns(self) -> Parts:
        """Return logits `(N, K)`, labels and those of draws `(N, T, K)` by rate; of maps the number of each image."""
        if self._maps:
            self._thin()
            if self._seen and not self._parts:
                raise DataError(
                    f"expected pixels with a label; found the ignore_index, {self._ignored}, at all pixels of all "
                    f"{self._seen} images. Check ignore_index= and the labels."
                )
            if len(self._parts) < 2:
                raise DataError(
                    f"expected at least 2 validation images with labels, and better fifty; found {len(self._parts)}."
                )
        return joined(self._parts)

    def _thin(self) -> None:
        """Bring memory back below its bound."""
        while sum(part["logits"].numel() for part in self._parts) > self._most and self._each > 1:
            self._each //= 2
            for part in self._parts:
                part.update({name: values[: self._each].clone() for name, values in part.items()})


def _are_maps(output: Tensor, labels: Tensor, plan: Plan, task: Classification) -> bool:
    """Return True if the model and the labels give maps."""
    maps = output.dim() > 2 and labels.dim() > 1
    if not maps and task.ignore_index is not None:
        raise ArgumentError(
            f"expected ignore_index with maps of logits (N, K, H, W) alone; found outputs of shape "
            f"{tuple(output.shape)}. Leave out rows that have no label."
        )
    if maps and isinstance(plan.method, Terms) and plan.method.chosen and "gradients" in _names(plan.method):
        raise ArgumentError(
            "expected Terms(['leverage']) for maps of classes; found 'gradients', which would take a backward pass for "
            "every pixel."
        )
    return maps


def _names(method: Any) -> set[str]:
    """Return the names of the terms that tell novel rows: both kinds of leverage unless one of them was named."""
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
