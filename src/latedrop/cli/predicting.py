"""Rows predicted and written, a batch at a time or by the workers of a cluster.

Predictions are columns: one value per row and column, or with `flat=False` one array per name. Rows that are not finite
have no prediction: NaN, or nothing in columns of text.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.cli.feed import Places, Source, arguments
from latedrop.cli.options import LEVEL, Pictured, scale_of
from latedrop.cli.tables import Rows
from latedrop.cli.writing import write_rows
from latedrop.detection.detector import Detector
from latedrop.errors import ArgumentError, DataError
from latedrop.prediction.calibrated import Calibrated
from latedrop.prediction.class_predictor import ClassPredictor
from latedrop.prediction.predictor import Predictor
from latedrop.progress import progress
from latedrop.terminal import need, say

__all__ = ["check_folder", "check_sets", "on_ray", "output_names", "predicted", "write_predictions"]

_NAMES = ("mean", "std", "low", "high")
_MOST_COLUMNS = 16_384  # of a spreadsheet
_RAY_ROWS = 1024  # that a worker runs at once


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


def write_predictions(
    uq: Predictor | ClassPredictor,
    source: Source,
    output: str,
    out: Any,
    level: float | None,
    detector: Detector | None,
    *,
    flat: bool,
    drop: bool,
) -> tuple[int, Places]:
    """Batch by batch from the source to the output; how many rows, and which of them are empty or left out."""
    path, count, empty = source.table.path, 0, Places(source.table.unit)
    with source.explained(), write_rows(output, out) as append, progress("predicting", source.table.count) as tick:
        for rows in source.read(uq.batch_size):
            empty.add(rows)
            tick(len(rows))
            count += len(rows)
            rows = rows.where(rows.finite) if drop and not rows.finite.all() else rows
            told = {} if detector is None else {"p_value": _p_values(detector, rows)}
            append({**rows.kept, **predicted(uq, rows, level, flat=flat), **told})
        if not count:
            raise DataError(f"expected at least one row in {path}; found none.")
    if empty.count:
        done = "these rows are left out" if drop else "their predictions are left empty"
        say(f"warning: NaN or missing values in {empty.count} of {count} rows, at {empty} of {path}; {done}.")
    return count - empty.count * drop, empty


def check_folder(output: str, images: Pictured) -> None:
    """Before the work: raise unless the output can be a folder, and the inputs are columns."""
    need("ray", "ray", "pyarrow")
    if output == "-" or Path(output).suffix:
        raise ArgumentError(f"expected -o with a folder for parquet files, as Ray writes several; found {output!r}.")
    if images.images is not None:
        raise ArgumentError("expected columns of numbers with --ray; found --images. Predict these on one machine.")


def on_ray(
    address: str,
    uq: Calibrated[Any, Any],
    source: Source,
    output: str,
    level: float | None,
    size: int | None,
    scale: str | None,
    **model: Any,
) -> int:
    """Predict the rows of a source and write a folder; how many there were."""
    from latedrop.adapters.ray import Asked, predict_folder

    if not isinstance(uq, Predictor):
        raise ArgumentError("expected a regression with --ray; found a calibration of classes. Leave --ray out.")
    if source.table.arrays:
        raise ArgumentError(f"expected csv or parquet with --ray; found {source.table.path}, which holds arrays.")
    local = address == "local"
    if local:  # workers have folders of their own
        paths = ("calibration", "weights", *(["model"] if Path(model["model"]).exists() else []))
        model |= {name: str(Path(model[name]).absolute()) for name in paths if model[name] is not None}
    readout = model.pop("readout")
    asked = Asked(
        **model,
        readout=int(readout) if readout is not None and readout.lstrip("-").isdecimal() else readout,
        inputs=source.columns.inputs,
        keep=source.columns.kept,
        level=LEVEL if level is None else level,
        scale=None if scale is None else scale_of(scale),
        folder=os.getcwd() if local else None,
        batch_size=_RAY_ROWS if size is None else size,
    )
    return predict_folder(asked, source.table.path, output, address=address)


def _p_values(detector: Detector, rows: Rows) -> npt.NDArray[np.float64]:
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
    names += ["mutual_information"] if c.rate is not None else []
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
