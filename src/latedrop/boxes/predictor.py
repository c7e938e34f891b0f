"""Object detectors: a std for each side of a box, margins that hold, and the probability that a box is right.

Draws of thinned networks are matched to the plain boxes (`latedrop.boxes.detections`). Their std and their mean score
are features of two small models (`latedrop.boxes.record`): one of the std, fitted by the Gaussian likelihood

    sum over sides of  w · f + (error · exp(-w · f))^2 / 2,

which is convex in w, and a logistic regression of whether a box is right. What they look at is chosen on images left
out of the fits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from latedrop.boxes.detections import BoxOptions, Collate, Detections, Detector, Readout, matched
from latedrop.boxes.record import BOXES, FEATURES, BoxCalibration, BoxErrors, BoxFit, features
from latedrop.calibration.cross_validation import CrossValidation, leading
from latedrop.calibration.logistic import logistic
from latedrop.calibration.seen import marks_of, merged, sketch, warn_of_fitted_rows
from latedrop.data.batches import row_total
from latedrop.data.datasets import is_dataset
from latedrop.errors import ArgumentError, DataError, FileError, LatedropWarning
from latedrop.files import read_text, write_aside
from latedrop.network.network import check_module
from latedrop.network.sites import Sites
from latedrop.options import shown
from latedrop.progress import shown_on
from latedrop.quantiles import checked_level
from latedrop.records import naming
from latedrop.weights import Weights, fingerprint

__all__ = ["BoxPrediction", "BoxPredictor", "calibrate_boxes", "load_boxes"]

Pair: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""An image with the boxes and the labels of its objects."""
_FEWEST = 30  # matched boxes
_AT_ONCE = 64  # images that are looked at together, to find some of one size
_RIDGE, _FREE = 1.0, 1e-3
_STD = {"constant": (0,), "score": (0, 2, 3), "draws": (0, 1, 2, 3, 4)}
_RIGHT = {"model": (), "share": (0,), "score": (0, 3), "draws": (0, 1, 2, 3, 4)}
"""Which features the candidates look at; the first is in use unless another leads."""


@dataclass(frozen=True)
class BoxPrediction(Detections):
    """The boxes of one image with their calibration; all else is the model's own, or what its draws say.

    Attributes:
        calibration: what turns that into std and probabilities.
    """

    calibration: BoxCalibration

    @property
    def std(self) -> Tensor:
        """`(K, 4)`, of the error of each side, if the box finds an object."""
        return self.calibration.std(features(self)).exp()

    @property
    def probabilities(self) -> Tensor:
        """`(K,)`, that a box is right: it finds an object of its class that no better box finds."""
        return self.calibration.score(features(self).mean(1)).sigmoid()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends `(K, 4)` of an interval for each side alone."""
        radii = [self._errors.radius(checked_level(level), side) for side in range(4)]
        width = self.std * torch.tensor(radii, dtype=torch.float64)
        return self.boxes - width, self.boxes + width

    def margins(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return an inner and an outer box `(K, 4)`: all four sides of the object lie between with that probability.

        An inner box may be empty, with x1 above x2 or y1 above y2.
        """
        width = self.std * self._errors.radius(checked_level(level))
        outwards = width * torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
        return self.boxes - outwards, self.boxes + outwards

    @property
    def _errors(self) -> BoxErrors:
        if self.calibration.errors is None:
            raise ArgumentError(
                "expected a predictor with margins, from images used for nothing else; found one without. Call "
                "uq = uq.conformal(data) first."
            )
        return self.calibration.errors

    def __repr__(self) -> str:
        return f"BoxPrediction of {len(self)} boxes, {float(self.probabilities.sum()):.1f} of them expected to be right"


