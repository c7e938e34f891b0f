"""The calibrated classifier: `calibrate` makes it, `load` brings it back, `predict` uses it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.class_sets import ClassSets, Rejection, Score, checked_score, rejection
from latedrop.calibration.labels import as_labels, as_logit_maps, as_logits
from latedrop.calibration.measure_classes import largest_logit, spread_of
from latedrop.calibration.seen import marks_of, warn_of_fitted_rows
from latedrop.calibration.softmax import information, mutual_information
from latedrop.data.arrays import check_inputs, floating, place
from latedrop.data.batches import Batches
from latedrop.data.datasets import Unpack, first_inputs, gives_batches, inputs_in
from latedrop.data.items import as_items
from latedrop.data.names import in_order, pair_in_order
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, DataError
from latedrop.network.calling import check_finite
from latedrop.prediction.beyond import checked_novelty, failures_explained, predicted_rows, warn_of_rows_beyond
from latedrop.prediction.calibrated import Calibrated
from latedrop.prediction.class_prediction import DRAWS, ClassPrediction, predicted_maps
from latedrop.prediction.exporting import export
from latedrop.prediction.whole import predicted_whole
from latedrop.terms import BatchContext

__all__ = ["ClassPredictor"]


class ClassPredictor(Calibrated[ClassCalibration]):
    """A classifier with its calibration: call it on inputs, get `ClassPrediction`s. The model itself is untouched.

    >>> import latedrop
    >>> x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    >>> uq = latedrop.calibrate(net, (x, x[:, :3].argmax(1)), progress=False)
    >>> p = uq.predict(x)
    >>> p.probabilities.shape, p.label.shape, p.novelty.shape
    (torch.Size([90, 3]), torch.Size([90]), torch.Size([90]))
    """

    def __call__(self, x: Any) -> ClassPrediction:
        """Same as `predict`."""
        return self.predict(x)

    def predict(self, x: Any, *, rate: float | None = None) -> ClassPrediction:
        """Predict N rows, in batches that fit memory; with `collate`, the items of a list.

        Args:
            x: inputs, a `DataLoader`, a data set, or an iterator of batches.
            rate: also measure how much thinned networks at this rate disagree, to first order, where the calibration
                uses no dropout of its own: gives `mutual_information`, at the cost of a backward pass for each class;
                of maps by 30 draws.
        """
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < 1):
            raise ArgumentError(f"expected a rate inside (0, 1); found {rate!r}.")
        if gives_batches(x) and self.collate is None:
            each = inputs_in(x, self.model, self.batch_size)
            return ClassPrediction.joined([self.predict(part, rate=rate) for part in each])
        if not self._weights.are_same(self.model):
            self._network = self._network.current()
            self._weights.check(self.model)
        x = as_items(in_order(x, self.calibration.columns), self.collate, self.calibration.sites)
        x = place(x, self.model, cut=True)
        with failures_explained(x, self.model):
            step = partial(self._batch, rate=rate)
            run = self._whole if self._can_compile(rate) else step
            parts, beyond = predicted_rows(run, x, self.batch_size, self.calibration.sites, step)
        found = ClassPrediction.joined(parts)
        if beyond is not None:
            found = found.unknown(beyond, self._own_output(x))
            warn_of_rows_beyond(beyond, stacklevel=3)
        return found

    def predict_batches(
        self, loader: Iterable[Any], unpack: Callable[[Any], Any] | str | None = None
    ) -> Iterator[ClassPrediction]:
        """Yield one `ClassPrediction` per batch; see `Predictor.predict_batches`."""
        yield from map(self.predict, inputs_in(loader, self.model, self.batch_size, unpack, self.collate))

    def predict_labelled(
        self, data: Any, unpack: Unpack | None = None, tick: Callable[[int], Any] = lambda rows: None
    ) -> tuple[ClassPrediction, Tensor]:
        """The prediction of data as `calibrate` takes them, and their labels, on the CPU; a batch is held at a time.

        `tick` is called with the rows of each batch.
        """
        if self.calibration.maps:
            raise ArgumentError(
                "expected a classifier of rows for prediction sets, rejection and judgements; found maps, whose pixels "
                "depend on each other. Judge images by predict(...).image_scores."
            )
        parts, labels = [], []
        data = pair_in_order(data, self.calibration.columns)
        for x, y in Batches(self.batch_size, unpack, self.collate).read(data, self.model):
            parts.append(self.predict(x).cpu())
            labels.append(as_labels(y, self.calibration.classes).cpu())
            tick(len(y))
        if not parts:
            raise DataError("expected at least one row with its label; found none.")
        return ClassPrediction.joined(parts), torch.cat(labels)

    def conformal(
        self, data: Any, score: Score = "lac", *, per_class: bool = False, unpack: Unpack | None = None
    ) -> ClassPredictor:
        """The same predictor with prediction sets from `data`, which must have served for nothing else.

        Args:
            data: rows and labels, in the form of `calibrate`'s.
            score: `"lac"` makes the smallest sets, `"aps"` covers easy and hard rows more evenly, `"raps"` does so
                without long sets.
            per_class: sets that hold each class as often as they say, and not only the labels as a whole.
            unpack: from a batch to `(inputs, labels)`.
        """
        found, labels = self._held_out(data, unpack)
        sets = ClassSets.fit(found.probabilities, labels, checked_score(score), per_class=per_class)
        return self._with(replace(self.calibration, sets=sets))

    def rejection(
        self, data: Any, risk: float = 0.01, *, confidence: float = 0.95, unpack: Unpack | None = None
    ) -> Rejection:
        """The most lenient threshold under which the error rate of kept rows stays below `risk`.

        It does so with probability `confidence` over the rows of `data`, which must have served for nothing else.
        """
        found, labels = self._held_out(data, unpack)
        return rejection(found.confidence, found.label == labels, risk, confidence)

    def reject(
        self, data: Any, risk: float = 0.01, *, confidence: float = 0.95, unpack: Unpack | None = None
    ) -> ClassPredictor:
        """The same predictor with the rule of `rejection`, which is saved with it: predictions then know `kept`."""
        rule = self.rejection(data, risk, confidence=confidence, unpack=unpack)
        return self._with(replace(self.calibration, rule=rule))

    def _held_out(self, data: Any, unpack: Unpack | None) -> tuple[ClassPrediction, Tensor]:
        """As `predict_labelled`, with a warning where these are the validation rows."""
        found, labels = self.predict_labelled(data, unpack)
        warn_of_fitted_rows(self.calibration.seen, marks_of(found.logits, labels), stacklevel=3)
        return found, labels

    def to_onnx(self, path: str | os.PathLike[str], example: Any) -> Path:
        """Write one ONNX file that gives `probabilities`, `label` and scores; see `Predictor.to_onnx`."""
        example = first_inputs(example, self.model, self.collate)
        self.predict(example)  # also tells what is wrong with the example
        placed = place(as_items(in_order(example, self.calibration.columns), self.collate), self.model)

        def predicted(x: Any) -> ClassPrediction:
            return self._batch(x, None, simulated=False)

        return export(path, self.model, self.calibration, predicted, placed)

    def _can_compile(self, rate: float | None) -> bool:
        """Whether the whole prediction is to be a program; draws are one by themselves."""
        c = self.calibration
        return self.engine == "compiled" and not c.maps and c.rate is None and rate is None

    def _whole(self, x: Any) -> ClassPrediction:
        return predicted_whole(self._network, x, self.calibration, self.readout, partial(self._batch, rate=None))

    def _batch(self, x: Any, rate: float | None, *, simulated: bool = True) -> ClassPrediction:
        """One batch; without `simulated`, nothing that takes random numbers of its own."""
        c = self.calibration
        check_inputs(floating(x))
        rows = BatchContext(self._network, x, c.sites, self.readout, c.features, of=largest_logit)
        strange = None if c.guard is None else c.guard.values(rows)  # first, as the same pass gives the logits
        output = rows.mean
        logits = as_logit_maps(output) if c.maps else as_logits(output)
        if logits.shape[1] != c.classes:
            raise DataError(
                f"expected logits of {c.classes} classes, as in the calibration; found {logits.shape[1]}. Use the "
                "readout that the calibration was made with."
            )
        logits = logits.float() if c.maps else logits.double()
        strange = None if strange is None else checked_novelty(strange).to(logits)
        if c.maps:
            how = DrawOptions(c.draws or DRAWS, c.seed, self.readout, self.chunk, True, False, self.engine)
            return predicted_maps(self._network, x, logits, strange, c, rate, how)
        if c.rate is not None:
            options = DrawOptions(c.draws, c.seed, self.readout, self.chunk, True, True, self.engine)
            (found,) = sample_rates(self._network, x, [c.rate], c.sites, options)
            assert found.outputs is not None
            drawn = torch.stack([as_logits(part) for part in found.outputs]).double()
            logs = c.fit.log_probabilities(drawn, strange, None)
            each = torch.log_softmax(drawn / c.alone, 2)
            return ClassPrediction(logs, logits, c, strange, information(each))
        spread, doubt = None, None
        if c.fit.odds or rate is not None:
            spread = spread_of(self._network, x, c.sites, self.readout).to(logits)
            check_finite(spread, "of what dropout does to it")
            odds = torch.tensor(c.fit.odds or [rate / (1 - rate)], dtype=logits.dtype, device=logits.device)  # type: ignore[operator]
            summed = (odds.reshape(-1, 1, 1) * spread).sum(1)
            # At one temperature: at that of a strange row all draws would agree that nothing is known.
            doubt = mutual_information(logits, summed, logits.new_tensor(c.alone)) if simulated else None
        return ClassPrediction(c.fit.log_probabilities(logits, strange, spread), logits, c, strange, doubt)
