"""What every calibrated model has, of whatever task: the model, its record, and how it is run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.calibration.saving import save_calibration
from latedrop.calibration.weights import Weights
from latedrop.data.batches import row_batches
from latedrop.data.items import Collate
from latedrop.detection.detector import Detector, detector
from latedrop.dropout.moments import Engine
from latedrop.dropout.sampling import own_output
from latedrop.network.calling import Readout, check_finite
from latedrop.network.network import Network

__all__ = ["Calibrated"]

_Record = TypeVar("_Record", Calibration, ClassCalibration)
_Own = TypeVar("_Own", bound="Calibrated[Calibration] | Calibrated[ClassCalibration]")


class Calibrated(Generic[_Record]):
    """A model with its calibration. The model itself is untouched.

    Attributes:
        model: as the user has it.
        calibration: what was chosen and measured.
        cross_validated: the validation rows, each predicted by a fit to other rows: a `CrossValidated` with `mean`,
            `variance`, `target` and `errors`, or a `CrossValidatedClasses` with `probabilities` and `labels`. None
            after `load`, as a file holds no rows.
    """

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
        cross_validated: Any = None,
    ) -> None:
        self.model = model
        self.calibration: _Record = calibration
        self.readout = calibration.readout if readout is None else readout
        self.batch_size = batch_size
        self.chunk = chunk
        self.engine: Engine = engine
        self.collate = collate
        self.cross_validated = cross_validated
        self._weights = Weights(model, calibration.fingerprint)
        self._network = Network(model)

    @property
    def network(self) -> Network:
        """The private copy that makes predictions; made anew where tensors of the model were moved or replaced."""
        self._network = self._network.current()
        return self._network

    def save(self, path: str | os.PathLike[str]) -> list[Path]:
        """Write the calibration as JSON, with what is large beside it as safetensors; the weights are in neither.

        Returns the files that were written.
        """
        return save_calibration(self.calibration, path)

    def detector(
        self, usual: Any, scores: Sequence[str] | None = None, *, strange: Any = None, seed: int = 0
    ) -> Detector:
        """Tell rows that are unlike those of `usual`, with p-values: a threshold then has a rate of false alarms.

        Args:
            usual: inputs known to be usual, a `DataLoader`, a data set, or an iterator of batches of inputs. Rows used
                for nothing else make p-values exact; with validation rows they are nearly so. With several
                scores one half, at random, fits their combination, the other gives the p-values.
            scores: names; by default `"novelty"` and what costs nothing more: `"entropy"`, `"confidence"` and
                `"energy"` for classes, `"std"` for numbers. Also `"neighbours"` (needs scipy), `"sites"` (a score for
                every site, by a backward pass for each output), and `"mutual_information"` for classes.
            strange: rows known to be strange, if there are any: the combination is fitted to tell these.
            seed: fixes the halves.
        """
        return detector(self, usual, scores, strange=strange, seed=seed)  # type: ignore[arg-type]

    def _own_output(self, x: Any) -> Tensor:
        """Of the model itself, where rows are beyond numbers; an error where it is finite for none."""
        parts = row_batches(x, self.batch_size)
        found = torch.cat([own_output(self.network, part, self.readout, check=False) for part in parts])
        if not bool(found.isfinite().any()):
            check_finite(found, "without dropout")
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {type(self.model).__name__}: {self.calibration.verdict}"

    def _with(self: _Own, calibration: _Record) -> _Own:
        """The same with another record."""
        found = copy(self)
        found.calibration = calibration
        return found
