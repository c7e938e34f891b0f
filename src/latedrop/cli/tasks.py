"""Whether targets in a file are classes, and what number each label stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from warnings import warn

from torch import Tensor, nn

from latedrop.calibration.class_sets import checked_score
from latedrop.calibration.labels import as_logits
from latedrop.cli.feed import Source, only_target
from latedrop.cli.options import Classes
from latedrop.cli.tables import STANDARD, Labels, check_count, distinct
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.network.calling import Readout
from latedrop.prediction.beyond import failures_explained
from latedrop.prediction.class_predictor import ClassPredictor
from latedrop.prediction.predictor import Predictor
from latedrop.terminal import listed

__all__ = ["remembering", "with_labels"]

_SHOWN = 6
_TASKS = ("auto", "regression", "classification")


def with_labels(source: Source, network: nn.Module, options: Classes, readout: Readout) -> tuple[Source, str]:
    """The source with its target read as labels where it may be classes, and the task for `latedrop.calibrate`.

    Text is classes, in the order of the alphabet or of `names`; of whole numbers `latedrop.calibrate` decides by the
    model's output. Standard input can be read once only: there, text needs names.
    """
    task, names = options.task, options.names
    if task not in _TASKS:
        raise ArgumentError(f"expected --task {', '.join(_TASKS)}; found {task!r}.")
    if task == "regression" or (task == "auto" and len(source.columns.targets) > 1):
        if names:
            raise ArgumentError("expected --class-names with one target, of classes; found them with a regression.")
        options.check(classes=False)
        return source, task
    options.check(classes=True)
    column, once = only_target(source.columns), source.table.path == STANDARD
    if names:
        if not once:
            _check_names(names, as_logits(_output(source, network, readout)).shape[1])
        return _reading(source, Labels(column, names, sure=True)), "classification"
    found = False if once else distinct(column, source.values(column))
    if isinstance(found, tuple):
        output = _output(source, network, readout)
        if task == "auto" and output[0].numel() == 1 and len(found) != 2:
            return source, "regression"  # whose numbers are wrong, as will be said
        check_count(found, as_logits(output).shape[1], column, source.table.path)
        return _reading(source, Labels(column, found, sure=True)), "classification"
    if not found and not once and task == "auto":
        return source, task
    return _reading(source, Labels(column, sure=task == "classification")), task


def remembering(
    uq: Predictor | ClassPredictor, source: Source, options: Classes, held: Any, units: Sequence[str]
) -> Predictor | ClassPredictor:
    """The same with the names of its columns, and with prediction sets from the rows held out, where asked for."""
    options.check(classes=isinstance(uq, ClassPredictor))
    if not isinstance(uq, ClassPredictor):
        uq.calibration = replace(uq.calibration, columns=source.names())
        return uq
    if units:
        raise ArgumentError("expected --unit with a regression; found it with classes. Leave it out.")
    uq.calibration = replace(uq.calibration, columns=source.names())
    c = uq.calibration
    if c.verdict.accuracy < 1 / c.classes:
        warn(
            f"the model is right in {c.verdict.accuracy:.0%} of the validation rows, less than by chance: the classes "
            f"may have another order than {listed(c.known_names, _SHOWN, quote=True)}. Give that of the outputs: "
            "--class-names.",
            LatedropWarning,
            stacklevel=2,
        )
    if options.sets is not None:
        uq = uq.conformal(held, checked_score(options.sets), per_class=options.per_class)
    return uq if options.reject is None else uq.reject(held, options.reject)


def _reading(source: Source, labels: Labels) -> Source:
    return replace(source, columns=replace(source.columns, labels=labels))


def _output(source: Source, network: nn.Module, readout: Readout) -> Tensor:
    x = source.example(network)
    with source.explained(), failures_explained(x, network):
        return own_output(network, x, readout)


def _check_names(names: tuple[str, ...], classes: int) -> None:
    if len(names) != classes or len(set(names)) != classes:
        raise ArgumentError(
            f"expected --class-names with {classes} different names, as the model has {classes} classes; found "
            f"{', '.join(names)}."
        )
