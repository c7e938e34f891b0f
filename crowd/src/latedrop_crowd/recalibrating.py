"""A calibrated counter for a new scene, from a few of its frames whose people somebody counted.

The counts are refitted, `a · count + b`, and get t-intervals; both are drawn to the old calibration where the frames
say little (see `calibration.recalibration`). What is usual is told by these frames from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from latedrop import LatedropWarning
from latedrop.errors import DataError
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.calibration.recalibration import FEWEST, fit_recalibration
from latedrop_crowd.calibration.usual import Usual
from latedrop_crowd.counting import check_total, prepared
from latedrop_crowd.layouts.annotations import names_of
from latedrop_crowd.mcnn import Trained

__all__ = ["recalibrate_counter"]

_FEW = 10


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

    Raises:
        DataError: a labelled frame is not among the frames, or there are too few.
        OutputError: the density of one sums below 0.
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
        ready = prepared(trained, name, image).to(trained.device)
        reading = before.read(trained, ready, deviations=False)
        check_total(name, reading)
        features = 1.0 if reading.count.strangeness is None else float(reading.count.strangeness)
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
