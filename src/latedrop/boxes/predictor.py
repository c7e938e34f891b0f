"""Object detectors: a std for each side of a box, margins that hold, and the probability that a box is right.

With the features f of a side (`latedrop.boxes.detections`)

    std = exp(w · f),      probability = sigmoid(v · f), with the mean of f over the four sides.

The Gaussian likelihood of errors gives w, a logistic regression v. Images left out of the fits choose the features.

Of an image with m boxes that find an object each counts 1 / m. On n images used for nothing else

    r = the smallest number with (sum of the counts of boxes with |error| > r · std, plus 1) / (n + 1) <= 1 - level,

so that of a new exchangeable image no more than a share `1 - level` of such boxes lies outside on average (conformal
risk control: Angelopoulos, Bates, Fisch, Lei and Schuster 2022). That boxes of one image are alike does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import tee
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from latedrop.boxes.detections import BoxOptions, Detector, Readout, matched
from latedrop.calibration.cross_validation import Candidate, CrossValidation, leading
from latedrop.calibration.fit_classes import logistic
from latedrop.calibration.seen import Sketch, marks_of, merged, sketch, warn_of_fitted_rows
from latedrop.data.batches import is_dataset, row_total
from latedrop.data.rows import Collate
from latedrop.dropout.moments import checked_draws
from latedrop.errors import ArgumentError, DataError
from latedrop.network.network import check_module
from latedrop.options import shown
from latedrop.prediction.predictor import check_belongs
from latedrop.quantiles import checked_level, first_beyond
from latedrop.records import Format, Limits, record
from latedrop.terminal import shown_on
from latedrop.weights import Weights, fingerprint

__all__ = [
    *("SCORE", "STD", "BoxCalibration", "BoxFit", "BoxPrediction", "BoxPredictor", "MatchedBoxes"),
    *("calibrate_boxes", "fit_score", "fit_std", "load_boxes", "radius"),
]

STD = {"constant": [0], "score": [0, 2, 3], "draws": [0, 1, 2, 3, 4]}
SCORE = {"model": [], "score": [0, 2, 3], "draws": [0, 1, 2, 3, 4]}
"""The features of each candidate; the first is in use unless another leads."""
_FEWEST = 30  # boxes that find an object
_RIDGE = 1e-3
_score_losses = partial(binary_cross_entropy_with_logits, reduction="none")
_Formula: TypeAlias = Callable[..., Tensor]
_Weight: TypeAlias = Annotated[float, Limits(-1e30, 1e30)]
_Four: TypeAlias = Annotated[tuple[Annotated[float, Limits(0, 1e30)], ...], Limits(4, 4)]
Errors: TypeAlias = tuple[Annotated[tuple[_Four, ...], Limits(1)], ...]
"""`|error| / std` of four sides, for the boxes that find an object, image by image."""


@record
@dataclass(frozen=True)
class BoxFit:
    """Coefficients `(5,)` of the features, 0 for those that are not looked at, and the candidate that they are of."""

    weights: Annotated[tuple[_Weight, ...], Limits(5, 5)]
    candidate: Candidate

    def __call__(self, features: Tensor) -> Tensor:
        """Return the coefficients times features `(..., 5)`."""
        return features @ features.new_tensor(self.weights)

    def __str__(self) -> str:
        return f"{self.candidate.name!r}: {self.candidate.gain:+.3f} nats (± {self.candidate.gain_error:.3f})"


@record
@dataclass(frozen=True, kw_only=True)
class BoxCalibration:
    """All that was chosen and measured. Frozen, and plain JSON on disk.

    Attributes:
        std: of a side; its gain in nats per side over one constant.
        score: the probability that a box is right; its gain in nats per box over the model's own score.
        summary: how many images, boxes and objects there were.
        options: how boxes are made and matched.
        custom_readout: the name of a readout, which a file cannot hold.
        errors: what margins are made from; empty before `conformal`.
        seen: marks of the boxes that it was fitted to.
    """

    std: BoxFit
    score: BoxFit
    summary: str
    options: BoxOptions
    custom_readout: str | None = None
    fingerprint: str
    errors: Errors = field(default=(), repr=False)
    seen: Sketch = field(default="", repr=False)

    def __str__(self) -> str:
        return (
            f"{self.summary} at overlap {self.options.overlap:g}; on images left out, std of {self.std} per side "
            f"beside one constant, probabilities of {self.score} per box beside the model's scores"
        )


BOXES = Format(
    BoxCalibration, "latedrop-boxes", "a calibration of a detector", "Call calibrate_boxes() again.", "calibration"
)


@dataclass(frozen=True)
class BoxPrediction:
    """The boxes of one image, those of high scores first.

    Attributes:
        boxes, scores, labels: `(K, 4)`, `(K,)` and `(K,)`, the model's own.
        std: `(K, 4)`, of the error of each side, if the box finds an object.
        probabilities: `(K,)`, that a box is right: it finds an object of its class that no better box finds.
        calibration: what margins are made from.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    std: Tensor
    probabilities: Tensor
    calibration: BoxCalibration

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends `(K, 4)` of an interval for each side alone."""
        width = self.std * self.std.new_tensor([radius(self.calibration.errors, level, side) for side in range(4)])
        return self.boxes - width, self.boxes + width

    def margins(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return an inner and an outer box `(K, 4)`: all four sides of the object lie between with that probability.

        An inner box may be empty, with x1 above x2 or y1 above y2.
        """
        outwards = self.std * radius(self.calibration.errors, level) * self.std.new_tensor([-1, -1, 1, 1])
        return self.boxes - outwards, self.boxes + outwards

    def __len__(self) -> int:
        return len(self.boxes)

    def __repr__(self) -> str:
        return f"BoxPrediction of {len(self)} boxes, {float(self.probabilities.sum()):.1f} of them expected to be right"


