"""What a calibrated classifier gives: probabilities, and how far to trust them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latedrop.calibration.beyond import LARGEST
from latedrop.calibration.classes.record import ClassCalibration
from latedrop.calibration.classes.sets import Rejection
from latedrop.calibration.classes.softmax import entropy
from latedrop.errors import ArgumentError, DataError, LatedropError

if TYPE_CHECKING:
    import pandas

__all__ = ["ClassPrediction"]

_TENSORS = ("log_probabilities", "logits", "strangeness", "mutual_information")


@dataclass(frozen=True)
class ClassPrediction:
    """Predictions of N rows among K classes.

    Attributes:
        log_probabilities: `(N, K)`, calibrated.
        logits: `(N, K)`, the model's own.
        calibration: what turned them into probabilities.
        strangeness: `(N,)`, how far a row lies outside the validation rows: below 1 for 90 % of these; None where the
            calibration cannot tell.
        mutual_information: `(N,)` in nats, how much thinned networks disagree (BALD); None where no dropout was run,
            see `ClassPredictor.predict`.
    """

    log_probabilities: Tensor
    logits: Tensor
    calibration: ClassCalibration
    strangeness: Tensor | None = None
    mutual_information: Tensor | None = None

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
        """The likeliest class by its name."""
        known = self.calibration.known_names
        return [known[k] for k in self.label.tolist()]

    @property
    def confidence(self) -> Tensor:
        """`(N,)`, the probability of the likeliest class."""
        return self.probabilities.amax(1)

    @property
    def entropy(self) -> Tensor:
        """`(N,)` in nats."""
        return entropy(self.log_probabilities)

    @property
    def energy(self) -> Tensor:
        """`(N,)`, minus the log of the sum of exponentials of the logits (Liu et al. 2020): large for strange rows."""
        return -self.logits.logsumexp(1)

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

        None keeps a row of which nothing is known, whose strangeness is the largest number.
        """
        rule = self.calibration.rule if rule is None else rule
        if rule is None:
            raise ArgumentError(
                "expected a rule, from rows used for nothing else; found none. Call uq = uq.reject((x, labels), "
                "risk=0.01) first, or pass what uq.rejection gives."
            )
        sure = self.confidence >= rule.threshold
        return sure if self.strangeness is None else sure & (self.strangeness < LARGEST)

    def to_dict(self, level: float | None = None) -> dict[str, Tensor]:
        """Named results: `label`, `confidence`, `entropy`, what else is known of each row, and `probabilities`.

        With a level, where the calibration makes prediction sets, also `set`; where it has a rule, `kept`.
        """
        named = {"label": self.label, "confidence": self.confidence, "entropy": self.entropy}
        extra = {"strangeness": self.strangeness, "mutual_information": self.mutual_information}
        named |= {name: value for name, value in extra.items() if value is not None}
        if level is not None and self.calibration.sets is not None:
            named["set"] = self.prediction_set(level)
        if self.calibration.rule is not None:
            named["kept"] = self.kept()
        return {**named, "probabilities": self.probabilities}

    def to_pandas(self) -> pandas.DataFrame:
        """One row per example: its class by name, the columns of `to_dict`, and the probability of every class."""
        try:
            import pandas
        except ImportError as error:
            raise LatedropError("expected pandas; it is not installed. Run: pip install pandas") from error
        named = self.to_dict()
        probabilities = named.pop("probabilities")
        frame = pandas.DataFrame({name: value.cpu().numpy() for name, value in named.items()})
        if self.calibration.names:
            frame["label"] = self.names
        for k, name in enumerate(self.calibration.known_names):
            frame[f"p_{name}"] = probabilities[:, k].cpu().numpy()
        return frame

    def unknown(self, rows: Tensor, own: Tensor) -> ClassPrediction:
        """The same where nothing is known of some `rows`, `(N,)` of bool: all classes are as likely there."""
        rows, wide = rows.to(self.logits.device), rows.to(self.logits.device).reshape(-1, *[1] * (own.dim() - 1))
        logs = self.log_probabilities.masked_fill(wide, -math.log(self.log_probabilities.shape[1]))
        logits = torch.where(wide, own.where(own.isfinite(), -LARGEST).to(self.logits), self.logits)
        strange = None if self.strangeness is None else self.strangeness.masked_fill(rows, LARGEST)
        doubt = self.mutual_information
        doubt = None if doubt is None else doubt.masked_fill(wide[:, 0] if doubt.dim() > 1 else rows, 0)
        return replace(self, log_probabilities=logs, logits=logits, strangeness=strange, mutual_information=doubt)

    def cpu(self) -> ClassPrediction:
        """The same with its tensors on the CPU."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return replace(self, **{name: value.cpu() for name, value in tensors.items() if value is not None})

    def __len__(self) -> int:
        return len(self.log_probabilities)

    @classmethod
    def joined(cls, parts: Sequence[ClassPrediction]) -> ClassPrediction:
        """Of batches, in their order."""
        if not parts:
            raise DataError("expected at least one row to predict; found none.")
        first = parts[0]
        if len(parts) == 1:
            return first

        def together(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else torch.cat(values)

        return type(first)(**{name: together(name) for name in _TENSORS}, calibration=first.calibration)  # type: ignore[arg-type]
