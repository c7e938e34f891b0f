"""The calibrated model of numbers: `calibrate` makes it, `load` brings it back, `predict` uses it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop.calibration.intervals import Conformal
from latedrop.calibration.measure import moments
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.scale_fit import residuals
from latedrop.calibration.seen import marks_of, merged, sketch, warn_of_fitted_rows
from latedrop.data.arrays import check_inputs, floating, place
from latedrop.data.batches import Batches
from latedrop.data.datasets import Unpack, first_inputs, gives_batches, inputs_in, is_loader, only_inputs
from latedrop.data.items import as_items
from latedrop.data.names import in_order, index_of, pair_in_order
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import own_output, try_prefix
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics import align_target
from latedrop.prediction.beyond import failures_explained, predicted_rows, warn_of_rows_beyond
from latedrop.prediction.calibrated import Calibrated
from latedrop.prediction.explaining import explained
from latedrop.prediction.exporting import export
from latedrop.prediction.prediction import Explanation, Prediction, warn_of_overflow
from latedrop.prediction.whole import predicted_whole
from latedrop.records import plain
from latedrop.streams import Stream
from latedrop.streams.tracking import STEP
from latedrop.terms import BatchContext

__all__ = ["Predictor"]


class Predictor(Calibrated[Calibration]):
    """A model with its calibration: call it on inputs, get `Prediction`s. The model itself is untouched.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2))
    >>> uq.predict(x).std.shape, uq.scaled("relaxed").predict(x).std.shape
    (torch.Size([64, 1]), torch.Size([64, 1]))
    """

    def __call__(self, x: Any) -> Prediction:
        """Same as `predict`."""
        return self.predict(x)

    def predict(self, x: Any) -> Prediction:
        """Predict N examples, in batches that fit memory: rows, a `DataLoader`, a data set, an iterator of batches.

        With `collate`, a list. The batch size does not change the result, unless every example has its own masks
        (`shared=False`). A data frame may have its columns in any order, where the calibration knows their names. Warns
        where the model's weights were changed since then, and of rows so far off that nothing can be known of them.
        """
        index = None
        if not isinstance(x, Tensor) or self.collate is not None:
            if self.collate is None and gives_batches(x):
                return Prediction.joined(list(self.predict_batches(x)))
            rows, sites = in_order(x, self.calibration.columns), self.calibration.sites
            index, x = index_of(x), as_items(rows, self.collate, sites)
        if not self._weights.are_same(self.model):
            self._network = self._network.current()
            self._weights.check(self.model)
        x = place(x, self._network.weight, check=False, cut=True)
        with failures_explained(x, self.model):
            parts, beyond = predicted_rows(self._run, x, self.batch_size, self.calibration.sites, self._predicted)
        found = replace(parts[0] if len(parts) == 1 else Prediction.joined(parts), index=index)
        if beyond is not None:
            found = found.unknown(beyond, self._own_output(x))
            warn_of_rows_beyond(beyond, stacklevel=3)
            return found
        if self.calibration.target is not None:
            warn_of_overflow(found, stacklevel=3)
        return found

    def predict_batches(
        self, loader: Iterable[Any], unpack: Callable[[Any], Any] | str | None = None
    ) -> Iterator[Prediction]:
        """Yield one `Prediction` per batch; `unpack` takes the inputs out of a batch, as `lambda b: b[0]` does.

        Without it a batch is inputs alone, a pair (inputs, targets) where the model takes one input only, or a mapping;
        with `collate`, a list of items, or a tuple of it and targets. Of mappings `unpack` may name the targets.
        """
        yield from map(self.predict, inputs_in(loader, self.model, self.batch_size, unpack, self.collate))

    def predict_labelled(
        self, data: Any, unpack: Unpack | None = None, tick: Callable[[int], Any] = lambda rows: None
    ) -> tuple[Prediction, Tensor]:
        """The prediction of data as `calibrate` takes them, and their targets, on the CPU; a batch is held at a time.

        `tick` is called with the rows of each batch.
        """
        parts, targets = [], []
        data = pair_in_order(data, self.calibration.columns)
        for x, y in Batches(self.batch_size, unpack, self.collate).read(data, self.model):
            parts.append(self.predict(x).cpu())
            targets.append(align_target(parts[-1].mean, y.cpu()))
            tick(len(y))
        return Prediction.joined(parts), torch.cat(targets)

    def scaled(self, choice: Choice) -> Predictor:
        """The same predictor with another scale; nothing is run again.

        `choice` is `"optimal"`, `"relaxed"`, a number, or a step of `predictor.calibration.tradeoff()`.
        """
        return self._with(self.calibration.with_choice(choice))

    def conformal(self, data: Any, unpack: Unpack | None = None) -> Predictor:
        """The same predictor with split-conformal intervals from `data`, which must have served for nothing else."""
        calibration = self.calibration
        if len(calibration.output_shape) > 1:
            raise ArgumentError(
                f"expected one value or a vector per example for conformal intervals; found outputs of shape "
                f"{calibration.output_shape}, whose entries are not exchangeable. Pass a readout, such as a map's sum."
            )
        columns: list[list[Tensor]] = []
        marks = []
        data = pair_in_order(data, calibration.columns)
        for x, y in Batches(self.batch_size, unpack, self.collate).read(data, self.model):
            part = self.predict(x).in_model_unit()
            target = align_target(part.mean, y if calibration.target is None else calibration.target.forward(y))
            columns.append(residuals(part.mean, part.variance, target, per_output=part.mean.dim() > 1))
            marks.append(marks_of(part.mean, target))
        if not columns:
            raise DataError("expected at least one row for conformal intervals; found none.")
        if not isinstance(calibration.intervals, Conformal):  # whose rows may come again
            warn_of_fitted_rows(calibration.seen, np.concatenate(marks), stacklevel=2)
        scales, floors = calibration.chosen()
        joined = [torch.cat(column) for column in zip(*columns, strict=True)]
        seen = merged(calibration.seen, sketch(np.concatenate(marks)))
        return self._with(replace(calibration, intervals=Conformal.fit(joined, scales, floors), seen=seen))

    def explain(self, x: Any, *, output: int = 0, most: int = 10) -> Explanation:
        """Where the doubt about one prediction comes from, to first order: the share of each site and its main units.

        With terms, also the share of every other one and of the floor.

        Args:
            x: inputs of one row, or a data set with one.
            output: which entry of the example's output, counted flat.
            most: how many units to list.
        """
        if is_loader(x) and self.collate is None:
            x = only_inputs(x, self.model)
        x = as_items(in_order(x, self.calibration.columns), self.collate, self.calibration.sites)
        return explained(self.network, x, self.calibration, self.readout, output=output, most=most)

    def stream(
        self,
        level: float = 0.9,
        path: str | os.PathLike[str] | None = None,
        *,
        alarm: float = 0.01,
        waiting: int = 1000,
        step: float = STEP,
        watch_every: int = 1,
    ) -> Stream:
        """Intervals that follow the errors as labels arrive, and alarms; see `latedrop.streams.Stream`."""
        c = self.calibration
        options: dict[str, Any] = {"alarm": alarm, "waiting": waiting, "step": step, "watch_every": watch_every}
        made_with = c.fingerprint if c.target is None else f"{c.fingerprint} {json.dumps(plain(c.target))}"
        known: dict[str, Any] = {"usual": c.usual(), "made_with": made_with, "unit": c.target}
        return Stream(self.predict, level, path, **options, **known)

    def to_onnx(self, path: str | os.PathLike[str], example: Any, *, level: float = 0.9) -> Path:
        """Write one ONNX file that gives `mean`, `std`, `low` and `high`; `latedrop.load_onnx` reads it without torch.

        Args:
            path: of the file.
            example: inputs of a few rows, or a loader that has them. The file takes any number of rows, and all other
                sizes as they are here.
            level: probability content of `low` and `high`.
        """
        example = first_inputs(example, self.model, self.collate)
        expected = self.predict(example)  # also tells what is wrong with the example
        placed = place(as_items(in_order(example, self.calibration.columns), self.collate), self.model)
        if self.calibration.method == "sample":
            try_prefix(self._network, placed, self.calibration.sites, self.readout)
        return export(path, self.model, expected.calibration, self._predicted, placed, level)

    def _run(self, x: Any) -> Prediction:
        """The prediction of one batch, by the engine that was asked for."""
        if self.engine != "compiled" or self.calibration.method == "sample":  # whose draws are a program
            return self._predicted(x)
        return predicted_whole(self._network, x, self.calibration, self.readout, self._predicted)

    def _predicted(self, x: Any) -> Prediction:
        """The same, step by step."""
        if self.calibration.terms is not None:
            terms = self.calibration.terms
            check_inputs(floating(x))
            sites, gradients = self.calibration.sites, terms.needs_gradients
            rows = BatchContext(self._network, x, sites, self.readout, terms.features, gradients=gradients)
            mean, variance, novelty, shares = terms.predicted(rows)
            self.calibration.check_outputs(mean)
            return Prediction(mean, variance, self.calibration, novelty, shares=shares)
        c = self.calibration
        draws = c.draws if c.method == "sample" else 2  # the other methods draw nothing
        options = DrawOptions(draws, c.seed, self.readout, self.chunk, c.shared, engine=self.engine)
        (found,) = moments(self._network, x, [c.rate], c.sites, c.method, options)
        own = c.mean == "model" and c.method != "linear"  # which gives the model's own output anyway
        mean = own_output(self._network, x, self.readout).clone() if own else found.mean
        c.check_outputs(mean)
        return Prediction(mean, found.variance, c)
