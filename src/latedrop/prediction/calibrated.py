"""What every calibrated model has, of whatever task: the model, its record, and how rows are predicted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.calibration.weights import Weights
from latedrop.data.arrays import place
from latedrop.data.batches import Batches, row_batches
from latedrop.data.datasets import Unpack, first_inputs, gives_batches, inputs_in
from latedrop.data.items import Collate, as_items
from latedrop.data.names import in_order, index_of, pair_in_order
from latedrop.detection.detector import Detector, detector
from latedrop.dropout.moments import Engine
from latedrop.dropout.sampling import own_output, try_prefix
from latedrop.files import write_aside
from latedrop.network.calling import Readout, check_finite
from latedrop.network.network import Network
from latedrop.prediction.acquiring import Uncertainty, acquired
from latedrop.prediction.beyond import failures_explained, predicted_rows, warn_of_rows_beyond
from latedrop.prediction.class_prediction import ClassPrediction
from latedrop.prediction.exporting import export
from latedrop.prediction.prediction import Prediction, warn_of_overflow
from latedrop.prediction.whole import predicted_whole

__all__ = ["Calibrated"]

_Record = TypeVar("_Record", Calibration, ClassCalibration)
_Made = TypeVar("_Made", Prediction, ClassPrediction)
_Own = TypeVar("_Own", bound="Calibrated[Any, Any]")


class Calibrated(Generic[_Record, _Made]):
    """A model with its calibration. The model itself is untouched.

    Attributes:
        model: as the user has it.
        calibration: what was chosen and measured.
        cross_validated: the validation rows, each predicted by a fit to other rows: a `CrossValidated` with `mean`,
            `variance`, `target` and `errors`, or a `CrossValidatedClasses` with `probabilities` and `labels`. None
            after `load`, as a file holds no rows.
    """

    kind: ClassVar[type[Prediction] | type[ClassPrediction]]
    """Of predictions."""

    def __init__(
        self,
        model: nn.Module,
        calibration: _Record,
        readout: Readout = None,
        *,
        batch_size: int = 256,
        chunk: int | None = None,
        engine: Engine = "auto",
        collate: Collate = None,
        cross_validated: Any = None,
    ) -> None:
        self.model = model
        self.calibration: _Record = calibration
        self.readout = calibration.readout if readout is None else readout
        self.batch_size = batch_size
        self.chunk = chunk
        self.engine: Engine = engine
        self.collate = collate
        self.cross_validated = cross_validated
        self._weights = Weights(model, calibration.fingerprint)
        self._network = Network(model)

    @property
    def network(self) -> Network:
        """The private copy that makes predictions; made anew where tensors of the model were moved or replaced."""
        self._network = self._network.current()
        return self._network

    def __call__(self, x: Any) -> _Made:
        """Same as `predict`."""
        return self.predict(x)

    def predict(self, x: Any, **options: Any) -> _Made:
        """Predict N examples, in batches that fit memory: rows, a `DataLoader`, a data set, an iterator of batches.

        With `collate`, a list. The batch size does not change the result, unless every example has its own masks
        (`shared=False`). A data frame may have its columns in any order, where the calibration knows their names. Warns
        where the model's weights were changed since then, and of rows so far off that nothing can be known of them.
        """
        index = None
        if not isinstance(x, Tensor) or self.collate is not None:
            if self.collate is None and gives_batches(x):
                return self._joined(
                    [self.predict(part, **options) for part in inputs_in(x, self.model, self.batch_size)]
                )
            rows, sites = in_order(x, self.calibration.columns), self.calibration.sites
            index, x = index_of(x), as_items(rows, self.collate, sites)
        if not self._weights.are_same(self.model):
            self._network = self._network.current()
            self._weights.check(self.model)
        x = place(x, self._network.weight, check=False, cut=True)
        step = partial(self._step, **options) if options else self._step
        run = partial(self._compiled, step=step) if self.engine == "compiled" and self._is_whole(**options) else step
        with failures_explained(x, self.model):
            parts, beyond = predicted_rows(run, x, self.batch_size, self.calibration.sites, step)
        found = replace(parts[0] if len(parts) == 1 else self._joined(parts), index=index)
        if beyond is not None:
            found = found.unknown(beyond, self._own_output(x))
            warn_of_rows_beyond(beyond, stacklevel=3)
        elif isinstance(found, Prediction) and found.calibration.target is not None:
            warn_of_overflow(found, stacklevel=3)
        return found

    def predict_batches(
        self, loader: Iterable[Any], unpack: Callable[[Any], Any] | str | None = None
    ) -> Iterator[_Made]:
        """Yield a prediction for each batch; `unpack` takes the inputs out of a batch, as `lambda b: b[0]` does.

        Without it a batch is inputs alone, a pair (inputs, targets) where the model takes one input only, or a mapping;
        with `collate`, a list of items, or a tuple of it and targets. Of mappings `unpack` may name the targets.
        """
        yield from map(self.predict, inputs_in(loader, self.model, self.batch_size, unpack, self.collate))

    def predict_labelled(
        self, data: Any, unpack: Unpack | None = None, tick: Callable[[int], Any] = lambda rows: None
    ) -> tuple[_Made, Tensor]:
        """The prediction of data as `calibrate` takes them, and their targets, on the CPU; a batch is held at a time.

        `tick` is called with the rows of each batch.
        """
        parts, targets = [], []
        data = pair_in_order(data, self.calibration.columns)
        for x, y in Batches(self.batch_size, unpack, self.collate).read(data, self.model):
            parts.append(self.predict(x).cpu())
            targets.append(self._truth(parts[-1], y.cpu()))
            tick(len(y))
        return self._joined(parts), torch.cat(targets)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, whole or not at all; the weights are not in it."""
        write_aside(path, self.calibration.to_json().encode())

    def detector(
        self, usual: Any, scores: Sequence[str] | None = None, *, strange: Any = None, seed: int = 0
    ) -> Detector:
        """Tell rows that are unlike those of `usual`, with p-values: a threshold then has a rate of false alarms.

        Args:
            usual: inputs known to be usual, a `DataLoader`, a data set, or an iterator of batches of inputs. Rows used
                for nothing else make p-values exact; with validation rows they are nearly so. With several
                scores one half, at random, fits their combination, the other gives the p-values.
            scores: names; by default `"novelty"` and what costs nothing more: `"entropy"`, `"confidence"` and
                `"energy"` for classes, `"std"` for numbers. Also `"neighbours"` (needs scipy), `"sites"` (a score for
                every site, by a backward pass for each output), and `"mutual_information"` for classes.
            strange: rows known to be strange, if there are any: the combination is fitted to tell these.
            seed: fixes the halves.
        """
        return detector(self, usual, scores, strange=strange, seed=seed)  # type: ignore[arg-type]

    def acquire(
        self, pool: Any, count: int, *, score: Uncertainty | None = None, diverse: bool = True, seed: int = 0
    ) -> Tensor:
        """Return the places of `count` rows of a pool without labels that are worth a label, `(count,)`.

        Args:
            pool: inputs, whose rows have places.
            count: how many rows are labelled together.
            score: `"novelty"`; `"entropy"` of classes, or `"std"` of numbers. By default entropy of classes, and of
                numbers novelty, where the calibration can tell it.
            diverse: rows that differ from each other; False: those of the largest scores, in that order.
            seed: of the choice among rows that differ.
        """
        return acquired(self, pool, count, score, diverse, seed)

    def to_onnx(self, path: str | os.PathLike[str], example: Any, *, level: float = 0.9) -> Path:
        """Write one ONNX file that `latedrop.load_onnx` reads without torch.

        It gives `mean`, `std`, `low` and `high`; of classes `probabilities`, `label` and scores.

        Args:
            path: of the file.
            example: inputs of a few rows, or a loader that has them. The file takes any number of rows, and all other
                sizes as they are here.
            level: probability content of `low` and `high`.
        """
        example = first_inputs(example, self.model, self.collate)
        self.predict(example)  # also tells what is wrong with the example
        placed = place(as_items(in_order(example, self.calibration.columns), self.collate), self.model)
        if isinstance(self.calibration, Calibration) and self.calibration.method == "sample":
            try_prefix(self._network, placed, self.calibration.sites, self.readout)
        return export(path, self.model, self.calibration, self._traced, placed, level)

    def _step(self, x: Any, **options: Any) -> _Made:
        """The prediction of one batch, which was placed, step by step."""
        raise NotImplementedError

    def _traced(self, x: Any) -> _Made:
        """The same without anything that no file can hold."""
        return self._step(x)

    def _compiled(self, x: Any, step: Callable[[Any], _Made]) -> _Made:
        """The same by a program."""
        return predicted_whole(self._network, x, self.calibration, self.readout, step)

    def _is_whole(self, **options: Any) -> bool:
        """Return True if a whole prediction can be a program; draws are one by themselves."""
        raise NotImplementedError

    def _truth(self, prediction: _Made, y: Tensor) -> Tensor:
        """The targets of rows that were predicted; an error where they do not fit."""
        raise NotImplementedError

    def _joined(self, parts: Sequence[_Made]) -> _Made:
        joined: _Made = self.kind.joined(parts)
        return joined

    def _own_output(self, x: Any) -> Tensor:
        """Of the model itself, where rows are beyond numbers; an error where it is finite for none."""
        parts = row_batches(x, self.batch_size)
        found = torch.cat([own_output(self.network, part, self.readout, check=False) for part in parts])
        if not bool(found.isfinite().any()):
            check_finite(found, "without dropout")
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {type(self.model).__name__}: {self.calibration.verdict}"

    def _with(self: _Own, calibration: Any) -> _Own:
        """The same with another record."""
        found = copy(self)
        found.calibration = calibration
        return found
