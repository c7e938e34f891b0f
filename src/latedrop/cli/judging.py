"""Collect facts for `evaluate`: the places of rows in their file, their inputs, and the files that were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop.calibration.class_record import ClassCalibration
from latedrop.cli.feed import Source, TableBatches
from latedrop.cli.options import LEVEL, split
from latedrop.cli.predicting import check_sets
from latedrop.cli.tables import Rows
from latedrop.errors import ArgumentError
from latedrop.evaluation.judgement import ClassJudgement, Judgement, judge, judge_classes, output_units
from latedrop.metrics.groups import Inputs
from latedrop.prediction.predictor import ClassPredictor, Predictor
from latedrop.progress import progress
from latedrop.report import write_class_report, write_report

__all__ = ["check_options", "judged", "units_of", "write_page"]

_MOST_VALUES = 20_000_000
_MOST_COLUMNS = 200


class Noticed:
    """The places of rows in their file, and their inputs if these are columns of numbers.

    Of very many rows the inputs of every second, fourth, ... are remembered, so that they fit memory.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._places: list[npt.NDArray[Any]] = []
        self._inputs: list[npt.NDArray[np.float32]] = []
        self._step, self._count = 1, 0

    def add(self, rows: Rows) -> None:
        """Add a batch of rows with their places and inputs."""
        self._places.append(np.asarray(rows.places))
        if not isinstance(rows.inputs, dict) and len(self._names) <= _MOST_COLUMNS:
            first = -self._count % self._step
            self._inputs.append(rows.inputs[first :: self._step].astype(np.float32))
            if sum(part.size for part in self._inputs) > _MOST_VALUES:
                self._inputs, self._step = [np.concatenate(self._inputs)[::2]], 2 * self._step
        self._count += len(rows)

    def places(self) -> list[int | str]:
        """Return the line or index of every row in its file; in a folder both the file and its line."""
        places: list[int | str] = np.concatenate(self._places).tolist()
        return places

    def inputs(self) -> Inputs:
        """Return the columns, and which rows they are of."""
        if not self._inputs:
            return Inputs({})
        whole = np.concatenate(self._inputs).astype(np.float64)
        return Inputs(dict(zip(self._names, whole.T, strict=True)), np.arange(0, self._count, self._step))


def check_options(uq: Predictor | ClassPredictor, *, level: float | None, **regression: str | None) -> None:
    """Raise `ArgumentError` where options of a regression were given for classes, or a level without sets."""
    if not isinstance(uq, ClassPredictor):
        return
    wrong = [f"--{name.replace('_', '-')}" for name, value in regression.items() if value is not None]
    if wrong:
        raise ArgumentError(f"expected options that classes have; found {', '.join(wrong)}. Leave them out.")
    check_sets(uq.calibration, level)


def judged(
    uq: Predictor | ClassPredictor, rows: TableBatches, level: float | None, units: Sequence[str]
) -> tuple[Judgement | ClassJudgement, dict[str, Any]]:
    """Predict the rows of a file and judge them by their targets; return the judgement and facts for a report."""
    source, noticed = rows.source, Noticed(rows.source.columns.inputs)
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
    about: dict[str, Any] = {"inputs": noticed.inputs(), "places": noticed.places(), "weights": rows.weights()}
    about |= {"names": names, "units": units, "level": LEVEL if level is None else level}
    return judge(prediction, truth, **about), page | {"calibration": uq.calibration, "unit": units}


def units_of(text: str | None, source: Source) -> list[str]:
    """Return no unit, one, or one for each target; how many outputs an array holds is not known yet."""
    units = split(text)
    if source.table.word == "column":
        output_units(len(source.columns.targets), units)
    return units


def write_page(path: str, **facts: Any) -> None:
    """Write a page about a calibration, or about test rows."""
    classes = isinstance(facts.get("judgement"), ClassJudgement) or isinstance(
        facts.get("calibration"), ClassCalibration
    )
    (write_class_report if classes else write_report)(path, **facts)
