"""The variance of a count by terms: dropout, the size of the count, and the leverage of what enters the last layer.

Candidates are compared on blocks of frames that were left out of their fits, as neighbouring frames err alike. Where a
network was cross-fitted, each error is that of a network which left its frame's block out; coefficients are common,
while each network's leverage is told by its own training frames.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from latedrop import Calibration, Terms
from latedrop.calibration.measure import MeasuredTerms, measure_terms
from latedrop.calibration.methods import Plan
from latedrop.crowd.blocks import time_blocks
from latedrop.crowd.calibration.cells import FrameBatches, FrameInputs
from latedrop.crowd.layouts import CrowdSet
from latedrop.crowd.mcnn import Trained
from latedrop.errors import LatedropWarning
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.prediction.calibrate import record_terms
from latedrop.terms import Dropout, Leverage, Size

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
    plan = Plan(
        method=Terms(terms, features=usable[-1:] or None, folds="blocks"),
        reference=reference if len(reference) else None,
        readout=trained.count_of,
        sites=sites,
        progress=progress,
    )
    network = Network(trained.model)
    if not folds:
        return record_terms(network, measure_terms(network, counts, plan), plan)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only .* validation rows", LatedropWarning)  # of each, not of all together
        # The final network has seen every frame; its errors are not used, but those of the networks of the folds.
        warnings.filterwarnings("ignore", ".* among the reference rows", LatedropWarning)
        measured = [
            measure_terms(Network(one.model), held, replace(plan, reference=seen, readout=one.count_of))
            for one, held, seen in folds
        ]
        final = measure_terms(network, counts, plan)
    return record_terms(network, _joined(final, measured), plan)[0]


def _joined(final: MeasuredTerms, parts: Sequence[MeasuredTerms]) -> MeasuredTerms:
    """The final network's terms, with what the others measured on the frames that they left out."""
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in final.columns}
    leverage = [part.leverage for part in parts if part.leverage is not None]
    return replace(
        final,
        mean=torch.cat([part.mean for part in parts]),
        target=torch.cat([part.target for part in parts]),
        columns=columns,
        leverage=torch.cat(leverage) if len(leverage) == len(parts) else None,
    )
