"""Predictions as columns to write: one value per row and column, or with `flat=False` one array per name.

Rows that are not finite have no prediction: NaN, or nothing in columns of text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.cli.feed import arguments
from latedrop.cli.options import LEVEL
from latedrop.cli.tables import Rows
from latedrop.detection.detector import Detector
from latedrop.errors import ArgumentError
from latedrop.prediction.class_predictor import ClassPredictor
from latedrop.prediction.predictor import Predictor

__all__ = ["check_sets", "output_names", "p_values", "predicted"]

_NAMES = ("mean", "std", "low", "high")
_MOST_COLUMNS = 16_384  # of a spreadsheet


def output_names(c: Calibration | ClassCalibration, level: float | None, *, flat: bool) -> list[str]:
    """The names of the columns that `predicted` gives.

    Of numbers mean, std, low and high; of classes label, confidence, entropy, the set where a level is given, and the
    probability of each.
    """
    if isinstance(c, ClassCalibration):
        return _class_names(c, level, flat=flat)
    return [name for numbered in _output_names(c, flat=flat).values() for name in numbered]


def predicted(
    uq: Predictor | ClassPredictor, rows: Rows, level: float | None, *, flat: bool
) -> dict[str, npt.NDArray[Any]]:
    """Predictions of rows, as columns."""
    if isinstance(uq, ClassPredictor):
        return _classes(uq, rows, level, flat=flat)
    return _predicted(uq, rows, LEVEL if level is None else level, flat=flat)


def p_values(detector: Detector, rows: Rows) -> npt.NDArray[np.float64]:
    """How usual rows are, `(N,)`; NaN for those that are not finite."""
    found = np.full(len(rows), np.nan)
    if rows.finite.any():
        found[rows.finite] = detector(arguments(detector.uq.model, _whole(rows))).p_value.numpy()
    return found


def _output_names(calibration: Calibration, *, flat: bool) -> dict[str, tuple[str, ...]]:
    count = prod(calibration.output_shape)
    strange = calibration.terms is not None and calibration.terms.guard is not None
    alone: dict[str, tuple[str, ...]] = {"novelty": ("novelty",)} if strange else {}
    if not flat or count == 1:
        return {**{name: (name,) for name in _NAMES}, **alone}
    if len(calibration.output_shape) > 1 or count > _MOST_COLUMNS:
        raise ArgumentError(
            f"expected one value or a vector of at most {_MOST_COLUMNS} per row for csv or parquet; found outputs "
            f"of shape {calibration.output_shape}. Write npz."
        )
    ends = calibration.output_names or range(count)
    return {name: tuple(f"{name}_{end}" for end in ends) for name in _NAMES} | alone


def _predicted(predictor: Predictor, rows: Rows, level: float, *, flat: bool) -> dict[str, npt.NDArray[Any]]:
    names = _output_names(predictor.calibration, flat=flat)
    wide = any(p.dtype == torch.float64 for p in predictor.model.parameters())
    found: dict[str, npt.NDArray[Any]] = {}
    if rows.finite.any():
        result = predictor.predict(arguments(predictor.model, _whole(rows))).to_dict(level)
        found = {name: value.cpu().numpy() for name, value in result.items()}
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, numbered in names.items():
        own = () if name == "novelty" else predictor.calibration.output_shape
        shape = found[name].shape[1:] if found else own
        values = np.full((len(rows), *shape), np.nan, dtype=np.float64 if wide else np.float32)
        if found:
            values[rows.finite] = found[name]
        if flat:
            columns |= dict(zip(numbered, values.reshape(len(rows), -1).T, strict=True))
        else:
            columns[name] = values
    return columns


def _whole(rows: Rows) -> Rows:
    return rows if rows.finite.all() else rows.where(rows.finite)


def check_sets(c: ClassCalibration, level: float | None) -> None:
    """`ArgumentError` where a level is given for classes without prediction sets."""
    if level is not None and c.sets is None:
        raise ArgumentError(
            "expected a calibration with prediction sets for --level; found one without. Calibrate with --sets lac."
        )


def _class_names(c: ClassCalibration, level: float | None, *, flat: bool) -> list[str]:
    check_sets(c, level)
    if flat and c.classes > _MOST_COLUMNS:
        raise ArgumentError(
            f"expected at most {_MOST_COLUMNS} classes for csv or parquet; found {c.classes}. Write npz."
        )
    names = ["label", "confidence", "entropy"]
    names += ["novelty"] if c.guard is not None else []
    names += ["mutual_information"] if c.rate is not None or c.fit.odds else []
    names += ["set"] if level is not None else []
    names += ["kept"] if c.rule is not None else []
    return [*names, *((f"p_{name}" for name in c.known_names) if flat else ["probabilities"])]


def _classes(uq: ClassPredictor, rows: Rows, level: float | None, *, flat: bool) -> dict[str, npt.NDArray[Any]]:
    c, empty = uq.calibration, ~rows.finite
    names, shown = _class_names(c, level, flat=flat), c.known_names
    wide = any(p.dtype == torch.float64 for p in uq.model.parameters())
    columns: dict[str, Any] = {name: np.full(len(rows), np.nan, np.float64 if wide else np.float32) for name in names}
    p = np.full((len(rows), c.classes), np.nan, np.float64 if wide else np.float32)
    code, inside = np.full(len(rows), -1), np.zeros((len(rows), c.classes), dtype=bool)
    keep = np.zeros(len(rows), dtype=bool)
    if rows.finite.any():
        result = uq.predict(arguments(uq.model, _whole(rows)))
        found = {name: value.cpu().numpy() for name, value in result.to_dict().items()}
        p[rows.finite], code[rows.finite] = found.pop("probabilities"), found.pop("label")
        if level is not None:
            inside[rows.finite] = result.prediction_set(level).cpu().numpy()
        if "kept" in found:
            keep[rows.finite] = found.pop("kept")
        for name, values in found.items():
            columns[name][rows.finite] = values
    if c.rule is not None:
        columns["kept"] = keep  # an empty row is not kept
    columns["label"] = np.ma.masked_array(code, empty)
    if not flat:
        return columns | {"probabilities": p} | ({} if level is None else {"set": inside})
    if c.names:
        columns["label"] = np.ma.masked_array([shown[k] if k >= 0 else "" for k in code], empty)
    if level is not None:
        columns["set"] = np.ma.masked_array([_listed(shown, row) for row in inside], empty)
    return columns | {f"p_{name}": values for name, values in zip(shown, p.T, strict=True)}


def _listed(names: Sequence[str], chosen: npt.NDArray[np.bool_]) -> str:
    """Names separated by commas; one that holds a comma stands in double quotes, as the options of commands do."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([name for name, is_in in zip(names, chosen, strict=True) if is_in])
    return line.getvalue()
