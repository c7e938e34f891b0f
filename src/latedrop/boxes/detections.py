"""What a detector says of images, as it is and thinned, and whose box is whose.

A box is `(x1, y1, x2, y2)`. Boxes of a draw belong to those of the plain network by class and overlap,

    overlap(a, b) = area of what both cover / area of what either covers.

A draw is one thinned network for all images. Images of one size run together, the draws one after the other: in a
detector of two stages the regions of an image are rows of their own, whose number differs from draw to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from latedrop.data.arrays import place
from latedrop.data.rows import copied
from latedrop.dropout.masks import DrawMasks
from latedrop.errors import DataError, OutputError
from latedrop.network.find_sites import find_sites
from latedrop.network.network import Network, Pass
from latedrop.network.sites import Sites, StoredSites
from latedrop.records import Limits, record

__all__ = ["BoxOptions", "Detections", "Detector", "matched", "overlap"]

Collate: TypeAlias = Callable[[list[Tensor]], Any] | None
Readout: TypeAlias = Callable[[Any], Any] | None
Share: TypeAlias = Annotated[float, Limits(0, 1)]
_KEYS = ("boxes", "scores", "labels")


@record
@dataclass(frozen=True, kw_only=True)
class BoxOptions:
    """How boxes are made and matched.

    Attributes:
        sites: where units are dropped.
        rate: with which probability.
        draws: how many thinned networks there are.
        seed: of their masks.
        overlap: what two boxes have in common at least, to be one.
        least_score: boxes of lower scores are left out.
    """

    sites: StoredSites = field(repr=False)
    rate: Annotated[float, Limits(0, 1 - 2**-53)]
    draws: Annotated[int, Limits(2)]
    seed: int
    overlap: Share
    least_score: Share


@dataclass(frozen=True)
class Detections:
    """The boxes of one image, those of high scores first.

    Attributes:
        boxes: `(K, 4)`.
        scores: `(K,)`.
        labels: `(K,)`.
        draw_std: `(K, 4)`, over the draws that find a box again; infinite where fewer than two do.
        draw_scores: `(K,)`, the mean score over all draws, 0 where a draw does not find it.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    draw_std: Tensor
    draw_scores: Tensor

    def __len__(self) -> int:
        return len(self.boxes)


class Detector:
    """Runs a detector over images, plain and thinned.

    Args:
        model: takes a list of images, or what `collate` makes of it.
        options: see `BoxOptions`.
        collate: from a list of images to what the model takes.
        readout: from the model's output to a dict of boxes, scores and labels for each image.
        batch_size: images that run at once.
    """

    def __init__(
        self,
        model: nn.Module,
        options: BoxOptions,
        collate: Collate = None,
        readout: Readout = None,
        batch_size: int = 8,
    ) -> None:
        self.model, self.options = model, options
        self._collate, self._readout, self._batch_size = collate, readout, batch_size
        self._network = Network(model)

    def with_sites(self, image: Tensor) -> Detector:
        """Return a detector with the sites that are found on three copies of an image."""
        rows = _RowOfEachImage(self.model, self._readout)
        images = [place(image, self._network.weight)] * 3
        sites = find_sites(rows, images, collate=lambda items: (self._batch(items),))
        names = [(site.name, site.weight or "") for site in sites]
        plain = Sites(
            replace(site, name=name.removeprefix("model."), weight=weight.removeprefix("model.") or None)
            for site, (name, weight) in zip(sites, names, strict=True)
        )
        options = replace(self.options, sites=plain)
        return Detector(self.model, options, self._collate, self._readout, self._batch_size)

    def detect(self, images: Sequence[Tensor]) -> list[Detections]:
        """Return the boxes of each image, with what the draws say of them."""
        options, result = self.options, dict[int, Detections]()
        self._network = self._network.current()
        rates = {site.name: options.rate for site in options.sites}
        for places in _of_one_size(images, self._batch_size):
            batch = [place(images[i], self._network.weight) for i in places]
            sums = [_Sums(plain) for plain in self._pass(batch)]
            for draw in range(options.draws):
                masks = DrawMasks(options.seed, rates, range(draw, draw + 1), range(options.draws))
                for total, drawn in zip(sums, self._pass(batch, masks), strict=True):
                    total.add(drawn, options.overlap)
            result |= {i: total.result(options.draws) for i, total in zip(places, sums, strict=True)}
        return [result[i] for i in range(len(images))]

    def _pass(self, batch: list[Tensor], masks: DrawMasks | None = None) -> list[dict[str, Tensor]]:
        """Return boxes, scores and labels of each image; thinned ones of any score."""
        sites = self.options.sites if masks is not None else ()

        def run() -> Any:
            return self._network.output((self._batch(copied(batch)),), Pass(sites, masks, len(batch)))

        parts = _read(self._network.quietly(run), len(batch), self._readout)
        return [_ordered(part, 0.0 if sites else self.options.least_score) for part in parts]

    def _batch(self, images: list[Tensor]) -> Any:
        return list(images) if self._collate is None else self._collate(list(images))


