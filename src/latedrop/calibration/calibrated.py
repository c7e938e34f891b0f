"""What every calibrated model has, of whatever task: the model, its record, and how it is run."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from typing import Generic, TypeVar

from torch import nn

from latedrop.calibration.classes.record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.calibration.saving import save_calibration
from latedrop.calibration.weights import Weights
from latedrop.model.calling import Readout
from latedrop.model.items import Collate
from latedrop.variance.engine.options import Engine

__all__ = ["Calibrated"]

_Record = TypeVar("_Record", Calibration, ClassCalibration)
_Own = TypeVar("_Own", bound="Calibrated[Calibration] | Calibrated[ClassCalibration]")


class Calibrated(Generic[_Record]):
    """A model with its calibration. The model itself is untouched."""

    def __init__(
        self,
        model: nn.Module,
        calibration: _Record,
        readout: Readout = None,
        *,
        batch_size: int = 256,
        chunk: int | None = None,
        engine: Engine = "auto",
        collate: Collate = None,
    ) -> None:
        self.model = model
        self.calibration: _Record = calibration
        self.readout = calibration.readout if readout is None else readout
        self.batch_size = batch_size
        self.chunk = chunk
        self.engine: Engine = engine
        self.collate = collate
        self._weights = Weights(model, calibration.fingerprint)

    def save(self, path: str | os.PathLike[str]) -> list[Path]:
        """Write the calibration as JSON, with what is large beside it as safetensors; the weights are in neither.

        Returns the files that were written.
        """
        return save_calibration(self.calibration, path)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {type(self.model).__name__}: {self.calibration}"

    def _with(self: _Own, calibration: _Record) -> _Own:
        """The same with another record."""
        found = copy(self)
        found.calibration = calibration
        return found
