"""Boxes that a detector gives for images, plain and thinned; the overlap of boxes, and which box finds which object.

A box is `(x1, y1, x2, y2)`. A box of a draw belongs to the box of its class that it overlaps most,

    overlap(a, b) = area of what both cover / area of what either covers.

A draw is one thinned network for all images. It drops channels, and features of regions: one mask then serves images of
any size, with any number of regions. A box has features for each of its four sides,

    f = (1, log draw std, log side, logit score, logit mean score over draws).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from latedrop.data.arrays import place
from latedrop.data.rows import Collate, copied
from latedrop.dropout.masks import DrawMasks
from latedrop.errors import DataError, OutputError
from latedrop.network.find_sites import find_sites
from latedrop.network.network import Network, Pass, part_of
from latedrop.network.sites import Probability, Sites, StoredSites, rates_by_site
from latedrop.options import shown
from latedrop.records import Limits, record

__all__ = ["BoxOptions", "Collate", "Detector", "Readout", "matched", "overlap"]

Readout: TypeAlias = Callable[[Any], Any] | None
_Boxes: TypeAlias = tuple[Tensor, Tensor, Tensor]
_KEYS = ("boxes", "scores", "labels")
_LEAST_SCORE, _LEAST_STD = 1e-3, 1e-4


@record
@dataclass(frozen=True, kw_only=True)
class BoxOptions:
    """How boxes are made and matched: where and how often channels are dropped, and which boxes count as one."""

    sites: StoredSites = field(default=Sites(), repr=False)
    rate: Probability = 0.02
    draws: Annotated[int, Limits(2)] = 20
    seed: int = 0
    overlap: Probability = 0.5


@dataclass
class Detector:
    """Runs a detector over images, plain and thinned; see `calibrate_boxes`. The first image tells the sites."""

    model: nn.Module
    options: BoxOptions
    collate: Collate = None
    readout: Readout = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        self._network = Network(self.model)

    def detect(self, images: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield boxes `(K, 4)`, scores and labels `(K,)` and features `(K, 4, 5)` of each image, high scores first.

        Neighbours run together if they are of one size: some detectors pad images to the largest beside them.
        """
        self._network = self._network.current()
        for _, neighbours in groupby(map(self._placed, images), lambda image: image.shape):
            while batch := list(islice(neighbours, self.batch_size)):
                if not self.options.sites:
                    layers = _without_output(self.model)
                    sites = find_sites(layers, batch[:1], kind="channel", collate=lambda one: (self._inputs(one),))
                    self.options = replace(self.options, sites=sites)
                plain, draws, device = self._boxes(batch), range(self.options.draws), self._network.weight.device
                rates = rates_by_site(self.options.sites, self.options.rate)
                sums = [torch.zeros(len(image[0]), 10, dtype=torch.float64) for image in plain]
                for draw in draws:
                    one, notes = range(draw, draw + 1), self._network.notes
                    masks = DrawMasks.of_network(notes, device, self.options.seed, rates, one, draws)
                    for total, image, thinned in zip(sums, plain, self._boxes(batch, masks), strict=True):
                        total += _found_again(image, thinned, self.options.overlap)
                for image, total in zip(plain, sums, strict=True):
                    yield *image, _features(image, total, len(draws))

    def _boxes(self, batch: list[Tensor], masks: DrawMasks | None = None) -> list[_Boxes]:
        """Return boxes, scores and labels of each image on the CPU, high scores first."""
        sites = self.options.sites if masks is not None else ()

        def run() -> Any:
            return self._network.output((self._inputs(copied(batch)),), Pass(sites, masks, len(batch)))

        output = self._network.quietly(run)
        images = output if self.readout is None else part_of(output, self.readout)
        if not isinstance(images, (list, tuple)) or len(images) != len(batch) or not all(map(_is_complete, images)):
            raise OutputError(
                f"expected a dict of boxes (K, 4), scores (K,) and labels (K,) for each of {len(batch)} images; found "
                f"{shown(images)}. Pass readout=: a function from the model's output to a list of such dicts."
            )
        results = []
        for image in images:
            order = image["scores"].argsort(descending=True, stable=True)
            boxes, scores, labels = (image[key].detach()[order].cpu() for key in _KEYS)
            results.append((boxes.double(), scores.double(), labels.long()))
        return results

    def _inputs(self, images: list[Tensor]) -> Any:
        return images if self.collate is None else self.collate(images)

    def _placed(self, image: Any) -> Any:
        if not isinstance(image, Tensor) or image.dim() != 3:
            kind = f"shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise DataError(f"expected images (C, H, W), each a tensor; found {kind}. Pass a list of images.")
        return place(image, self._network.weight)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the overlap (intersection over union) of boxes `(N, 4)` and `(M, 4)`, `(N, M)`.

    >>> overlap(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0]]))
    tensor([[0.3333]])
    """
    low, high = torch.maximum(a[:, None, :2], b[:, :2]), torch.minimum(a[:, None, 2:], b[:, 2:])
    both = (high - low).clamp_min(0).prod(2)
    areas = [(part[:, 2:] - part[:, :2]).clamp_min(0).prod(1) for part in (a, b)]
    return both / (areas[0][:, None] + areas[1] - both).clamp_min(torch.finfo(both.dtype).tiny)


def matched(boxes: Tensor, labels: Tensor, true_boxes: Tensor, true_labels: Tensor, least: float) -> Tensor:
    """Return for each box the object that it finds, `(K,)`, and -1 where it finds none.

    The first box takes the object of its class that it overlaps most, if that is free and overlaps enough, then the
    second: so boxes of high scores stand first.
    """
    shared = overlap(boxes, true_boxes.to(boxes)) * (labels[:, None] == true_labels.to(labels))
    result = torch.full((len(boxes),), -1)
    for k in range(len(boxes) if len(true_boxes) else 0):
        most, which = shared[k].max(0)
        if float(most) >= least:
            result[k] = which
            shared[:, which] = 0.0
    return result


def _without_output(model: nn.Module) -> nn.Module:
    """Return a model with the same layers that keeps its boxes, lest their number is taken for that of images."""
    kind: Any = type(model)

    class Layers(kind):  # type: ignore[misc]
        def forward(self, *inputs: Any) -> Tensor:
            super().forward(*inputs)
            return torch.zeros(())

    layers = copy(model)
    layers.__class__ = Layers
    return layers


def _found_again(plain: _Boxes, thinned: _Boxes, least: float) -> Tensor:
    """Return 1, score, moves of the sides and their squares, `(K, 10)`, of the box that overlaps each one enough."""
    (boxes, _, labels), (others, scores, other_labels) = plain, thinned
    if not len(others):
        return torch.zeros(len(boxes), 10, dtype=torch.float64)
    most, which = (overlap(boxes, others) * (labels[:, None] == other_labels)).max(1)
    score, off = scores[which, None], others[which] - boxes
    return torch.cat([torch.ones_like(score), score, off, off.square()], 1) * (most >= least)[:, None]


def _features(plain: _Boxes, sums: Tensor, draws: int) -> Tensor:
    """Return f of each side, `(K, 4, 5)`; where fewer than two draws find a box, its std is that of a whole side."""
    (boxes, scores, _), (count, score, first, second) = plain, sums.split((1, 1, 4, 4), 1)
    sides = (boxes[:, 2:] - boxes[:, :2]).clamp_min(1e-6).repeat(1, 2)
    variance = (second - first.square() / count.clamp_min(2)) / (count - 1).clamp_min(1)
    std = variance.clamp_min(0).sqrt().masked_fill(count < 2, torch.inf)
    std = torch.maximum(torch.minimum(std, sides), _LEAST_STD * sides)
    logits = torch.stack([scores, score[:, 0] / draws]).clamp(_LEAST_SCORE, 1 - _LEAST_SCORE).logit()
    return torch.stack([torch.ones_like(std), std.log(), sides.log(), *logits[:, :, None].expand(-1, -1, 4)], 2)


def _is_complete(image: Any) -> bool:
    """Return True for a mapping with boxes `(K, 4)`, scores `(K,)` and labels `(K,)`."""
    if not isinstance(image, Mapping) or not all(isinstance(image.get(key), Tensor) for key in _KEYS):
        return False
    count = image["scores"].numel()
    return [image[key].shape for key in _KEYS] == [(count, 4), (count,), (count,)]