class _RowOfEachImage(nn.Module):
    """A detector with one number for each image, so that a probe pass sees what the rows are."""

    def __init__(self, model: nn.Module, readout: Readout) -> None:
        super().__init__()
        self.model, self._readout = model, readout

    def forward(self, images: Any) -> Tensor:
        parts = _read(self.model(images), len(images), self._readout)
        return torch.stack([part["boxes"].sum() + part["scores"].sum() for part in parts])[:, None]


class _Sums:
    """What the draws say of the boxes of one image, summed up."""

    def __init__(self, plain: dict[str, Tensor]) -> None:
        self._plain = plain
        self._count = torch.zeros(len(plain["boxes"]), 1, dtype=torch.float64)
        self._scores = torch.zeros(len(plain["boxes"]), dtype=torch.float64)
        self._first, self._second = torch.zeros(2, len(plain["boxes"]), 4, dtype=torch.float64)

    def add(self, drawn: dict[str, Tensor], least: float) -> None:
        """Add a draw: for each box the one of its class that overlaps most."""
        plain = self._plain
        if not len(drawn["boxes"]) or not len(plain["boxes"]):
            return
        shared = overlap(plain["boxes"], drawn["boxes"]) * (plain["labels"][:, None] == drawn["labels"])
        most, which = shared.max(1)
        again = (most >= least).double()
        off = (drawn["boxes"][which] - plain["boxes"]) * again[:, None]
        self._count += again[:, None]
        self._scores += drawn["scores"][which] * again
        self._first += off
        self._second += off.square()

    def result(self, draws: int) -> Detections:
        """Return the boxes with the moments over draws."""
        count = self._count.clamp_min(2)
        variance = (self._second - self._first.square() / count) / (count - 1)
        std = variance.clamp_min(0).sqrt().masked_fill(self._count < 2, torch.inf)
        return Detections(**self._plain, draw_std=std, draw_scores=self._scores / draws)


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


def _read(output: Any, count: int, readout: Readout) -> list[Mapping[str, Tensor]]:
    """Return a mapping for each image, checked."""
    parts = output if readout is None else readout(output)
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    shapes = [{key: tuple(part[key].shape) for key in part} if isinstance(part, dict) else {} for part in parts]
    lengths = [shape.get("scores", ()) for shape in shapes]
    needed = [{"boxes": (*each, 4), "scores": each, "labels": each} for each in lengths]
    if len(parts) != count or not all(
        need.items() <= shape.items() for need, shape in zip(needed, shapes, strict=True)
    ):
        raise OutputError(
            f"expected a dict of boxes (K, 4), scores (K,) and labels (K,) for each of {count} images; found "
            f"{len(parts)}, the first of shapes {shapes[0] if shapes else {}}. Pass readout=: a function from the "
            "model's output to such a list."
        )
    return parts


def _ordered(part: Mapping[str, Tensor], least: float) -> dict[str, Tensor]:
    """Return boxes of scores above a least one, the highest first, on the CPU."""
    boxes, scores, labels = (part[key].detach().cpu() for key in _KEYS)
    order = scores.argsort(descending=True, stable=True)
    order = order[scores[order] >= least]
    return {"boxes": boxes[order].double(), "scores": scores[order].double(), "labels": labels[order].long()}


def _of_one_size(images: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Yield the places of images of one size, at most so many at once."""
    by_size: dict[tuple[int, ...], list[int]] = {}
    for i, image in enumerate(images):
        if not isinstance(image, Tensor) or image.dim() != 3:
            kind = f"shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise DataError(f"expected images (C, H, W), each a tensor; found {kind}. Pass a list of images.")
        by_size.setdefault(tuple(image.shape), []).append(i)
    for places in by_size.values():
        for start in range(0, len(places), most):
            yield places[start : start + most]
