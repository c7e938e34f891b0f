"""A calibration that was saved, brought back to its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from warnings import warn

import torch
from torch import nn

from latedrop.calibration.class_record import CLASSES, ClassCalibration
from latedrop.calibration.record import CALIBRATION, Calibration
from latedrop.data.items import Collate
from latedrop.errors import FileError, LatedropWarning
from latedrop.files import read_text
from latedrop.network.network import Readout
from latedrop.network.sites import missing_sites
from latedrop.network.weights import fingerprint
from latedrop.prediction.class_predictor import ClassPredictor
from latedrop.prediction.predictor import Predictor
from latedrop.records import naming
from latedrop.terms import Term

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    readout: Readout = None,
    *,
    collate: Collate = None,
    terms: Sequence[Term] = (),
) -> Any:
    """Bring a saved calibration back to its model.

    With the same `terms`, where it was made with some of your own.

    Raises `FileError` where the file is missing, truncated or edited, or where the model lacks its sites or the
    readout that it was made with; warns where the weights are not the ones that were calibrated. With `collate`, which
    a file cannot hold, the predictor takes lists of items.

    >>> import tempfile, latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2))
    >>> path = os.path.join(tempfile.mkdtemp(), "net.latedrop.json")
    >>> _ = uq.save(path)
    >>> bool((load(path, net).predict(x).std == uq.predict(x).std).all())
    True
    """
    calibration = _read(path)
    wrong = missing_sites(model, calibration.sites, same_type=True)
    if wrong:
        raise FileError(
            f"expected a model with the sites of {path}; its layers {wrong} are missing or of another type. "
            "Load the model that was calibrated, or calibrate this one."
        )
    if calibration.custom_readout is not None and readout is None:
        raise FileError(
            f"expected readout=, as {path} was made with the function {calibration.custom_readout!r}, which a file "
            "cannot hold. Pass the same function to load()."
        )
    if isinstance(calibration, ClassCalibration):
        _warn_of_weights(model, calibration.fingerprint, path)
        return ClassPredictor(model, calibration, readout, collate=collate)
    if calibration.terms is not None:
        calibration = replace(calibration, terms=calibration.terms.with_terms(terms, path))
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    least = torch.tensor([calibration.least_variance], dtype=torch.float64 if wide else torch.float32)
    if not bool(calibration.variance(least).isfinite().all()):
        raise FileError(
            f"expected scales and floors in {path} that give a finite variance; found {calibration.scales} and "
            f"{calibration.floors}. The file was edited, or its model was in float64: calibrate again."
        )
    _warn_of_weights(model, calibration.fingerprint, path)
    return Predictor(model, calibration, readout, collate=collate)


def _read(path: str | os.PathLike[str]) -> Calibration | ClassCalibration:
    """Read a calibration of either task."""
    text = read_text(path, "a calibration file")
    with naming(path):
        return CLASSES.from_json(text) if f'"{CLASSES.key}"' in text[:100] else CALIBRATION.from_json(text)


def _warn_of_weights(model: nn.Module, known: str, path: str | os.PathLike[str]) -> None:
    if fingerprint(model) != known:
        warn(
            f"the model's weights are not those that {path} was made with: its intervals may not hold. "
            "Calibrate again after training.",
            LatedropWarning,
            stacklevel=3,
        )