class BoxPredictor:
    """A detector with its calibration; `calibrate_boxes` makes it. The model is untouched."""

    def __init__(self, calibration: BoxCalibration, detector: Detector) -> None:
        self.model = detector.model
        self.calibration = calibration
        self._weights = Weights(self.model, calibration.fingerprint)
        self._detector = detector

    def predict(self, images: Iterable[Tensor]) -> list[BoxPrediction]:
        """Predict the boxes of each image `(C, H, W)`; images may have several sizes."""
        self._weights.changed(self.model)
        c = self.calibration
        return [
            BoxPrediction(boxes, scores, labels, c.std(f).exp(), c.score(f.mean(1)).sigmoid(), c)
            for boxes, scores, labels, f in self._detector.detect(images)
        ]

    def conformal(self, data: Any, *, progress: bool = True) -> BoxPredictor:
        """Return the same predictor with margins, from images used for nothing else."""
        c, rows = self.calibration, MatchedBoxes.of(self._detector, data, progress)
        warn_of_fitted_rows(c.seen, rows.marks, stacklevel=2)
        errors = rows.ratios(rows.features.new_tensor(c.std.weights))
        return BoxPredictor(replace(c, errors=errors, seen=merged(c.seen, sketch(rows.marks))), self._detector)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, whole or not at all; the weights are not in it."""
        BOXES.write(path, self.calibration)

    def __repr__(self) -> str:
        return f"BoxPredictor of {type(self.model).__name__}: {self.calibration}"


def radius(errors: Errors, level: float, side: int | None = None) -> float:
    """Return how many std a side lies off at most, from the `errors` of a calibration; of None, all four sides.

    >>> radius((((1.0, 0.0, 0.0, 2.0),), ((3.0, 1.0, 1.0, 1.0),)), 0.5)
    3.0
    """
    purpose = f"images with boxes that find an object, used for nothing else, for margins at level {level:g}"
    remedy = "Call uq = uq.conformal(data) with so many, or lower the level."
    off = [(max(box) if side is None else box[side], 1 / len(boxes)) for boxes in errors for box in boxes]
    return first_beyond(sorted(off, reverse=True), len(errors), 1 - checked_level(level), 0.0, purpose, remedy)


def calibrate_boxes(
    model: nn.Module,
    data: Any,
    *,
    draws: int = 20,
    overlap: float = 0.5,
    collate: Collate = None,
    readout: Readout = None,
    batch_size: int = 8,
    progress: bool = True,
) -> BoxPredictor:
    """Calibrate a trained object detector.

    Args:
        model: takes a list of images and gives a dict of `boxes`, `scores` and `labels` for each, as the detectors of
            torchvision do; it is left as it was.
        data: validation images with their objects, `(image, {"boxes": (M, 4), "labels": (M,)})`: a list of such pairs,
            a data set, or a loader of batches `(images, targets)`.
        draws: number of thinned networks.
        overlap: what a box and an object have in common at least (IoU), for the box to be right.
        collate: from a list of images to what the model takes, where that is no list.
        readout: from the model's output to a list of dicts, where it is none.
        batch_size: images of one size that run at once.
        progress: whether to show how far it is.
    """
    if not 0 <= overlap < 1:
        raise ArgumentError(f"expected an overlap of at least 0 and below 1; found {overlap!r}. The usual one is 0.5.")
    options = BoxOptions(draws=checked_draws(draws), overlap=overlap)
    detector = Detector(model, options, collate, readout, batch_size)
    rows = MatchedBoxes.of(detector, data, progress, _FEWEST)
    calibration = BoxCalibration(
        std=_chosen(STD, fit_std, _std_losses, rows.features[rows.right], rows.errors, rows.image[rows.right]),
        score=_chosen(SCORE, fit_score, _score_losses, rows.features.mean(1), rows.right.double(), rows.image),
        summary=rows.summary,
        options=detector.options,
        custom_readout=None if readout is None else getattr(readout, "__qualname__", type(readout).__name__),
        fingerprint=fingerprint(model),
        seen=sketch(rows.marks),
    )
    return BoxPredictor(calibration, detector)


def load_boxes(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    collate: Collate = None,
    readout: Readout = None,
    batch_size: int = 8,
) -> BoxPredictor:
    """Read what `BoxPredictor.save` wrote, for the same model; `collate` and `readout` where there were such functions.

    Raises `FileError` where the file is missing or edited; warns where the model has other weights.
    """
    check_module(model)
    calibration = BOXES.read(path)
    check_belongs(path, calibration, model, readout)
    return BoxPredictor(calibration, Detector(model, calibration.options, collate, readout, batch_size))


class MatchedBoxes(NamedTuple):
    """The N boxes of some images, and the M of them that find an object."""

    features: Tensor  # (N, 4, 5)
    right: Tensor  # (N,), True where a box finds an object
    image: Tensor  # (N,), the number of the image
    errors: Tensor  # (M, 4), object minus box
    marks: Any  # (M,), of box and object
    summary: str

    @classmethod
    def of(cls, detector: Detector, data: Any, progress: bool = True, fewest: int = 1) -> MatchedBoxes:
        """Run a detector over images, and match its boxes with their objects."""
        total, rows, objects = row_total(data), list[tuple[Tensor, ...]](), 0
        pairs, ahead = tee(shown_on(_labelled(data), "boxes of images", total, "images", show=progress))
        detections = detector.detect(image for image, *_ in ahead)
        for (boxes, _, labels, f), (_, true_boxes, true_labels) in zip(detections, pairs, strict=True):
            which = matched(boxes, labels, true_boxes, true_labels, detector.options.overlap)
            right, number = which >= 0, torch.full_like(which, len(rows))
            rows.append((f, right, number, boxes[right], true_boxes[which[right]]))
            objects += len(true_boxes)
        if not rows:
            raise DataError("expected images with their objects; found none. Pass a list of (image, target).")
        features, right, number, boxes, truth = map(torch.cat, zip(*rows, strict=True))
        summary = f"{len(truth)} of {len(right)} boxes find one of {objects} objects in {len(rows)} images"
        if len(truth) < fewest:
            raise DataError(
                f"expected at least {fewest} boxes that find an object; found {summary}. Pass more images; labels must "
                "be numbered as the model numbers them."
            )
        return cls(features, right, number, truth - boxes, marks_of(boxes, truth), summary)

    def ratios(self, weights: Tensor) -> Errors:
        """Return errors in units of the std of coefficients w `(5,)`."""
        ratios, image = self.errors.abs() / (self.features[self.right] @ weights).exp(), self.image[self.right]
        return tuple(tuple(map(tuple, ratios[image == i].tolist())) for i in image.unique())


def _labelled(data: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each image with the boxes `(M, 4)` and labels `(M,)` of its objects."""
    whole = is_dataset(data) and hasattr(data, "__len__")
    for item in (data[i] for i in range(len(data))) if whole else data:
        pair = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)
        is_batch = isinstance(pair[1], (tuple, list)) and len(pair[0]) == len(pair[1])
        for image, target in zip(*pair, strict=True) if is_batch else [pair]:
            if not isinstance(target, Mapping) or not {"boxes", "labels"} <= target.keys():
                raise DataError(
                    "expected pairs (image, target), or batches (images, targets), with boxes (M, 4) and labels (M,) "
                    f"in a target; found {shown(target)}. Pass a list of pairs, a data set or a loader."
                )
            boxes, labels = (torch.as_tensor(target[key]).detach().cpu() for key in ("boxes", "labels"))
            boxes = boxes.reshape(-1, 4).double()
            if len(boxes) != len(labels) or not bool((boxes[:, 2:] > boxes[:, :2]).all()):
                raise DataError(
                    "expected boxes (x1, y1, x2, y2) with x1 < x2 and y1 < y2, and a label for each; found "
                    f"{len(boxes)} boxes and {len(labels)} labels, or sides in another order. Convert them first."
                )
            yield image, boxes, labels


