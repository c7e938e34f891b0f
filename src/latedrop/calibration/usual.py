"""What a stream should know of the validation rows, from the record of a calibration."""

from __future__ import annotations

from dataclasses import replace

from latedrop.calibration.record import Calibration
from latedrop.streams.bag import from_curve
from latedrop.streams.usual import Usual

__all__ = ["usual_of"]


def usual_of(calibration: Calibration) -> Usual:
    """Errors from the calibration curve of the scale in use; strangeness and shares from the terms."""
    found = Usual() if calibration.terms is None else calibration.terms.usual or Usual()
    curves = {"optimal": "scaled", "relaxed": "relaxed"}
    curve = curves.get(calibration.choice) if isinstance(calibration.choice, str) else None
    if curve is None:
        return found
    known = from_curve(calibration.curves["levels"], calibration.curves[curve], calibration.rows)
    return replace(found, errors=known)
