"""Which task it is, and a calibrated classifier where it is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, get_args
from warnings import warn

from torch import Tensor, nn

from latedrop.calibration.batches import as_target, batches, first_rows, in_batches, is_pair, row_total
from latedrop.calibration.classes.fit import Scaling
from latedrop.calibration.classes.labels import Task, is_classification
from latedrop.calibration.classes.pixels import check_ignore_index
from latedrop.calibration.classes.predictor import ClassPredictor
from latedrop.calibration.classes.search import RATES, search_classes
from latedrop.calibration.names import names_of
from latedrop.calibration.search import batches_with_sites
from latedrop.calibration.setup import Setup
from latedrop.data.arrays import place
from latedrop.data.items import as_items
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.network.network import check_module

__all__ = ["ClassOptions", "Peeked", "classifier"]

_FEW = 4
_THEIRS: dict[str, Any] = {
    "criterion": None,
    "mean": None,
    "floor": False,
    "per_site": False,
    "loss": "nll",
    "per_output": None,
    "scale": "optimal",
    "intervals": None,
    "shared": True,
    "target": None,
    "row_weights": None,
}
"""Options that only a regression has, and what they are where they are not given."""


class ClassOptions(NamedTuple):
    """Options of `calibrate` that only classes have."""

    class_names: Sequence[str] | None = None
    ignore_index: int | None = None
    scaling: Scaling = "temperature"


class Peeked:
    """Batches of which the first was looked at."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._all, self._rest = data, iter(data)
        self.first = next(self._rest, None)

    def __iter__(self) -> Iterator[Any]:
        return self._rest if self.first is None else chain([self.first], self._rest)

    @property
    def row_total(self) -> int | None:
        """How many rows there are, where the data tell."""
        return row_total(self._all)


def classifier(
    model: nn.Module,
    data: Any,
    options: dict[str, Any],
    task: Task,
    ours: ClassOptions,
) -> tuple[ClassPredictor | None, Any]:
    """A calibrated classifier, or None where it is a regression; and the data, of which a batch may have been read."""
    names, ignore_index, scaling = ours
    if scaling not in get_args(Scaling):
        raise ArgumentError(f"expected scaling {', '.join(get_args(Scaling))}; found {scaling!r}.")
    data = in_batches(data, options["batch_size"])
    one_by_one = not (options["unpack"] is None and is_pair(data))
    looks = task == "auto" and isinstance(data, Iterable) and not hasattr(data, "__array__")
    if looks and one_by_one:
        data = Peeked(data)
    labels, output = _first(model, data, options) if looks else (None, None)
    if looks and labels is None and (names is not None or ignore_index is not None or scaling != "temperature"):
        task = "classification"  # these say so; what is wrong with model or data is told below
    if not is_classification(task, labels, output):
        if names is not None:
            raise ArgumentError("expected class_names with task='classification' alone; found them with a regression.")
        if ignore_index is not None:
            raise ArgumentError("expected ignore_index with task='classification' alone; found it with a regression.")
        if scaling != "temperature":
            raise ArgumentError("expected scaling with task='classification' alone; found it with a regression.")
        if task == "auto":
            _check_one_hot(labels, output)
        _warn_of_classes(labels, output)
        return None, data
    check_module(model)
    check_ignore_index(ignore_index)
    wrong = [name for name, usual in _THEIRS.items() if options[name] is not usual and _differ(options[name], usual)]
    if wrong or options["method"] not in (None, "terms", "sample"):
        wrong += [] if options["method"] in (None, "terms", "sample") else ["method"]
        theirs = ", ".join(f"{name}=" for name in wrong)
        raise ArgumentError(
            f"expected options that classes have; found {theirs}. Methods are 'terms', the default, and 'sample'. "
            "Numbers that are no classes are task='regression'."
        )
    drawn = options["method"] == "sample" or options["rates"] is not None or options["draws"] is not None
    held = options["conformal_data"]
    usual: dict[str, Any] = {"conformal_data": None}
    if drawn:  # with draws, too, classes have reference rows and a guard
        usual |= {"rates": RATES if options["rates"] is None else options["rates"], "reference": None, "guard": None}
        usual["terms"] = None
    setup = Setup(**{**options, **usual}, columns=names_of(data)).checked()
    setup = replace(setup, reference=options["reference"], guard=options["guard"] is None or bool(options["guard"]))
    stream = batches_with_sites(model, data, setup, per_batch=1)
    record = search_classes(model, stream, setup, _names(names), ignore_index, scaling)
    if record.names and len(record.names) != record.classes:
        raise ArgumentError(f"expected {record.classes} class_names; found {len(record.names)}.")
    parts = {name: options[name] for name in ("batch_size", "chunk", "engine", "collate")}
    found = ClassPredictor(model, record, setup.readout, **parts)
    return found if held is None else found.conformal(held, unpack=setup.unpack), data


def _differ(value: Any, usual: Any) -> bool:
    return usual is None or bool(value != usual)


def _names(names: Sequence[str] | None) -> tuple[str, ...]:
    found = () if names is None else tuple(names)
    if not all(isinstance(name, str) for name in found) or len(set(found)) != len(found) or isinstance(names, str):
        raise ArgumentError(f"expected class_names as different texts; found {names!r}.")
    return found


def _first(model: nn.Module, data: Any, options: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Labels, and the output of a few rows where these may be classes; None where either cannot be had.

    What is wrong with them is said later, by whoever uses them.
    """
    try:
        if isinstance(data, Peeked):
            x, y = next(batches([data.first], model, unpack=options["unpack"], collate=options["collate"]))
        else:  # of a pair only a few rows go to the device
            x, y = None, as_target(data[1])
        if y.is_floating_point() and not _zero_or_one(y):
            return y, None
        x = first_rows(data, model, _FEW, options["collate"]) if x is None else x
        output = own_output(model, place(as_items(x, None), model), options["readout"])
    except Exception:
        return None, None
    return y, output


def _zero_or_one(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all()) and len(values.unique()) == 2


def _check_one_hot(labels: Tensor | None, output: Tensor | None) -> None:
    """`DataError` of targets with a single 1 in every row and 0 elsewhere; as numbers they would be fitted silently."""
    if labels is None or output is None or labels.dim() != 2 or labels.shape[1] < 2 or output.dim() != 2:
        return
    if len(labels) > 1 and bool(((labels == 0) | (labels == 1)).all()) and bool((labels.sum(1) == 1).all()):
        raise DataError(
            f"expected one label for each row, or numbers; found targets of shape {tuple(labels.shape)} with a single "
            "1 in every row, as one-hot labels are. Pass labels.argmax(1), or task='regression' where they are numbers."
        )


def _warn_of_classes(labels: Tensor | None, output: Tensor | None) -> None:
    if labels is not None and output is not None and _zero_or_one(labels) and output[0].numel() == 1:
        warn(
            "the targets are all 0 or 1, and are fitted as numbers: the outputs should be close to 0 and 1. Of a "
            "classifier with one logit pass task='classification'; task='regression' says that they are numbers.",
            LatedropWarning,
            stacklevel=5,
        )
