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
from latedrop.cli.options import LEVEL
from latedrop.cli.tables import Rows
from latedrop.cli.writing import write_rows
from latedrop.detection.detector import Detector
from latedrop.errors import ArgumentError, DataError
from latedrop.prediction.predictor import ClassPredictor, Predictor
from latedrop.progress import progress
from latedrop.terminal import need, say

__all__ = ["check_ray", "check_sets", "on_ray", "output_names", "predicted", "write_predictions"]

_MOST_COLUMNS = 16_384  # of a spreadsheet
_RAY_ROWS = 1024  # that a worker runs at once


def output_names(c: Calibration | ClassCalibration, level: float | None, *, flat: bool) -> dict[str, list[str]]:
    """Return the names of the columns that `predicted` gives, by the name of the prediction's array.

    Of numbers mean, std, low and high; of classes label, confidence, entropy, the set where a level is given, and the
    probability of each.
    """
    if isinstance(c, ClassCalibration):
        check_sets(c, level)
        asked = {"novelty": c.guard, "mutual_information": c.rate, "set": level, "kept": c.rule}
        single = ["label", "confidence", "entropy", *(name for name, value in asked.items() if value is not None)]
        wide = {"probabilities": [f"p_{name}" for name in c.known_names]}
    else:
        single = [] if c.terms is None or c.terms.guard is None else ["novelty"]
        ends = c.output_names or range(prod(c.output_shape))
        several = prod(c.output_shape) > 1
        names = ("mean", "std", "low", "high")
        wide = {name: [f"{name}_{end}" for end in ends] if several else [name] for name in names}
        if flat and several and len(c.output_shape) > 1:
            raise ArgumentError(
                "expected one value or a vector per row for csv or parquet; found outputs of shape "
                f"{c.output_shape}. Write npz."
            )
    if not flat:
        wide = {name: [name] for name in wide}
    elif max(map(len, wide.values())) > _MOST_COLUMNS:
        raise ArgumentError(
            f"expected at most {_MOST_COLUMNS} outputs for csv or parquet; found {max(map(len, wide.values()))}. "
            "Write npz."
        )
    one = {name: [name] for name in single}
    return one | wide if isinstance(c, ClassCalibration) else wide | one


def check_sets(c: ClassCalibration, level: float | None) -> None:
    """Raise `ArgumentError` where a level is given for classes without prediction sets."""
    if level is not None and c.sets is None:
        raise ArgumentError(
            "expected a calibration with prediction sets for --level; found one without. Calibrate with --sets lac."
        )


def predicted(
    uq: Predictor | ClassPredictor, rows: Rows, level: float | None, *, flat: bool
) -> dict[str, npt.NDArray[Any]]:
    """Predict rows, as columns."""
    c, empty = uq.calibration, ~rows.finite
    is_class = isinstance(c, ClassCalibration)
    result = uq.predict(arguments(uq.model, _filled(rows)))
    named = result.to_dict(level if is_class or level is not None else LEVEL)  # type: ignore[arg-type]
    arrays = {name: value.cpu().numpy() for name, value in named.items()}
    dtype = np.float64 if any(p.dtype == torch.float64 for p in uq.model.parameters()) else np.float32
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, names in output_names(c, level, flat=flat).items():
        values = arrays[name]
        if name == "label":
            texts = np.array(c.names)[values] if flat and c.names else np.where(empty, -1, values)  # type: ignore[union-attr]
            columns[name] = np.ma.masked_array(texts, empty)
        elif name == "set" and flat:
            columns[name] = np.ma.masked_array([_listed(c.known_names, row) for row in values], empty)  # type: ignore[union-attr]
        else:
            values = values.astype(values.dtype if values.dtype == bool else dtype)
            values[empty] = False if values.dtype == bool else np.nan
            columns |= dict(zip(names, values.reshape(len(rows), -1).T, strict=True)) if flat else {name: values}
    return columns


def _filled(rows: Rows) -> Any:
    """Return the inputs, with those of a finite row, or zeros, in the place of rows that are not finite."""
    if rows.finite.all():
        return rows.inputs
    index = np.where(rows.finite, np.arange(len(rows)), np.argmax(rows.finite))
    named = rows.inputs if isinstance(rows.inputs, dict) else {"": rows.inputs}
    filled = {name: part[index] if rows.finite.any() else np.zeros_like(part) for name, part in named.items()}
    return filled if isinstance(rows.inputs, dict) else filled[""]


def _listed(names: Sequence[str], chosen: npt.NDArray[np.bool_]) -> str:
    """Join names with commas; one that holds a comma stands in double quotes, as the options of commands do."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([name for name, is_in in zip(names, chosen, strict=True) if is_in])
    return line.getvalue()


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
    """Write batch by batch from the source to the output; returns how many, and which are empty."""
    path, count, empty = source.table.path, 0, Places(source.table.unit)
    with source.explained(), write_rows(output, out) as append, progress("predicting", source.table.count) as tick:
        for rows in source.read(uq.batch_size):
            empty.add(rows)
            tick(len(rows))
            count += len(rows)
            rows = rows.where(rows.finite) if drop else rows
            columns = {**rows.kept, **predicted(uq, rows, level, flat=flat)} if len(rows) else {}
            if detector is not None and columns:
                p = detector(arguments(uq.model, _filled(rows))).p_value.numpy()
                columns["p_value"] = np.where(rows.finite, p, np.nan)
            if columns:
                append(columns)
        if not count:
            raise DataError(f"expected at least one row in {path}; found none.")
    if empty.count:
        done = "these rows are left out" if drop else "their predictions are left empty"
        say(f"warning: NaN or missing values in {empty.count} of {count} rows, at {empty} of {path}; {done}.")
    return count - empty.count * drop, empty


def check_ray(output: str, *, images: bool, detector: bool, drop: bool) -> None:
    """Raise, before the work, unless the output can be a folder and the other options go with Ray."""
    need("ray", "ray", "pyarrow")
    alone = {"--detector": detector, "--drop-nan": drop, "--images": images}
    wrong = [name for name, given in alone.items() if given]
    if wrong:
        raise ArgumentError(f"expected {wrong[0]} without --ray; found both. Predict these on one machine.")
    if output == "-" or Path(output).suffix:
        raise ArgumentError(f"expected -o with a folder for parquet files, as Ray writes several; found {output!r}.")


def on_ray(
    address: str, uq: Any, source: Source, output: str, level: float | None, size: int | None, **model: Any
) -> int:
    """Predict the rows of a source and write a folder; returns how many there were."""
    from latedrop.adapters.ray import Asked, predict_folder

    if not isinstance(uq, Predictor):
        raise ArgumentError("expected a regression with --ray; found a calibration of classes. Leave --ray out.")
    if source.table.arrays:
        raise ArgumentError(f"expected csv or parquet with --ray; found {source.table.path}, which holds arrays.")
    local = address == "local"
    if local:  # workers have folders of their own
        paths = ("calibration", "weights", *(["model"] if Path(model["model"]).exists() else []))
        model |= {name: str(Path(model[name]).absolute()) for name in paths if model[name] is not None}
    asked = Asked(
        **model,
        inputs=source.columns.inputs,
        keep=source.columns.kept,
        level=LEVEL if level is None else level,
        folder=os.getcwd() if local else None,
        batch_size=_RAY_ROWS if size is None else size,
    )
    return predict_folder(asked, source.table.path, output, address=address)
