"""Decide whether targets in a file are class labels, and map each label to a class number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from warnings import warn

from torch import nn

from latedrop.calibration.targets import as_logits
from latedrop.cli.feed import Source, only_target
from latedrop.cli.options import Classes, split
from latedrop.cli.tables import Labels, distinct
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.network.network import Readout
from latedrop.prediction.predictor import ClassPredictor, Predictor, explain_failure
from latedrop.terminal import listed

__all__ = ["remembering", "task_of", "with_labels"]

_SHOWN, _LABELS = 6, 12  # class names and labels that a message quotes at most


def with_labels(source: Source, network: nn.Module, options: Classes, readout: Readout) -> tuple[Source, str]:
    """Read the target column as class labels if it may hold classes; return the source and the task.

    Text is read as classes, in alphabetical order or in that of `--class-names`. Whether whole numbers are classes is
    decided by `latedrop.calibrate` from the shape of the model's output.
    """
    task, names = options.task, tuple(split(options.class_names))
    if task == "regression" or (task == "auto" and len(source.columns.targets) > 1):
        if names:
            raise ArgumentError(
                "expected --class-names with one target of class labels; found a regression. Leave --class-names out."
            )
        options.check(classes=False)
        return source, task
    options.check(classes=True)
    column = only_target(source.columns)
    labels = names or distinct(column, source.values(column))
    if labels is False and task == "auto":
        options.check(classes=False)
        return source, task
    if isinstance(labels, bool):
        return _reading(source, Labels(column, sure=task == "classification")), task
    x = source.example(network)
    with source.explained():
        try:
            output = own_output(network, x, readout)
        except Exception as error:
            explain_failure(error, x, network)
            raise
    if not names and task == "auto" and output[0].numel() == 1 and len(labels) != 2:
        return source, "regression"  # reading the values will then refuse text that is no number
    classes = as_logits(output).shape[1]
    if names and (len(names) != classes or len(set(names)) != classes):
        raise ArgumentError(
            f"expected --class-names with {classes} different names, as the model has {classes} classes; found "
            f"{', '.join(names)}. Name each class once, in the order of the model's outputs."
        )
    if len(labels) != classes:
        raise DataError(
            f"expected labels of {classes} classes in {column!r} of {source.table.path}, as the model has that many; "
            f"found {len(labels)}: {listed(labels, _LABELS, quote=True)}. Name all classes in the order of the model's "
            "outputs: --class-names."
        )
    return _reading(source, Labels(column, labels, sure=True)), "classification"


def task_of(task: str, source: Source) -> Any:
    """Return the `task=` for `latedrop.calibrate`, with the class names if labels are text."""
    from latedrop import Classification

    names = () if source.columns.labels is None else source.columns.labels.names
    return Classification(names) if names or task == "classification" else task


def remembering(
    uq: Predictor | ClassPredictor, source: Source, options: Classes, held_out: Any
) -> Predictor | ClassPredictor:
    """Store the column names in a predictor, and add the prediction sets or the rejection rule that options ask for.

    Sets and rule are calibrated on the rows `held_out`, which are read only then.
    """
    options.check(classes=isinstance(uq, ClassPredictor))
    if not isinstance(uq, ClassPredictor):
        uq.calibration = replace(uq.calibration, columns=source.names())
        return uq
    c = uq.calibration = replace(uq.calibration, columns=source.names())
    if c.verdict.accuracy < 1 / c.classes:
        warn(
            f"the model is right in {c.verdict.accuracy:.0%} of the validation rows, less than by chance: the classes "
            f"may have another order than {listed(c.known_names, _SHOWN, quote=True)}. Pass the names in the "
            "order of the outputs: --class-names.",
            LatedropWarning,
            stacklevel=2,
        )
    if options.sets is not None:
        uq = uq.conformal(held_out, options.sets, per_class=options.per_class)
    return uq if options.reject is None else uq.reject(held_out, options.reject)


def _reading(source: Source, labels: Labels) -> Source:
    """Return the source with its target column read as `labels`."""
    return replace(source, columns=replace(source.columns, labels=labels))