def _chosen(
    candidates: dict[str, list[int]], fit: _Formula, losses: _Formula, features: Tensor, target: Tensor, image: Tensor
) -> BoxFit:
    """Compare candidates on images left out of their fits, and fit the one in use to all."""
    left, trivial = CrossValidation(groups=image), next(iter(candidates))
    scores = {name: torch.empty(len(image), dtype=torch.float64) for name in candidates}
    for rest, out in left.splits(len(image)):
        for name, columns in candidates.items():
            scores[name][out] = -losses(features[out] @ fit(features[rest], target[rest], columns), target[out])
    choice = leading(scores, trivial, left)
    candidate = left.candidate(choice, scores[choice] - scores[trivial])
    return BoxFit(tuple(fit(features, target, candidates[choice]).tolist()), candidate)


def fit_std(features: Tensor, errors: Tensor, columns: list[int]) -> Tensor:
    """Fit w `(5,)` to errors `(M, 4)` of boxes with features `(M, 4, 5)`; 0 outside of the columns.

    With z = error / std the slope is `f (1 - z^2)`. The curvature is between Newton's, `2 z^2 f f'`, and its mean
    `2 f f'`: along one feature no step is too long.
    """
    inputs, squares = features[..., columns].flatten(0, 1), errors.square().flatten().clamp_min(1e-24)
    start, ridge = torch.zeros(5, dtype=torch.float64), _RIDGE * torch.eye(len(columns), dtype=torch.float64)
    start[0] = squares.mean().log() / 2
    weights = start[columns]
    for _ in range(100):
        z2 = squares * (-2 * inputs @ weights).exp()
        curvature = inputs.T @ (inputs * (1 + z2)[:, None]) + ridge
        step = torch.linalg.solve(curvature, inputs.T @ (z2 - 1) - ridge @ (weights - start[columns]))
        weights = weights + step
        if float(step.abs().max()) < 1e-9:
            break
    return torch.zeros_like(start).index_copy(0, torch.tensor(columns), weights)


def _std_losses(log_std: Tensor, errors: Tensor) -> Tensor:
    """Return the negative Gaussian log-likelihood of each box, `(M,)`, the mean of its sides without the constant."""
    return (log_std + (errors * (-log_std).exp()).square() / 2).mean(1)


def fit_score(features: Tensor, right: Tensor, columns: list[int]) -> Tensor:
    """Fit v `(5,)` to boxes with features `(N, 5)` that are right or not; without columns it is the model's score."""
    weights = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    ridge = torch.full((len(columns),), _RIDGE, dtype=torch.float64)
    weights[columns] = logistic(features[:, columns], right, ridge, weights[columns])
    return weights
