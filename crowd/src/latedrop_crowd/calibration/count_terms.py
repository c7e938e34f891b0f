"""The variance of a count by terms: dropout, the size of the count, and the leverage of what enters the last layer.

Candidates are compared on blocks of frames that were left out of their fits, as neighbouring frames err alike. Where a
network was cross-fitted, each error is that of a network which left its frame's block out; coefficients are common,
while each network's leverage is told by its own training frames.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from latedrop import Calibration, LatedropWarning, Predictor, Sites, Terms, calibrate, calibrate_cross_fitted
from latedrop.terms import Dropout, Leverage, Size
from latedrop_crowd.blocks import time_blocks
from latedrop_crowd.calibration.cells import FrameBatches, FrameInputs
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained

__all__ = ["Fold", "count_by_terms", "left_out"]

Fold = tuple[Trained, FrameBatches, FrameInputs]
"""A network, the frames that it left out, and frames that it was trained on."""
_REFERENCE_FRAMES = 160


def left_out(folds: Sequence[Trained], crowd_set: CrowdSet, every: int) -> list[Fold]:
    """The networks of a cross-fitted one with the frames that each left out, in the order of time."""
    found = []
    for network, block in zip(folds, time_blocks(crowd_set.train, max(1, len(folds))), strict=bool(folds)):
        seen = [index for index in crowd_set.train if index not in block]
        step = max(1, len(seen) // _REFERENCE_FRAMES)
        inputs = FrameInputs(network, crowd_set, seen[::step])
        found.append((network, FrameBatches(network, crowd_set, block[::every], None), inputs))
    return found if folds else []


def count_by_terms(
    trained: Trained,
    counts: FrameBatches,
    reference: FrameInputs,
    *,
    sites: Sites,
    folds: Sequence[Fold] = (),
    progress: bool = True,
) -> Calibration:
    """The record of the count: a floor and the terms that win on blocks of frames."""
    if not len(reference):
        warnings.warn(
            "expected training frames, which say what frames are usual; found none, and the validation frames stand "
            "in. Ordinary frames of other hours will often be called strange.",
            LatedropWarning,
            stacklevel=4,
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
        parts = [(network.model, frames, seen) for network, frames, seen in folds]
        return calibrate_cross_fitted(trained.model, counts, parts, **options).calibration
    predictor: Predictor = calibrate(trained.model, counts, task="regression", **options)
    return predictor.calibration
