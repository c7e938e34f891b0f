"""The record of a detector's calibration, and the images that margins are made from.

With `f = (1, log draw std, log side, logit score, logit mean score over draws)` of a side of a box

    std = exp(w · f),      probability = sigmoid(v · f), with the mean of f over the four sides.

Of an image with m matched boxes each counts 1 / m. On n images used for nothing else

    r = the smallest number with (sum of the counts of boxes with |error| > r · std, plus 1) / (n + 1) <= 1 - level,

so that of a new exchangeable image with matched boxes no more than a share `1 - level` of these lies outside on average
(conformal risk control: Angelopoulos, Bates, Fisch, Lei and Schuster 2022). That boxes of one image are alike does no
harm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from latedrop.boxes.detections import BoxOptions, Detections
from latedrop.calibration.cross_validation import Candidate
from latedrop.calibration.seen import Sketch
from latedrop.errors import ArgumentError
from latedrop.records import Format, Limits, match, record

__all__ = ["BOXES", "FEATURES", "BoxCalibration", "BoxErrors", "BoxFit", "features"]

FEATURES = 5
_Number: TypeAlias = Annotated[float, Limits(-1e30, 1e30)]
_Size: TypeAlias = Annotated[float, Limits(0, 1e30)]
_Count: TypeAlias = Annotated[int, Limits(0)]
_LEAST_SCORE = 1e-3


@record
@dataclass(frozen=True)
class BoxFit:
    """Coefficients of features, and what they were compared with.

    Attributes:
        weights: w or v; 0 for what is not looked at.
        choice: which of the candidates is in use.
        candidates: with their gains over the trivial one, in nats.
    """

    weights: Annotated[tuple[_Number, ...], Limits(FEATURES, FEATURES)]
    choice: str
    candidates: tuple[Candidate, ...]

    def checked(self) -> BoxFit:
        """Check the choice after reading."""
        names = [each.name for each in self.candidates]
        match(self.choice in names, "choice", f"one of {names}", self.choice)
        return self

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the coefficients times features `(..., 5)`."""
        return inputs @ torch.tensor(self.weights, dtype=inputs.dtype)

    def __str__(self) -> str:
        chosen = next(each for each in self.candidates if each.name == self.choice)
        return f"{self.choice!r}: {chosen.gain:+.3f} nats (± {chosen.gain_error:.3f})"


@record
@dataclass(frozen=True)
class BoxErrors:
    """Matched boxes of images used for nothing else.

    Attributes:
        ratios: `|error| / std` of the four sides of each matched box.
        images: how many matched boxes each image has, of those with any.
    """

    ratios: tuple[Annotated[tuple[_Size, ...], Limits(4, 4)], ...] = field(repr=False)
    images: tuple[Annotated[int, Limits(1)], ...] = field(repr=False)

    def checked(self) -> BoxErrors:
        """Check the number of boxes after reading."""
        match(sum(self.images) == len(self.ratios), "images", f"{len(self.ratios)} boxes together", sum(self.images))
        return self

    def radius(self, level: float, side: int | None = None) -> float:
        """Return how many std a side lies off at most; of None, all four sides.

        >>> BoxErrors(((1.0, 0.0, 0.0, 2.0), (3.0, 1.0, 1.0, 1.0)), (1, 1)).radius(0.5)
        3.0
        """
        needed = math.ceil(level / (1 - level) - 1e-9)
        if len(self.images) < needed:
            raise ArgumentError(
                f"expected at least {needed} images with matched boxes for margins at level {level:g}; found "
                f"{len(self.images)}. Pass more images to conformal(...), or ask for a lower level."
            )
        counts = [1 / count for count in self.images for _ in range(count)]
        off = [max(four) if side is None else four[side] for four in self.ratios]
        pairs = sorted(zip(off, counts, strict=True), reverse=True)
        most = (1 - level) * (len(self.images) + 1) - 1
        outside = accumulate(count for _, count in pairs)
        return next((ratio for (ratio, _), lost in zip(pairs, outside, strict=True) if lost > most + 1e-9), 0.0)


@record
@dataclass(frozen=True, kw_only=True)
class BoxCalibration:
    """All that was chosen and measured. Frozen, and plain JSON on disk.

    Attributes:
        std: of a side; gains in nats per side over one constant.
        score: the probability that a box is right; gains in nats per box over the model's own score.
        images, boxes, matched, objects: how many there were; `matched` boxes found one of the `objects`.
        options: how boxes are made and matched.
        functions: options that were functions, which a file cannot hold.
        errors: what margins are made from; None before `conformal`.
        seen: marks of the boxes that it was fitted to.
    """

    std: BoxFit
    score: BoxFit
    images: _Count
    boxes: _Count
    matched: _Count
    objects: _Count
    options: BoxOptions
    functions: tuple[str, ...] = ()
    fingerprint: str
    errors: BoxErrors | None = None
    seen: Sketch = field(default="", repr=False)

    def __str__(self) -> str:
        return (
            f"{self.images} images, {self.matched} of {self.boxes} boxes find one of {self.objects} objects at overlap "
            f"{self.options.overlap:g}; on images left out, std of {self.std} per side beside one constant, "
            f"probabilities of {self.score} per box beside the model's scores"
        )


def features(detections: Detections) -> Tensor:
    """Return f of each side of each box, `(K, 4, 5)`."""
    sides = (detections.boxes[:, 2:] - detections.boxes[:, :2]).clamp_min(1e-6).repeat(1, 2)
    draw_std = torch.maximum(torch.minimum(detections.draw_std, sides), 1e-4 * sides)
    parts = [torch.ones_like(sides), draw_std.log(), sides.log()]
    for scores in (detections.scores, detections.draw_scores):
        parts.append(scores.clamp(_LEAST_SCORE, 1 - _LEAST_SCORE).logit()[:, None].expand_as(sides))
    return torch.stack(parts, 2)


BOXES = Format(
    BoxCalibration,
    "latedrop-boxes",
    "a calibration of a detector",
    "Calibrate again with calibrate_boxes().",
    "calibration",
)
