"""The calibrated classifier: `calibrate` makes it, `load` brings it back, `predict` uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.class_sets import ClassSets, Rejection, Score, checked_score, rejection
from latedrop.calibration.labels import as_labels, as_logit_maps, as_logits
from latedrop.calibration.measure_classes import largest_logit, spread_of
from latedrop.calibration.seen import marks_of, warn_of_fitted_rows
from latedrop.calibration.softmax import information, mutual_information
from latedrop.data.arrays import check_inputs, floating
from latedrop.data.datasets import Unpack
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, DataError
from latedrop.network.calling import check_finite
from latedrop.prediction.beyond import checked_novelty
from latedrop.prediction.calibrated import Calibrated
from latedrop.prediction.class_prediction import DRAWS, ClassPrediction, predicted_maps
from latedrop.terms import BatchContext

__all__ = ["ClassPredictor"]


class ClassPredictor(Calibrated[ClassCalibration, ClassPrediction]):
    """A classifier with its calibration: call it on inputs, get `ClassPrediction`s. The model itself is untouched.

    >>> import latedrop
    >>> x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    >>> uq = latedrop.calibrate(net, (x, x[:, :3].argmax(1)), progress=False)
    >>> p = uq.predict(x)
    >>> p.probabilities.shape, p.label.shape, p.novelty.shape
    (torch.Size([90, 3]), torch.Size([90]), torch.Size([90]))
    """

    kind = ClassPrediction

    def predict(self, x: Any, *, rate: float | None = None) -> ClassPrediction:  # type: ignore[override]
        """Predict N rows, in batches that fit memory; see `Predictor.predict`.

        Args:
            x: inputs, a `DataLoader`, a data set, or an iterator of batches.
            rate: also measure how much thinned networks at this rate disagree, to first order, where the calibration
                uses no dropout of its own: gives `mutual_information`, at the cost of a backward pass for each class;
                of maps by 30 draws.
        """
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < 1):
            raise ArgumentError(f"expected a rate inside (0, 1); found {rate!r}.")
        return super().predict(x, **({} if rate is None else {"rate": rate}))

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

    def _truth(self, prediction: ClassPrediction, y: Tensor) -> Tensor:
        if self.calibration.maps:
            raise ArgumentError(
                "expected a classifier of rows for prediction sets, rejection and judgements; found maps, whose pixels "
                "depend on each other. Judge images by predict(...).image_scores."
            )
        return as_labels(y, self.calibration.classes)

    def _is_whole(self, **options: Any) -> bool:
        return not self.calibration.maps and self.calibration.rate is None and not options

    def _traced(self, x: Any) -> ClassPrediction:
        return self._step(x, simulated=False)

    def _step(self, x: Any, *, rate: float | None = None, simulated: bool = True) -> ClassPrediction:  # type: ignore[override]
        """One batch; without `simulated`, nothing that takes random numbers of its own."""
        c = self.calibration
        check_inputs(floating(x))
        rows = BatchContext(self._network, x, c.sites, self.readout, c.features, of=largest_logit)
        strange = c.novelty(rows)  # first, as the same pass gives the logits
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
