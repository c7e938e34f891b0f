"""What a calibrated classifier gives: probabilities, and how far to trust them.

Maps of classes as predictions: probabilities, entropy and disagreement of every pixel, and scores of every image.

All pixels of an image share one temperature, which follows the leverage of the image. Of thinned networks the mean of
the softmax `p` and of its entropy `H` are kept, not the draws: `H(mean p) - mean H(p)` is the mutual information. It is
taken at one temperature for all images: at that of a strange one all draws would agree that nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.class_sets import Rejection
from latedrop.calibration.guard import LARGEST
from latedrop.calibration.labels import as_logit_maps
from latedrop.calibration.softmax import entropy
from latedrop.data.rows import take_rows
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError
from latedrop.network.calling import Readout, part_of
from latedrop.network.network import Network
from latedrop.prediction.prediction import Predicted, frame_of

if TYPE_CHECKING:
    import pandas

__all__ = ["DRAWS", "ClassPrediction", "MapPrediction", "predicted_maps", "scaled_softmax"]

DRAWS = 30
"""Thinned networks for `mutual_information`, where the calibration has none of its own."""


@dataclass(frozen=True)
class ClassPrediction(Predicted):
    """Predictions of N rows among K classes.

    Attributes:
        log_probabilities: `(N, K)`, calibrated.
        logits: `(N, K)`, the model's own.
        calibration: what turned them into probabilities.
        novelty: `(N,)`, how far a row lies outside the reference rows: below 1 for 95 % of these; None where the
            calibration cannot tell.
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

        None keeps a row of which nothing is known, whose novelty is the largest number.
        """
        rule = self.calibration.rule if rule is None else rule
        if rule is None:
            raise ArgumentError(
                "expected a rule, from rows used for nothing else; found none. Call uq = uq.reject((x, labels), "
                "risk=0.01) first, or pass what uq.rejection gives."
            )
        if not isinstance(rule, Rejection):
            raise ArgumentError(
                f"expected what uq.rejection gives; found {rule!r}. Compare p.confidence with a number."
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
        """One row per example: its class by name, the columns of `to_dict`, and the probability of every class."""
        named = self.to_dict()
        probabilities = named.pop("probabilities")
        frame = frame_of("pandas", {name: value.cpu().numpy() for name, value in named.items()}, index=self.index)
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
        strange = None if self.novelty is None else self.novelty.masked_fill(rows, LARGEST)
        doubt = self.mutual_information
        doubt = None if doubt is None else doubt.masked_fill(wide[:, 0] if doubt.dim() > 1 else rows, 0)
        return replace(self, log_probabilities=logs, logits=logits, novelty=strange, mutual_information=doubt)

    def __repr__(self) -> str:
        sure, shape = self.confidence, tuple(self.log_probabilities.shape)
        return (
            f"{type(self).__name__} of {len(self)} rows, probabilities {shape}, confidence {float(sure.min()):.3f} to "
            f"{float(sure.max()):.3f} ({self.calibration.choice})"
        )

    def __len__(self) -> int:
        return len(self.log_probabilities)


@dataclass(frozen=True, repr=False)
class MapPrediction(ClassPrediction):
    """Predictions of N images: `(N, K, H, W)` where rows have `(N, K)`, `(N, H, W)` where rows have `(N,)`.

    `novelty` is one number for each image, `(N,)`.
    """

    @property
    def entropy(self) -> Tensor:
        """`(N, H, W)` in nats."""
        return entropy(self.log_probabilities.movedim(1, -1))

    @property
    def names(self) -> list[str]:
        """Of pixels there are too many names: `label` has their numbers."""
        raise ArgumentError("expected rows for names of classes; found maps. Take label, and calibration.names.")

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Not of maps: pixels of an image are alike, which such sets do not allow for."""
        raise ArgumentError("expected rows for prediction sets; found maps, whose pixels depend on each other.")

    @property
    def image_scores(self) -> dict[str, Tensor]:
        """By name, `(N,)` each: `expected_error`, the share of pixels that should be wrong; means of the maps.

        The means are those of `entropy` and, where it is known, `mutual_information`; `novelty` is there, too.
        """
        found = {"expected_error": 1 - self.confidence.flatten(1).mean(1), "entropy": self.entropy.flatten(1).mean(1)}
        if self.mutual_information is not None:
            found["mutual_information"] = self.mutual_information.flatten(1).mean(1)
        return found if self.novelty is None else {**found, "novelty": self.novelty}

    def to_pandas(self) -> pandas.DataFrame:
        """One row per image: its scores."""
        return frame_of("pandas", {name: value.cpu().numpy() for name, value in self.image_scores.items()})


def scaled_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log probabilities `(N, K, ...)` of logits of the same shape; `temperature` is `(N,)`."""
    return torch.log_softmax(logits / temperature.to(logits).reshape(-1, *[1] * (logits.dim() - 1)), 1)


def predicted_maps(
    network: Network,
    x: Any,
    logits: Tensor,
    strange: Tensor | None,
    c: ClassCalibration,
    rate: float | None,
    how: DrawOptions,
) -> MapPrediction:
    """The prediction of a batch.

    Args:
        network: of the user's model.
        x: its inputs.
        logits: what it gives, `(N, K, ...)`.
        strange: `(N,)`, how novel each image is.
        c: the calibration.
        rate: of draws for `mutual_information`, where the calibration has none.
        how: draws are run.
    """
    temperature = c.fit.temperatures(logits.new_zeros(len(logits), c.classes, dtype=torch.float64), strange)
    logs = scaled_softmax(logits, temperature)
    used = rate if c.rate is None else c.rate
    if used is None:
        return MapPrediction(logs, logits, c, strange)
    found = []
    for i, t in enumerate(temperature):
        options = replace(how, readout=_softmax_and_entropy(how.readout, float(t), c.alone))
        found.append(_drawn(network, take_rows(x, slice(i, i + 1)), c, used, options))
    means, doubts = zip(*found, strict=True)
    return MapPrediction(torch.cat(means) if c.rate is not None else logs, logits, c, strange, torch.cat(doubts))


def _softmax_and_entropy(readout: Readout, temperature: float, alone: float) -> Callable[[Any], Tensor]:
    """Of all draws of one image: its probabilities, those at one temperature for all images, and their entropy."""

    def read(output: Any) -> Tensor:
        logits = as_logit_maps(part_of(output, readout)).float()
        logs = torch.log_softmax(logits / alone, 1)
        parts = torch.softmax(logits / temperature, 1), logs.exp(), entropy(logs.movedim(1, -1))[:, None]
        return torch.cat(parts, 1)

    return read


def _drawn(network: Network, x: Any, c: ClassCalibration, rate: float, how: DrawOptions) -> tuple[Tensor, Tensor]:
    (moments,) = sample_rates(network, x, [rate], c.sites, how)
    mean, alone, own = moments.mean.split([c.classes, c.classes, 1], 1)
    least = torch.finfo(mean.dtype).tiny
    both = entropy(alone.clamp_min(least).log().movedim(1, -1))
    return mean.clamp_min(least).log(), (both - own[:, 0]).clamp_min(0)
