"""Calibrate a counter on the validation frames of a set, and read the maps of its frames."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from latedrop import Calibration, LatedropWarning, Predictor, Propagation, Sampling, Sites, calibrate, find_sites
from latedrop.devices import versions
from latedrop.errors import ArgumentError, DataError
from latedrop.progress import shown_on
from latedrop_crowd.blocks import time_blocks
from latedrop_crowd.calibration.cells import Cells, FrameBatches, FrameInputs
from latedrop_crowd.calibration.count_terms import Fold, count_by_terms, left_out
from latedrop_crowd.calibration.record import METHODS, Choice, CrowdCalibration, CrowdMethod, roi_record
from latedrop_crowd.calibration.usual import Usual
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import STRIDE, Trained
from latedrop_crowd.regions import Maps, fit_policy, near_cells, to_cells

__all__ = ["calibrate_counter", "counted_heads", "read_maps"]

# Injected dropout ruins counts at large rates, so the paper looks below 0.01. Propagated variances of the cells are all
# but proportional to the rate, which the scale takes up: one rate is enough.
_SAMPLED_RATES = (0.001, 0.002, 0.005, 0.01)
_PROPAGATED_RATES = (0.01,)
_REFERENCE_FRAMES = 160
# A frame has thousands of cells, so a few frames fix a scale; regions are a few to a frame, so they need more.
_PIXEL_FRAMES, _POLICY_FRAMES = 24, 80


def calibrate_counter(
    trained: Trained,
    crowd_set: CrowdSet,
    method: CrowdMethod = "sampling-free",
    *,
    rates: Sequence[float] | None = None,
    draws: int = 50,
    scale: Choice = "optimal",
    floor: bool = True,
    every: int = 1,
    policy: bool = True,
    seed: int = 0,
    progress: bool = True,
    folds: Sequence[Trained] = (),
) -> CrowdCalibration:
    """Calibrate a counter on the validation frames of a set.

    Args:
        trained: the network; it is left as it was.
        crowd_set: its validation frames are fitted to; its training frames, if it has any, say what is usual.
        method: `"sampling-free"` suits a CPU; `"sample"` runs `draws` thinned networks, GPU work for large frames.
        rates: to choose from with `"sample"`: the count's NLL decides, and the cells take the same rate, so that one
            run of draws serves both. Without sampling, the rate that the cells' variance is propagated at.
        draws: thinned networks per rate.
        scale: which scale intervals use: `"optimal"`, `"relaxed"` or a number.
        floor: fit a constant variance beside the scale: what is left where no mask moves the output. The count has one
            anyway without sampling.
        every: use each k-th validation frame only.
        policy: also choose which regions to reject.
        seed: fixes all masks.
        progress: show bars.
        folds: where the network was cross-fitted, those that left blocks of time out, in their order. The count's
            variance is then fitted to the errors of each on its own block: to all training and validation frames.

    Raises:
        DataError: the set's region of interest or size of frames is not the network's, it has too few frames, or the
            networks of the folds are missing.
    """
    if method not in METHODS:
        raise ArgumentError(f"expected method 'sampling-free' or 'sample'; found {method!r}.")
    _check_folds(trained, folds, method)
    chosen, mapped = _chosen(trained, crowd_set, every), trained
    if folds:  # the last one stands for all where maps are concerned: its block is the end of the frames
        crowd_set = replace(crowd_set, train=(*crowd_set.train, *crowd_set.validation), validation=())
        chosen, mapped = time_blocks(crowd_set.train, len(folds))[-1][::every], folds[-1]
    options: dict[str, Any] = {"progress": progress}
    if method == "sample":
        options["method"] = Sampling(rates or _SAMPLED_RATES, draws, floor=floor, scale=scale, seed=seed)
    held = left_out(folds, crowd_set, every)
    found, sites = _of_count(trained, crowd_set, chosen, method, every, options, held, scale)
    if not crowd_set.has_points:
        return found
    if method == "sample":
        # The count chooses the rate, and one run of draws serves both.
        options["method"] = replace(options["method"], rates=[found.count.rate])
    else:
        options["method"] = Propagation(rates or _PROPAGATED_RATES, mean="model", floor=floor, scale=scale)
    return _with_maps(mapped, found, crowd_set, chosen, policy, options | {"sites": sites})


def _of_count(
    trained: Trained,
    crowd_set: CrowdSet,
    chosen: Sequence[int],
    method: CrowdMethod,
    every: int,
    options: dict[str, Any],
    folds: Sequence[Fold],
    scale: Choice,
) -> tuple[CrowdCalibration, Sites]:
    """The calibration of the count alone, and where dropout goes."""
    counts = FrameBatches(trained, crowd_set, chosen, None)
    reference = FrameInputs(trained, crowd_set, _some(crowd_set.train, _REFERENCE_FRAMES))
    sites = find_sites(trained.model, counts.image(chosen[0]))
    if method == "sample":
        own: Predictor = calibrate(trained.model, counts, readout=trained.count_of, sites=sites, **options)
        count = own.calibration
    else:
        count = count_by_terms(trained, counts, reference, sites=sites, folds=folds, **options).with_choice(scale)
    about = _about(trained, crowd_set, len(chosen), len(reference), every)
    usual = Usual.of(image for part in (counts.images(), reference) for image in part)
    return CrowdCalibration(method, count, None, None, count.fingerprint, roi_record(trained), about, usual), sites


def _with_maps(
    trained: Trained,
    found: CrowdCalibration,
    crowd_set: CrowdSet,
    chosen: Sequence[int],
    policy: bool,
    options: dict[str, Any],
) -> CrowdCalibration:
    """The calibration with that of the cells, and with what to reject."""
    maps = FrameBatches(trained, crowd_set, _some(chosen, _PIXEL_FRAMES), Cells(trained))
    pixels = _calibrated_cells(trained, maps, **options)
    about = {**found.about, "frames": {**found.about["frames"], "cells": len(maps)}}
    own = replace(pixels, fingerprint=found.fingerprint)  # the network of a fold may stand for the final one
    if not policy:
        return replace(found, pixels=own, about=about)
    known = replace(found, pixels=pixels)
    frames = _some(chosen, _POLICY_FRAMES)
    measured = read_maps(trained, known, crowd_set, frames, deviations=False, progress=options["progress"])
    near = near_cells(crowd_set.sigma, trained.stride)
    rejected = fit_policy(measured, near=near, features=("mass", "isolation"))
    return replace(found, pixels=own, about=about, policy=rejected)


def _check_folds(trained: Trained, folds: Sequence[Trained], method: str) -> None:
    wanted = int(trained.about.get("folds", 0))
    if wanted != len(folds):
        raise DataError(
            f"expected the {wanted} networks of the folds, as this one was trained on all frames; found {len(folds)}. "
            "Keep NAME.fold0.safetensors, ... beside the weights."
            if wanted
            else f"expected no networks of folds, as this one was not cross-fitted; found {len(folds)}."
        )
    if folds and method == "sample":
        raise ArgumentError("expected method 'sampling-free' for a network that was cross-fitted; found 'sample'.")


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
    if calibration.pixels is None:
        raise DataError("expected a calibration of the map's cells; found one of counts alone. Calibrate with heads.")
    cells, frames = Cells(trained), FrameBatches(trained, crowd_set, indices, None)
    predictor = Predictor(trained.model, calibration.pixels, cells)
    means, stds, heads = [], [], []
    for index in shown_on(indices, "reading maps", unit="frames", show=progress):
        x = frames.image(index)
        if deviations:
            mean, std = cells.maps(predictor.predict(x), x)
        else:
            with torch.no_grad():
                mean = cells.spread(cells(trained.model(x))[0], x)
            std = np.zeros_like(mean)
        means.append(mean.astype(np.float32))
        stds.append(std.astype(np.float32))
        heads.append(counted_heads(crowd_set, index, trained.stride))
    roi = None if trained.roi is None else trained.roi.cpu().numpy()
    return Maps(np.stack(means), np.stack(stds), heads, roi)


def counted_heads(crowd_set: CrowdSet, index: int, stride: int = STRIDE) -> npt.NDArray[np.float64]:
    """The heads of a frame that count, `(P, 2)` as x, y in cells."""
    return to_cells(crowd_set.heads(index), stride)


def _chosen(trained: Trained, crowd_set: CrowdSet, every: int) -> tuple[int, ...]:
    """Each k-th validation frame of a set that fits the network."""
    if every < 1:
        raise ArgumentError(f"expected every to be at least 1 frame; found {every}.")
    _check_set(trained, crowd_set)
    chosen = crowd_set.validation[::every]
    if len(chosen) < 2:
        raise DataError(
            f"expected at least 2 validation frames in {crowd_set.name}, and better a hundred; found {len(chosen)}."
        )
    return chosen


def _calibrated_cells(trained: Trained, maps: FrameBatches, **settings: Any) -> Calibration:
    with warnings.catch_warnings():
        # Where all channels of a cell are off no mask moves it; that is known of ReLU networks, and in the record.
        warnings.filterwarnings("ignore", "of .* validation values, some have zero variance", LatedropWarning)
        warnings.filterwarnings("ignore", "only .* validation rows", LatedropWarning)
        found: Predictor = calibrate(trained.model, maps, readout=maps.cells, per_output=False, **settings)
        return found.calibration


def _check_set(trained: Trained, crowd_set: CrowdSet) -> None:
    enlarge = trained.enlarge
    if crowd_set.enlarge != enlarge:
        raise DataError(
            f"expected frames enlarged {enlarge} times, as the network was trained with; found {crowd_set.enlarge}. "
            f"Open the set with enlarge={enlarge}."
        )
    theirs, ours = crowd_set.cells(trained.stride), None if trained.roi is None else trained.roi.cpu()
    same = ours is theirs if ours is None or theirs is None else torch.equal(theirs, ours)
    if not same:
        said = ["none" if roi is None else f"{roi.shape[0]} x {roi.shape[1]} cells" for roi in (ours, theirs)]
        raise DataError(
            f"expected the network's region of interest ({said[0]}); found another in {crowd_set.name} ({said[1]}). "
            "Open the set that the network was trained for."
        )


def _about(trained: Trained, crowd_set: CrowdSet, frames: int, reference: int, every: int) -> dict[str, Any]:
    return {
        "set": crowd_set.name,
        "weights": trained.about.get("set"),
        "frames": {"count": frames, "cells": 0, "reference": reference},
        "every": every,
        "enlarge": crowd_set.enlarge,
        "counter": trained.about.get("counter"),
        "versions": {name: versions()[name] for name in ("latedrop", "torch")},
    }


def _some(indices: Sequence[int], most: int) -> list[int]:
    """At most so many, evenly spaced, from the first to the last."""
    if not len(indices):
        return []
    at = np.unique(np.linspace(0, len(indices) - 1, min(most, len(indices))).round().astype(int))
    return [indices[i] for i in at]
