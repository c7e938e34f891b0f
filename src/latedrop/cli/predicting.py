"""Predict the rows of a file batch by batch, and write them or judge them by their targets.

Predictions are columns: one value per row and column, or with `flat=False` one array per name. Rows that are not finite
get NaN, or an empty text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.cli.feed import Places, Source, TableBatches
from latedrop.cli.options import LEVEL
from latedrop.cli.tables import Rows
from latedrop.cli.writing import write_rows
from latedrop.errors import ArgumentError, DataError
from latedrop.evaluation.judgement import ClassJudgement, Judgement, judge, judge_classes
from latedrop.metrics.groups import Inputs
from latedrop.named import as_arguments
from latedrop.prediction.predictor import ClassPredictor, Predictor
from latedrop.report import write_class_report, write_report
from latedrop.terminal import progress, say

__all__ = ["checked_sets", "judged", "predicted", "write_page", "write_predictions"]

_MOST_VALUES, _MOST_COLUMNS = 20_000_000, 200  # of inputs that are remembered for the slices of a judgement


def checked_sets(c: Calibration | ClassCalibration, level: float | None) -> float | None:
    """Return the level for predictions; raise `ArgumentError` if a classifier has no prediction sets for it."""
    if not isinstance(c, ClassCalibration):
        return LEVEL if level is None else level
    if level is not None and c.sets is None:
        raise ArgumentError(
            "expected a calibration with prediction sets for --level; found one without. Calibrate with --sets lac."
        )
    return level


def predicted(
    uq: Predictor | ClassPredictor, rows: Rows, level: float | None, *, flat: bool
) -> dict[str, npt.NDArray[Any]]:
    """Predict rows and return the predictions as columns.

    The columns are mean, std, low, high and novelty for regression; for classes label, confidence, entropy, the set if
    there is a level, and the probability of each class.
    """
    c, empty = uq.calibration, ~rows.finite
    result: Any = uq.predict(as_arguments(uq.model, _filled(rows)))
    dtype = np.float64 if any(p.dtype == torch.float64 for p in uq.model.parameters()) else np.float32
    columns: dict[str, npt.NDArray[Any]] = {}
    arrays = result.columns(level) if flat and isinstance(c, Calibration) else result.to_dict(level)
    for name, tensor in arrays.items():
        values = tensor.cpu().numpy()
        if values.dtype.kind in "fb":
            values = values.astype(values.dtype if values.dtype == bool else dtype)
            values[empty] = False if values.dtype == bool else np.nan
        if isinstance(c, ClassCalibration) and name == "label":
            texts = np.array(c.names)[values] if flat and c.names else np.where(empty, -1, values)
            columns[name] = np.ma.masked_array(texts, empty)
        elif isinstance(c, ClassCalibration) and name == "set" and flat:
            columns[name] = np.ma.masked_array([_listed(c.known_names, row) for row in values], empty)
        elif isinstance(c, ClassCalibration) and name == "probabilities" and flat:
            columns |= dict(zip((f"p_{end}" for end in c.known_names), values.T, strict=True))
        else:
            columns[name] = values
    return columns


def _filled(rows: Rows) -> Any:
    """Replace the inputs of rows that are not finite by those of a finite row, or by zeros."""
    if rows.finite.all():
        return rows.inputs
    index = np.where(rows.finite, np.arange(len(rows)), np.argmax(rows.finite))
    named = rows.inputs if isinstance(rows.inputs, dict) else {"": rows.inputs}
    filled = {name: part[index] if rows.finite.any() else np.zeros_like(part) for name, part in named.items()}
    return filled if isinstance(rows.inputs, dict) else filled[""]


def _listed(names: Sequence[str], chosen: npt.NDArray[np.bool_]) -> str:
    """Join names with commas; put a name that contains a comma in double quotes, as in command options."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([name for name, is_in in zip(names, chosen, strict=True) if is_in])
    return line.getvalue()