class BoxPredictor:
    """A detector with its calibration; `calibrate_boxes` makes it. The model is untouched."""

    def __init__(self, calibration: BoxCalibration, detector: Detector) -> None:
        self.model = model = detector.model
        self.calibration = calibration
        self._weights = Weights(model, calibration.fingerprint)
        self._detector = detector

    def predict(self, images: Iterable[Tensor]) -> list[BoxPrediction]:
        """Predict the boxes of each image `(C, H, W)`; images may have several sizes."""
        if not self._weights.are_same(self.model):
            self._weights.check(self.model)
        return [
            BoxPrediction(**vars(each), calibration=self.calibration) for each in self._detector.detect(list(images))
        ]

    def conformal(self, data: Any, *, progress: bool = True) -> BoxPredictor:
        """Return the same predictor with margins, from images used for nothing else."""
        rows = _rows(self._detector, _pairs(data), row_total(data), progress)
        rows = [row for row in rows if bool(row.hit.any())]
        if not rows:
            raise DataError(
                "expected images with boxes that find an object; found none. Pass others to conformal(...)."
            )
        inputs = [features(row.detections)[row.hit] for row in rows]
        ratios = [row.errors.abs() / self.calibration.std(f).exp() for f, row in zip(inputs, rows, strict=True)]
        marks = _marks(rows)
        warn_of_fitted_rows(self.calibration.seen, marks, stacklevel=2)
        errors = BoxErrors(tuple(map(tuple, torch.cat(ratios).tolist())), tuple(map(len, ratios)))
        seen = merged(self.calibration.seen, sketch(marks))
        return BoxPredictor(replace(self.calibration, errors=errors, seen=seen), self._detector)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, whole or not at all; the weights are not in it."""
        write_aside(path, BOXES.to_json(self.calibration).encode())

    def __repr__(self) -> str:
        return f"BoxPredictor of {type(self.model).__name__}: {self.calibration}"


def calibrate_boxes(
    model: nn.Module,
    data: Any,
    *,
    rate: float = 0.02,
    draws: int = 20,
    seed: int = 0,
    overlap: float = 0.5,
    least_score: float = 0.05,
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
        rate: probability that a unit is dropped.
        draws: number of thinned networks.
        seed: fixes all masks.
        overlap: what a box and an object have in common at least (IoU), for the box to be right.
        least_score: boxes of lower scores are left out.
        collate: from a list of images to what the model takes, where that is no list.
        readout: from the model's output to a list of dicts, where it is none.
        batch_size: images that run at once.
        progress: whether to show how far it is.
    """
    check_module(model)
    for name, value in {"rate": rate, "overlap": overlap, "least_score": least_score}.items():
        if not 0 <= value < 1:
            raise ArgumentError(f"expected {name} of at least 0 and below 1; found {value!r}. See calibrate_boxes().")
    if draws < 2:
        raise ArgumentError(f"expected at least 2 draws; found {draws!r}. About 20 are enough.")
    options = BoxOptions(sites=Sites(), rate=rate, draws=draws, seed=seed, overlap=overlap, least_score=least_score)
    detector = Detector(model, options, collate, readout, batch_size)
    pairs = _pairs(data)
    first = next(pairs, None)
    if first is None:
        raise DataError("expected images with their objects; found none. Pass a list of (image, target).")
    detector = detector.with_sites(first[0])
    rows = _rows(detector, chain([first], pairs), row_total(data), progress)
    f = torch.cat([features(row.detections) for row in rows])
    hit, errors = torch.cat([row.hit for row in rows]), torch.cat([row.errors for row in rows])
    image = torch.cat([torch.full((len(row.hit),), i) for i, row in enumerate(rows)])
    objects = sum(row.objects for row in rows)
    if int(hit.sum()) < _FEWEST:
        raise DataError(
            f"expected at least {_FEWEST} boxes that find an object; found {int(hit.sum())}, of {len(hit)} boxes and "
            f"{objects} objects in {len(rows)} images. Pass more images; labels must be numbered as the model numbers "
            "them."
        )
    functions = {"collate": collate, "readout": readout}
    calibration = BoxCalibration(
        std=_chosen(_STD, image[hit], partial(_fit_std, f[hit], errors), partial(_std_losses, f[hit], errors)),
        score=_chosen(_RIGHT, image, partial(_fit_score, f.mean(1), hit), partial(_score_losses, f.mean(1), hit)),
        images=len(rows),
        boxes=len(hit),
        matched=len(errors),
        objects=objects,
        options=detector.options,
        functions=tuple(name for name, value in functions.items() if value is not None),
        fingerprint=fingerprint(model),
        seen=sketch(_marks(rows)),
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
    text = read_text(path, "a calibration of a detector")
    with naming(path):
        calibration = BOXES.from_json(text)
    given = {"collate": collate, "readout": readout}
    absent = [name for name in calibration.functions if given.get(name) is None]
    if absent:
        raise FileError(
            f"expected {absent[0]}=, as {path} was made with such a function, which a file cannot hold. Pass the same "
            "function to load_boxes()."
        )
    if fingerprint(model) != calibration.fingerprint:
        warn(
            f"the model's weights are not those that {path} was made with: its margins may not hold. Calibrate again "
            "after training.",
            LatedropWarning,
            stacklevel=2,
        )
    return BoxPredictor(calibration, Detector(model, calibration.options, collate, readout, batch_size))


@dataclass(frozen=True)
class _Row:
    """One image with objects: its boxes, which of them find an object, and the errors of these, `(hits, 4)`."""

    detections: Detections
    hit: Tensor
    errors: Tensor
    objects: int


def _rows(detector: Detector, pairs: Iterable[Pair], total: int | None, show: bool) -> list[_Row]:
    """Run a detector over images, and match its boxes with their objects."""
    rows, left = list[_Row](), iter(shown_on(pairs, "boxes of images", total, "images", show=show))
    while part := list(islice(left, _AT_ONCE)):
        for detections, (_, boxes, labels) in zip(detector.detect([image for image, *_ in part]), part, strict=True):
            which = matched(detections.boxes, detections.labels, boxes, labels, detector.options.overlap)
            hit = which >= 0
            rows.append(_Row(detections, hit, boxes[which[hit]] - detections.boxes[hit], len(boxes)))
    return rows


def _pairs(data: Any) -> Iterator[Pair]:
    """Yield each image with the boxes `(M, 4)` and labels `(M,)` of its objects."""
    whole = is_dataset(data) and hasattr(data, "__len__")
    for item in (data[i] for i in range(len(data))) if whole else data:
        several = isinstance(item, (tuple, list)) and len(item) == 2
        if not several or not (isinstance(item[1], Mapping) or len(item[0]) == len(item[1])):
            raise DataError(
                f"expected pairs (image, target), or batches (images, targets); found {shown(item)}. Pass a list of "
                "pairs, a data set or a loader."
            )
        for image, target in [item] if isinstance(item[1], Mapping) else zip(*item, strict=True):
            boxes, labels = (torch.as_tensor(target[key]).detach().cpu() for key in ("boxes", "labels"))
            boxes = boxes.reshape(-1, 4).double()
            if len(boxes) != len(labels) or not bool((boxes[:, 2:] > boxes[:, :2]).all()):
                raise DataError(
                    f"expected boxes (x1, y1, x2, y2) with x1 < x2 and y1 < y2, and a label for each; found "
                    f"{len(boxes)} boxes and {len(labels)} labels, or sides in another order. Convert them first."
                )
            yield image, boxes, labels


def _marks(rows: Sequence[_Row]) -> Any:
    boxes = torch.cat([row.detections.boxes[row.hit] for row in rows])
    return marks_of(boxes, boxes + torch.cat([row.errors for row in rows]))


def _chosen(
    options: Mapping[str, tuple[int, ...]],
    image: Tensor,
    fit: Callable[[Any, tuple[int, ...]], Tensor],
    losses: Callable[[Tensor, Any], Tensor],
) -> BoxFit:
    """Compare candidates on images left out of their fits, and fit the one in use to all."""
    left, home = CrossValidation(groups=image), next(iter(options))
    scores = {name: torch.empty(len(image), dtype=torch.float64) for name in options}
    for rest, out in left.splits(len(image)):
        for name, columns in options.items():
            scores[name][out] = -losses(fit(rest, columns), out)
    choice = leading(scores, home, left)
    candidates = tuple(left.candidate(name, score - scores[home]) for name, score in scores.items())
    return BoxFit(tuple(fit(slice(None), options[choice]).tolist()), choice, candidates)


@torch.inference_mode(False)
@torch.enable_grad()
def _fit_std(f: Tensor, errors: Tensor, rows: Any, columns: tuple[int, ...]) -> Tensor:
    """Fit w `(5,)` to errors `(M, 4)` of boxes with features `(M, 4, 5)`; 0 outside of the columns."""
    at = list(columns)
    inputs, error = f[rows].flatten(0, 1), errors[rows].flatten()
    center, size = inputs.mean(0), inputs.std(0).clamp_min(1e-6)
    center[0], size[0] = 0.0, 1.0
    inputs = ((inputs - center) / size)[:, at]
    size_of_all = error.square().mean().clamp_min(1e-12).sqrt()
    weights = torch.zeros(len(at), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def cost() -> Tensor:
        optimiser.zero_grad()
        log_std = inputs @ weights
        fit = log_std + (error / size_of_all * (-log_std).exp()).square() / 2
        total = fit.mean() + _RIDGE * weights[1:].square().sum() / (2 * len(error))
        total.backward()
        return total

    optimiser.step(cost)
    result = torch.zeros(FEATURES, dtype=torch.float64)
    result[at] = weights.detach() / size[at]
    result[0] += size_of_all.log() - (result * center).sum()
    return result


def _std_losses(f: Tensor, errors: Tensor, weights: Tensor, rows: Any) -> Tensor:
    log_std = f[rows] @ weights
    return (log_std + (errors[rows] * (-log_std).exp()).square() / 2).mean(1)


def _fit_score(f: Tensor, hit: Tensor, rows: Any, columns: tuple[int, ...]) -> Tensor:
    """Fit v `(5,)` to boxes with features `(N, 5)` that are right or not; without columns the model's own score."""
    at, weights = list(columns), torch.zeros(FEATURES, dtype=torch.float64)
    weights[3] = float(3 in at or not at)
    if at:
        free = torch.full((len(at),), _FREE, dtype=torch.float64)
        weights[at] = logistic(f[rows][:, at], hit[rows].double(), free, weights[at])
    return weights


def _score_losses(f: Tensor, hit: Tensor, weights: Tensor, rows: Any) -> Tensor:
    return binary_cross_entropy_with_logits(f[rows] @ weights, hit[rows].double(), reduction="none")
