"""The calibrated classifier: `calibrate` makes it, `load` brings it back, `predict` uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.class_sets import ClassSets, Rejection, Score, checked_score, rejection
from latedrop.calibration.fit_classes import entropy, information
from latedrop.calibration.labels import as_labels, as_logits
from latedrop.calibration.measure_classes import largest_logit
from latedrop.calibration.seen import marks_of, warn_of_fitted_rows
from latedrop.data.arrays import check_inputs, floating
from latedrop.data.datasets import Unpack
from latedrop.data.rows import take_rows
from latedrop.dropout.moments import Engine
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, DataError
from latedrop.network.network import Readout, part_of
from latedrop.prediction.calibrated import Calibrated, checked_novelty
from latedrop.prediction.class_prediction import ClassPrediction
from latedrop.terms import BatchContext

__all__ = ["ClassPredictor"]

_DRAWS = 30  # thinned networks for the mutual information, where the calibration has none of its own


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
            rate: also measure how much 30 thinned networks at this rate disagree, where the calibration uses no
                dropout of its own: gives `mutual_information`.
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
        return as_labels(y, self.calibration.classes, (len(prediction),))

    def _is_whole(self, **options: Any) -> bool:
        return not self.calibration.maps and self.calibration.rate is None and not options

    def _step(self, x: Any, *, rate: float | None = None) -> ClassPrediction:  # type: ignore[override]
        c = self.calibration
        check_inputs(floating(x))
        rows = BatchContext(self._network, x, c.sites, self.readout, c.features, of=largest_logit)
        novelty = c.novelty(rows)  # first, as the same pass gives the logits
        logits = as_logits(rows.mean, maps=c.maps)
        if logits.shape[1] != c.classes:
            raise DataError(
                f"expected logits of {c.classes} classes, as in the calibration; found {logits.shape[1]}. Use the "
                "readout that the calibration was made with."
            )
        logits = logits.float() if c.maps else logits.double()
        novelty = None if novelty is None else checked_novelty(novelty).to(logits)
        temperature = c.fit.temperatures(novelty, logits)
        logs = torch.log_softmax(logits / temperature.reshape(-1, *[1] * (logits.dim() - 1)), 1)
        rate = c.rate if c.rate is not None else rate
        if rate is None:
            return ClassPrediction(logs, logits, c, novelty)
        mean, information = (self._draw_maps if c.maps else self._draw)(x, rate, novelty, logits)
        return ClassPrediction(logs if c.rate is None else mean, logits, c, novelty, information)

    # The mutual information is taken at one temperature for all rows: at that of a strange one all draws would agree
    # that nothing is known.

    def _draw(self, x: Any, rate: float, novelty: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log of the mean softmax of thinned networks, `(N, K)`, and their mutual information, `(N,)`."""
        c = self.calibration
        (moments,) = sample_rates(self._network, x, [rate], c.sites, self._options(self.readout, keep=True))
        assert moments.outputs is not None
        draws = torch.stack([as_logits(part) for part in moments.outputs]).to(logits)
        return c.fit.log_probabilities(draws, novelty), information(torch.log_softmax(draws / c.alone, 2))

    def _draw_maps(self, x: Any, rate: float, novelty: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same of maps, image by image: of the draws means are kept, `H(mean p) - mean H(p)`."""
        c, least = self.calibration, torch.finfo(logits.dtype).tiny
        means, disagreement = [], []
        for i, t in enumerate(c.fit.temperatures(novelty, logits).tolist()):

            def read(output: Any, t: float = t) -> Tensor:
                drawn = as_logits(part_of(output, self.readout), maps=True).to(logits)
                alone = torch.log_softmax(drawn / c.alone, 1)
                parts = torch.softmax(drawn / t, 1), alone.exp(), entropy(alone.movedim(1, -1))[:, None]
                return torch.cat(parts, 1)

            options = self._options(read)
            (moments,) = sample_rates(self._network, take_rows(x, slice(i, i + 1)), [rate], c.sites, options)
            mean, alone, own = moments.mean.split([c.classes, c.classes, 1], 1)
            means.append(mean.clamp_min(least).log())
            together = entropy(alone.clamp_min(least).log().movedim(1, -1))
            disagreement.append((together - own[:, 0]).clamp_min(0))
        return torch.cat(means), torch.cat(disagreement)

    def _options(self, readout: Readout, *, keep: bool = False) -> DrawOptions:
        engine: Engine = "auto" if self.engine == "compiled" else self.engine  # whose programs have moments alone
        return DrawOptions(
            self.calibration.draws or _DRAWS, self.calibration.seed, readout, self.chunk, True, keep, engine
        )
