"""What a calibrated classifier gives: probabilities, and how far to trust them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.class_sets import Rejection
from latedrop.calibration.fit_classes import entropy
from latedrop.calibration.guard import LARGEST
from latedrop.errors import ArgumentError
from latedrop.prediction.prediction import Predicted, frame_of

if TYPE_CHECKING:
    import pandas

__all__ = ["ClassPrediction"]


@dataclass(frozen=True)
class ClassPrediction(Predicted):
    """Predictions of N rows among K classes; of maps `(N, K, H, W)` and `(N, H, W)` stand for `(N, K)` and `(N,)`.

    Attributes:
        log_probabilities: `(N, K)`, calibrated.
        logits: `(N, K)`, the model's own.
        calibration: what turned them into probabilities.
        novelty: `(N,)`, also of maps: how far a row lies outside the reference rows. Below 1 for 95 % of these; None
            where the calibration cannot tell.
        mutual_information: `(N,)` in nats, how much thinned networks disagree (BALD); None where no dropout was run,
            see `ClassPredictor.predict`.
        index: of the pandas data frame that was predicted; None for other inputs.
    """

    log_probabilities: Tensor
    logits: Tensor
    calibration: ClassCalibration
    novelty: Tensor | None = None
    mutual_information: Tensor | None = None
    index: Any = None

    @property
    def probabilities(self) -> Tensor:
        """`(N, K)`."""
        return self.log_probabilities.exp()

    @property
    def label(self) -> Tensor:
        """`(N,)`, the likeliest class."""
        return self.log_probabilities.argmax(1)

    @property
    def names(self) -> list[str]:
        """The likeliest class of each row by its name."""
        known = self.calibration.known_names
        return [known[k] for k in self.label.tolist()]

    @property
    def confidence(self) -> Tensor:
        """`(N,)`, the probability of the likeliest class."""
        return self.probabilities.amax(1)

    @property
    def entropy(self) -> Tensor:
        """`(N,)` in nats."""
        return entropy(self.log_probabilities.movedim(1, -1))

    @property
    def energy(self) -> Tensor:
        """`(N,)`, minus the log of the sum of exponentials of the logits (Liu et al. 2020): large for strange rows."""
        return -self.logits.logsumexp(1)

    @property
    def image_scores(self) -> dict[str, Tensor]:
        """Scores of each image of maps, `(N,)`: `expected_error`, the share of pixels that should be wrong, and others.

        Those are the means of `entropy` and, where it is known, `mutual_information`; and `novelty`.
        """
        maps = {"expected_error": 1 - self.confidence, "entropy": self.entropy}
        maps |= {} if self.mutual_information is None else {"mutual_information": self.mutual_information}
        scores = {name: values.reshape(len(self), -1).mean(1) for name, values in maps.items()}
        return scores if self.novelty is None else {**scores, "novelty": self.novelty}

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """`(N, K)`, True for the classes of a set that holds the label with that probability."""
        if self.calibration.sets is None:
            raise ArgumentError(
                "expected a predictor with prediction sets, from rows used for nothing else; found one without. "
                "Call uq = uq.conformal((x, labels)) first."
            )
        return self.calibration.sets.members(self.probabilities, level)

    def kept(self, rule: Rejection | None = None) -> Tensor:
        """`(N,)`, True for rows that a rule keeps, by default the calibration's own; see `ClassPredictor.reject`.

        None keeps a row of which nothing is known, whose novelty is the largest number.
        """
        rule = self.calibration.rule if rule is None else rule
        if not isinstance(rule, Rejection):
            raise ArgumentError(
                f"expected a rule, from rows used for nothing else; found {rule!r}. Call uq = uq.reject((x, labels), "
                "risk=0.01) first, or pass what uq.rejection gives."
            )
        sure = self.confidence >= rule.threshold
        return sure if self.novelty is None else sure & (self.novelty < LARGEST)

    def to_dict(self, level: float | None = None) -> dict[str, Tensor]:
        """Named results: `label`, `confidence`, `entropy`, what else is known of each row, and `probabilities`.

        With a level, where the calibration makes prediction sets, also `set`; where it has a rule, `kept`.
        """
        named = {"label": self.label, "confidence": self.confidence, "entropy": self.entropy}
        extra = {"novelty": self.novelty, "mutual_information": self.mutual_information}
        named |= {name: value for name, value in extra.items() if value is not None}
        if level is not None and self.calibration.sets is not None:
            named["set"] = self.prediction_set(level)
        if self.calibration.rule is not None:
            named["kept"] = self.kept()
        return {**named, "probabilities": self.probabilities}

    def to_pandas(self) -> pandas.DataFrame:
        """One row per example: its class by name, the columns of `to_dict`, and the probability of every class.

        Of maps one row per image, with its scores.
        """
        if self.calibration.maps:
            return frame_of("pandas", {name: value.cpu().numpy() for name, value in self.image_scores.items()})
        named = self.to_dict()
        probabilities = named.pop("probabilities")
        frame = frame_of("pandas", {name: value.cpu().numpy() for name, value in named.items()}, index=self.index)
        if self.calibration.names:
            frame["label"] = self.names
        for k, name in enumerate(self.calibration.known_names):
            frame[f"p_{name}"] = probabilities[:, k].cpu().numpy()
        return frame

    def unknown(self, rows: Tensor, own: Tensor) -> ClassPrediction:
        """Make all classes as likely at some `rows`, `(N,)` of bool; `own` is the model's output, of all rows."""
        rows, own = rows.to(self.logits.device), own[:, None] if own.dim() == 1 else own
        wide = rows.reshape(-1, *[1] * (own.dim() - 1))
        logs = self.log_probabilities.masked_fill(wide, -math.log(self.log_probabilities.shape[1]))
        logits = torch.where(wide, own.where(own.isfinite(), -LARGEST).to(self.logits), self.logits)
        novelty = None if self.novelty is None else self.novelty.masked_fill(rows, LARGEST)
        doubt = self.mutual_information
        doubt = None if doubt is None else doubt.masked_fill(wide[:, 0] if doubt.dim() > 1 else rows, 0)
        return replace(self, log_probabilities=logs, logits=logits, novelty=novelty, mutual_information=doubt)

    def __repr__(self) -> str:
        sure, shape = self.confidence, tuple(self.log_probabilities.shape)
        return (
            f"ClassPrediction of {len(self)} rows, probabilities {shape}, confidence {float(sure.min()):.3f} to "
            f"{float(sure.max()):.3f} ({self.calibration.choice})"
        )

    def __len__(self) -> int:
        return len(self.log_probabilities)
