"""What `evaluate` says besides numbers: where rows stand in their file, which inputs they had, and what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop import plots
from latedrop.calibration.groups import Inputs
from latedrop.cli.command import again, read_files, typed
from latedrop.cli.feed import Labelled, Source
from latedrop.cli.options import LEVEL, split
from latedrop.cli.predicting import check_sets
from latedrop.cli.tables import Place, Rows
from latedrop.errors import ArgumentError
from latedrop.evaluation.class_judgement import ClassJudgement, judge_classes
from latedrop.evaluation.judgement import Judgement, judge, output_units
from latedrop.files import write_aside
from latedrop.metrics.classes import reliability
from latedrop.prediction.class_predictor import ClassPredictor
from latedrop.prediction.prediction import Prediction
from latedrop.prediction.predictor import Predictor
from latedrop.progress import progress
from latedrop.report import png, write_class_report, write_report

__all__ = ["calibration_report", "check_options", "curves", "judged", "report_on", "units_of"]

_MOST_VALUES = 20_000_000
_MOST_COLUMNS = 200


class Noticed:
    """The places of rows as they pass by, and their inputs where these are columns of numbers.

    Of very many rows the inputs of every second, fourth, ... are kept, so that they fit memory.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._places: list[npt.NDArray[Any]] = []
        self._parts: list[npt.NDArray[np.float32]] = []
        self._rows: list[npt.NDArray[np.intp]] = []
        self._step, self._count, self._kept = 1, 0, 0

    def add(self, rows: Rows) -> None:
        """Some more rows."""
        self._places.append(np.asarray(rows.places))
        index = np.arange(self._count, self._count + len(rows))
        self._count += len(rows)
        if isinstance(rows.inputs, dict) or len(self._names) > _MOST_COLUMNS:
            return
        chosen = index % self._step == 0
        self._parts.append(rows.inputs.reshape(len(rows), -1)[chosen].astype(np.float32))
        self._rows.append(index[chosen])
        self._kept += self._parts[-1].size
        if self._kept > _MOST_VALUES:
            self._thin()

    def _thin(self) -> None:
        self._step *= 2
        keep = [rows % self._step == 0 for rows in self._rows]
        self._parts = [part[mask] for part, mask in zip(self._parts, keep, strict=True)]
        self._rows = [rows[mask] for rows, mask in zip(self._rows, keep, strict=True)]
        self._kept = sum(part.size for part in self._parts)

    @property
    def places(self) -> list[Place]:
        """The line or index of every row in its file, or both in a folder."""
        found: list[Place] = np.concatenate(self._places).tolist()
        return found

    def inputs(self) -> Inputs:
        """The columns that were kept."""
        if not self._parts:
            return Inputs({})
        whole = np.concatenate(self._parts).astype(np.float64)
        columns = dict(zip(self._names, whole.T, strict=True)) if whole.shape[1] == len(self._names) else {}
        return Inputs(columns, np.concatenate(self._rows))


def check_options(uq: Predictor | ClassPredictor, *, level: float | None, **regression: str | None) -> None:
    """`ArgumentError` where options of a regression were given for classes, or a level without sets."""
    if not isinstance(uq, ClassPredictor):
        return
    wrong = [f"--{name.replace('_', '-')}" for name, value in regression.items() if value is not None]
    if wrong:
        raise ArgumentError(f"expected options that classes have; found {', '.join(wrong)}. Leave them out.")
    check_sets(uq.calibration, level)


def judged(
    uq: Predictor | ClassPredictor, rows: Labelled, level: float | None, units: Sequence[str]
) -> tuple[Judgement | ClassJudgement, dict[str, Any]]:
    """Predict the rows of a file and judge them by their targets; and what a page about them needs besides."""
    source, noticed = rows.source, Noticed(rows.source.columns.inputs)
    rows.notice = noticed.add
    with source.explained(), progress("evaluating", source.table.count) as tick:
        if isinstance(uq, ClassPredictor):
            found, labels = uq.predict_labelled(rows, tick=tick)
            known = {"prediction": found, "labels": labels, "places": noticed.places, "place": source.table.unit}
            return judge_classes(found, labels, level=level), known
        prediction, truth = uq.predict_labelled(rows, tick=tick)
    page = {"calibration": uq.calibration, "place": source.table.unit, "unit": units}
    return judged_numbers(prediction, truth, rows, noticed, level, units, noticed.places), page


def judged_numbers(
    prediction: Prediction,
    truth: Tensor,
    rows: Labelled,
    noticed: Noticed,
    level: float | None,
    units: Sequence[str],
    places: Sequence[Place] | None,
) -> Judgement:
    """Judge the predictions of a file's rows, with the names of its columns."""
    several = prediction.mean.dim() == 2 and prediction.mean.shape[1] > 1
    names = rows.source.columns.targets
    own = names if len(names) == (prediction.mean.shape[1] if several else 1) else ()
    about: dict[str, Any] = {"inputs": noticed.inputs(), "places": places, "weights": rows.weights()}
    about |= {"names": own, "units": units, "level": LEVEL if level is None else level}
    return judge(prediction, truth, **about)


def units_of(text: str | None, source: Source) -> list[str]:
    """None, one, or one for each target; how many outputs an array holds is not known yet."""
    found = split(text)
    if source.table.word == "column":
        output_units(len(source.columns.targets), found)
    return found


def calibration_report(
    path: str | None, uq: Predictor | ClassPredictor, units: Sequence[str], read: Mapping[str, str | None]
) -> list[str]:
    """A page about a calibration, where one is asked for; its path as the files that were written."""
    if path is None:
        return []
    facts: dict[str, Any] = {"title": f"Calibration of {read['MODEL']}", "calibration": uq.calibration}
    facts["reproduce"] = again(typed.get(), read_files(read))
    if isinstance(uq, ClassPredictor):
        write_class_report(path, **facts)
    else:
        write_report(path, **facts, unit=units)
    return [path]


def report_on(path: str | None, found: Judgement | ClassJudgement, **facts: Any) -> list[str]:
    """A page about test rows, where one is asked for; its path as the files that were written."""
    if path is None:
        return []
    if isinstance(found, ClassJudgement):
        write_class_report(path, judgement=found, **facts)
    else:
        write_report(path, judgement=found, **facts)
    return [path]


def curves(path: str | None, found: Judgement | ClassJudgement) -> list[str]:
    """Draw what the probabilities or intervals are worth, where that is asked for; the files that were written."""
    if path is None:
        return []
    if isinstance(found, ClassJudgement):
        figure = plots.new_figure(5.2, 5.2)
        bins = {name: reliability(p, found.labels, bins=10, mass=True)[:2] for name, p in found.probabilities.items()}
        plots.reliability_diagram(bins, figure.subplots())
    else:
        figure = plots.new_figure(6.4, 4.5)
        rows = found.together.evaluations
        plots.calibration_curves({row.label: (row.levels, row.observed) for row in rows}, figure.subplots())
    write_aside(path, png(figure))
    return [path]