def write_predictions(
    uq: Predictor | ClassPredictor, source: Source, output: str, out: Any, level: float | None, *, drop: bool
) -> tuple[int, Places, list[str]]:
    """Write predictions batch by batch; return the number of rows, which of them are empty, and the column names."""
    path, count, empty, names = source.table.path, 0, Places(source.table.unit), list[str]()
    flat = not output.lower().endswith(".npz")
    if flat and len(getattr(uq.calibration, "output_shape", ())) > 1:
        raise ArgumentError(
            "expected one value or a vector per row for csv or parquet; found outputs of shape "
            f"{uq.calibration.output_shape}. Write npz."  # type: ignore[union-attr]
        )
    with source.explained(), write_rows(output, out) as append, progress("predicting", source.table.count) as tick:
        for rows in source.read(uq.batch_size):
            empty.add(rows)
            tick(len(rows))
            count += len(rows)
            rows = rows.where(rows.finite) if drop else rows
            if len(rows):
                columns = predicted(uq, rows, level, flat=flat)
                if not names:
                    names = list(columns)
                    _check_kept(source.columns.kept, names)
                append({**rows.kept, **columns})
        if not count:
            raise DataError(f"expected at least one row in {path}; found none.")
    if empty.count:
        done = "these rows are left out" if drop else "their predictions are left empty"
        say(f"warning: NaN or missing values in {empty.count} of {count} rows, at {empty} of {path}; {done}.")
    return count - empty.count * drop, empty, names


def _check_kept(kept: Sequence[str], names: Sequence[str]) -> None:
    """Raise if an output column and a column of the data (`--keep`) have the same name."""
    both = [name for name in kept if name in names]
    if both:
        raise ArgumentError(
            f"expected to keep columns beside {', '.join(names[:4])}; found {', '.join(both)}, names of the output. "
            "Rename them in the data."
        )


class _Noticed:
    """Record the places of rows in their file, and their inputs if these are columns of numbers.

    For very many rows, only the inputs of every second, fourth, ... row are stored, so that they fit memory.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._places: list[npt.NDArray[Any]] = []
        self._inputs: list[npt.NDArray[np.float32]] = []
        self._step, self._count = 1, 0

    def add(self, rows: Rows) -> None:
        self._places.append(np.asarray(rows.places))
        if not isinstance(rows.inputs, dict) and len(self._names) <= _MOST_COLUMNS:
            first = -self._count % self._step
            self._inputs.append(rows.inputs[first :: self._step].astype(np.float32))
            if sum(part.size for part in self._inputs) > _MOST_VALUES:
                self._inputs, self._step = [np.concatenate(self._inputs)[::2]], 2 * self._step
        self._count += len(rows)

    def places(self) -> list[int]:
        """Return the line or index of every row in its file."""
        places: list[int] = np.concatenate(self._places).tolist()
        return places

    def inputs(self) -> Inputs:
        """Return the columns of inputs, and the numbers of the rows they belong to."""
        if not self._inputs:
            return Inputs({})
        whole = np.concatenate(self._inputs).astype(np.float64)
        return Inputs(dict(zip(self._names, whole.T, strict=True)), np.arange(0, self._count, self._step))


def judged(
    uq: Predictor | ClassPredictor, rows: TableBatches, level: float | None, units: Sequence[str]
) -> tuple[Judgement | ClassJudgement, dict[str, Any]]:
    """Predict the rows of a file and judge them by their targets; return the judgement and facts for a report."""
    source, noticed = rows.source, _Noticed(rows.source.columns.inputs)
    rows.notice = noticed.add
    page: dict[str, Any] = {"place": source.table.unit}
    with source.explained(), progress("evaluating", source.table.count) as tick:
        if isinstance(uq, ClassPredictor):
            probabilities, labels = uq.predict_labelled(rows, tick=tick)
            page |= {"prediction": probabilities, "labels": labels, "places": noticed.places()}
            return judge_classes(probabilities, labels, level=level), page
        prediction, truth = uq.predict_labelled(rows, tick=tick)
    outputs = prediction.mean.shape[1] if prediction.mean.dim() == 2 else 1
    names = source.columns.targets if len(source.columns.targets) == outputs else ()
    about: dict[str, Any] = {"inputs": noticed.inputs(), "places": noticed.places(), "names": names, "units": units}
    judgement = judge(prediction, truth, **about, level=LEVEL if level is None else level)
    return judgement, page | {"calibration": uq.calibration, "unit": units}


def write_page(path: str, **facts: Any) -> None:
    """Write a page about a calibration, or about test rows."""
    classes = isinstance(facts.get("judgement"), ClassJudgement)
    classes = classes or isinstance(facts.get("calibration"), ClassCalibration)
    (write_class_report if classes else write_report)(path, **facts)
