"""Calibrate a counter on the validation frames of a set, and read the maps of its frames.

The variance of the count is a floor and terms: dropout, the size of the count, and the leverage of what enters the last
layer. Candidates are compared on blocks of frames that were left out of their fits, as neighbouring frames err alike.
Where a network was cross-fitted, each error is that of a network which left its frame's block out; coefficients are
common, while each network's leverage is told by its own training frames. The variance of the map's cells is propagated.

A calibrated counter comes to a new scene by a few of its frames whose people somebody counted: see `recalibration`.
What is usual is told by these frames from then on.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop import (
    Calibration,
    LatedropWarning,
    Predictor,
    Propagation,
    Sites,
    Terms,
    calibrate,
    calibrate_cross_fitted,
    find_sites,
)
from latedrop.devices import versions
from latedrop.errors import DataError
from latedrop.terminal import shown_on
from latedrop.terms import Dropout, Leverage, Size
from latedrop_crowd.blocks import time_blocks
from latedrop_crowd.calibration.recalibration import FEWEST, fit_recalibration
from latedrop_crowd.calibration.record import Cells, CrowdCalibration, FrameBatches, Usual, roi_record
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.layouts.own import names_of
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.regions import Maps, fit_policy, near_cells, to_cells

__all__ = ["calibrate_counter", "read_maps", "recalibrate_counter"]

_RATE = 0.01  # propagated variances are all but proportional to the rate, which the scale takes up
_REFERENCE_FRAMES = 160
# A frame has thousands of cells, so a few frames fix a scale; regions are a few to a frame, so they need more.
_PIXEL_FRAMES, _POLICY_FRAMES = 24, 80


def calibrate_counter(
    trained: Trained, crowd_set: CrowdSet, *, progress: bool = True, folds: Sequence[Trained] = ()
) -> CrowdCalibration:
    """Calibrate a counter on the validation frames of a set.

    Args:
        trained: the network; it is left as it was.
        crowd_set: its validation frames are fitted to; its training frames, if it has any, say what is usual.
        progress: show bars.
        folds: where the network was cross-fitted, those that left blocks of time out, in their order. The count's
            variance is then fitted to the errors of each on its own block: to all training and validation frames.

    A set that does not fit the network, or has too few frames, and missing networks of folds are a `DataError`.
    """
    wanted = int(trained.about.get("folds", 0))
    if wanted != len(folds):
        raise DataError(
            f"expected {wanted or 'no'} networks of folds, as this one was {'' if wanted else 'not '}cross-fitted; "
            f"found {len(folds)}. Keep NAME.fold0.safetensors, ... beside the weights."
        )
    _check_fits(trained, crowd_set)
    chosen, mapped, left_out = crowd_set.validation, trained, []
    if folds:  # the last one stands for all where maps are concerned: its block is the end of the frames
        crowd_set = replace(crowd_set, train=(*crowd_set.train, *crowd_set.validation), validation=())
        blocks = time_blocks(crowd_set.train, len(folds))
        chosen, mapped = blocks[-1], folds[-1]
        for network, block in zip(folds, blocks, strict=True):
            seen = [index for index in crowd_set.train if index not in block]
            inputs = FrameBatches(network, crowd_set, seen[:: max(1, len(seen) // _REFERENCE_FRAMES)])
            left_out.append((network.model, _with_counts(network, crowd_set, block), inputs))
    frames = _with_counts(trained, crowd_set, chosen)
    reference = FrameBatches(trained, crowd_set, _some(crowd_set.train, _REFERENCE_FRAMES))
    sites = find_sites(trained.model, frames.image(chosen[0]))
    count = _of_count(trained, frames, reference, sites, left_out, progress)
    about = {
        "set": crowd_set.name,
        "weights": trained.about.get("set"),
        "frames": {"count": len(chosen), "cells": 0, "reference": len(reference)},
        "enlarge": crowd_set.enlarge,
        "counter": trained.about.get("counter"),
        "versions": {name: versions()[name] for name in ("latedrop", "torch")},
    }
    usual = Usual.of(image for part in (frames, reference) for image in part.images())
    calibration = CrowdCalibration(count, None, None, count.fingerprint, roi_record(trained), about, usual)
    return _with_maps(mapped, calibration, crowd_set, chosen, sites, progress) if crowd_set.has_points else calibration


def _with_counts(trained: Trained, crowd_set: CrowdSet, indices: Sequence[int]) -> FrameBatches:
    return FrameBatches(trained, crowd_set, indices, lambda index: crowd_set.counts([index]))


def _of_count(
    trained: Trained, counts: FrameBatches, reference: FrameBatches, sites: Sites, folds: Sequence[Any], progress: bool
) -> Calibration:
    """The record of the count: a floor and the terms that win on blocks of frames."""
    if not len(reference):
        warnings.warn(
            "expected training frames, which say what frames are usual; found none, and the validation frames stand "
            "in. Ordinary frames of other hours will often be called strange.",
            LatedropWarning,
            stacklevel=3,
        )
    usable = [site.name for site in sites if site.batch_axis is not None and not site.moved and not site.skipped]
    terms = (Dropout("first order"), Size(1), Leverage())
    options: dict[str, Any] = {
        "method": Terms(terms, features=usable[-1:] or None, folds="blocks"),
        "reference": reference if len(reference) else None,
        "readout": trained.count_of,
        "sites": sites,
        "intervals": "gaussian",  # as the console's probabilities are
        "progress": progress,
    }
    if folds:
        return calibrate_cross_fitted(trained.model, counts, folds, **options).calibration
    predictor: Predictor = calibrate(trained.model, counts, task="regression", **options)
    return predictor.calibration


def _with_maps(
    trained: Trained,
    calibration: CrowdCalibration,
    crowd_set: CrowdSet,
    chosen: Sequence[int],
    sites: Sites,
    progress: bool,
) -> CrowdCalibration:
    """The calibration with that of the cells, and with what to reject."""
    cells = Cells(trained)

    def true_cells(index: int) -> Tensor:
        return cells(crowd_set.density(index, trained.stride)[None].to(trained.device)).cpu()

    maps = FrameBatches(trained, crowd_set, _some(chosen, _PIXEL_FRAMES), true_cells)
    method = Propagation((_RATE,), mean="model", floor=True)
    with warnings.catch_warnings():
        # Where all channels of a cell are off no mask moves it; that is known of ReLU networks, and in the record.
        warnings.filterwarnings("ignore", "of .* validation values, some have zero variance", LatedropWarning)
        warnings.filterwarnings("ignore", "only .* validation rows", LatedropWarning)
        predictor: Predictor = calibrate(
            trained.model, maps, readout=cells, per_output=False, method=method, sites=sites, progress=progress
        )
    # The network of a fold may stand for the final one.
    pixels = replace(predictor.calibration, fingerprint=calibration.fingerprint)
    about = {**calibration.about, "frames": {**calibration.about["frames"], "cells": len(maps)}}
    frames = _some(chosen, _POLICY_FRAMES)
    measured = read_maps(trained, calibration, crowd_set, frames, deviations=False, progress=progress)
    near = near_cells(crowd_set.sigma, trained.stride)
    policy = fit_policy(measured, near=near, features=("mass", "isolation"))
    return replace(calibration, pixels=pixels, about=about, policy=policy)


def read_maps(
    trained: Trained,
    calibration: CrowdCalibration,
    crowd_set: CrowdSet,
    indices: Sequence[int],
    *,
    deviations: bool = True,
    progress: bool = True,
) -> Maps:
    """Density, deviations and true heads of some frames of a set, all of one size, for `regions`.

    Without `deviations` these are zeros, for what looks at densities alone.
    """
    if deviations and calibration.pixels is None:
        raise DataError("expected a calibration of the map's cells; found one of counts alone. Calibrate with heads.")
    cells, frames, means, stds = Cells(trained), FrameBatches(trained, crowd_set, indices), [], []
    predictor = Predictor(trained.model, calibration.pixels, cells) if deviations and calibration.pixels else None
    for index in shown_on(indices, "reading maps", unit="frames", show=progress):
        x = frames.image(index)
        if predictor is None:
            with torch.no_grad():
                mean = cells.spread(cells(trained.model(x))[0], x)
            std = np.zeros_like(mean)
        else:
            prediction = predictor.predict(x)
            mean, std = (cells.spread(part[0], x) for part in (prediction.mean, prediction.std))
        means.append(mean.astype(np.float32))
        stds.append(std.astype(np.float32))
    heads = [to_cells(crowd_set.heads(index), trained.stride) for index in indices]
    roi = None if trained.roi is None else trained.roi.cpu().numpy()
    return Maps(np.stack(means), np.stack(stds), heads, roi)


def _check_fits(trained: Trained, crowd_set: CrowdSet) -> None:
    """Raise where a set is not as the network was trained on it, or has too few validation frames."""
    if crowd_set.enlarge != trained.enlarge:
        raise DataError(
            f"expected frames enlarged {trained.enlarge} times, as the network was trained with; found "
            f"{crowd_set.enlarge}. Open the set with enlarge={trained.enlarge}."
        )
    rois = None if trained.roi is None else trained.roi.cpu(), crowd_set.cells(trained.stride)
    if not (rois[0] is rois[1] if None in rois else torch.equal(*rois)):  # type: ignore[arg-type]
        shapes = ["none" if roi is None else f"{roi.shape[0]} x {roi.shape[1]} cells" for roi in rois]
        raise DataError(
            f"expected the network's region of interest ({shapes[0]}); found another in {crowd_set.name} "
            f"({shapes[1]}). Open the set that the network was trained for."
        )
    if len(crowd_set.validation) < 2:
        raise DataError(
            f"expected at least 2 validation frames in {crowd_set.name}, and better a hundred; found "
            f"{len(crowd_set.validation)}."
        )


def _some(indices: Sequence[int], most: int) -> list[int]:
    """At most so many, evenly spaced, from the first to the last."""
    if not len(indices):
        return []
    at = np.unique(np.linspace(0, len(indices) - 1, min(most, len(indices))).round().astype(int))
    return [indices[i] for i in at]


_FEW = 10  # labelled frames: fewer are warned of


def recalibrate_counter(
    trained: Trained,
    calibration: CrowdCalibration,
    frames: Iterable[tuple[str, Tensor]],
    counts: Mapping[str, int],
) -> CrowdCalibration:
    """The calibration for a new scene; the old one stays as it is.

    Args:
        trained: the network.
        calibration: made for it; an earlier recalibration is left out.
        frames: pairs of a name and an image `(C, H, W)` in [0, 1], in their order in time. Those that are not labelled
            are passed over.
        counts: people by the name of a frame, or by that without its ending, or by its number in a video; 10 to 40
            frames, spread over the scene.

    A labelled frame that is not among the frames, or too few of them, are a `DataError`.
    """
    if len(counts) < FEWEST:
        raise DataError(
            f"expected the people of {FEWEST} frames or more, better of 20 spread over the scene; found {len(counts)}. "
            "Count more."
        )
    before, left, rows, images = replace(calibration, recalibration=None), dict(counts), [], []
    for name, image in frames:
        key = next((key for key in names_of(name) if key in left), None)
        if key is None:
            continue
        ready = trained.prepared(name, image)
        reading = before.read(trained, ready, deviations=False).check(name)
        features = 1.0 if reading.count.novelty is None else float(reading.count.novelty)
        rows.append((reading.mean, reading.fitted_variance, float(left.pop(key)), features))
        images.append(ready)
        if not left:
            break
    if left:
        some = ", ".join(list(left)[:3]) + (", ..." if len(left) > 3 else "")
        raise DataError(
            f"expected all {len(counts)} labelled frames among the frames; missing: {some}. Check their names."
        )
    count, variance, truth, strange = np.array(rows).reshape(-1, 4).T
    fitted = fit_recalibration(count, variance, truth, float(max(strange, default=1.0)))
    if len(rows) < _FEW:
        warnings.warn(
            f"only {len(rows)} labelled frames: the new counts are rough. 20 frames spread over the scene serve well.",
            LatedropWarning,
            stacklevel=2,
        )
    return replace(calibration, recalibration=fitted, usual=Usual.of(images))
