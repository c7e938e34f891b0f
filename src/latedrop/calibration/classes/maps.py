"""Maps of classes as predictions: probabilities, entropy and disagreement of every pixel, and scores of every image.

All pixels of an image share one temperature, which follows the leverage of the image. Of thinned networks the mean of
the softmax `p` and of its entropy `H` are kept, not the draws: `H(mean p) - mean H(p)` is the mutual information. It is
taken at one temperature for all images: at that of a strange one all draws would agree that nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latedrop.calibration.classes.pixels import as_logit_maps
from latedrop.calibration.classes.prediction import ClassPrediction
from latedrop.calibration.classes.record import ClassCalibration
from latedrop.calibration.classes.softmax import entropy
from latedrop.data.rows import take_rows
from latedrop.dropout.moments import Sampling
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, LatedropError
from latedrop.network.calling import Readout, part_of
from latedrop.network.network import Network

if TYPE_CHECKING:
    import pandas

__all__ = ["DRAWS", "MapPrediction", "predicted_maps", "scaled_softmax"]

DRAWS = 30
"""Thinned networks for `mutual_information`, where the calibration has none of its own."""


@dataclass(frozen=True)
class MapPrediction(ClassPrediction):
    """Predictions of N images: `(N, K, H, W)` where rows have `(N, K)`, `(N, H, W)` where rows have `(N,)`.

    `strangeness` is one number for each image, `(N,)`.
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

        The means are those of `entropy` and, where it is known, `mutual_information`; `strangeness` is there, too.
        """
        found = {"expected_error": 1 - self.confidence.flatten(1).mean(1), "entropy": self.entropy.flatten(1).mean(1)}
        if self.mutual_information is not None:
            found["mutual_information"] = self.mutual_information.flatten(1).mean(1)
        return found if self.strangeness is None else {**found, "strangeness": self.strangeness}

    def to_pandas(self) -> pandas.DataFrame:
        """One row per image: its scores."""
        try:
            import pandas
        except ImportError as error:
            raise LatedropError("expected pandas; it is not installed. Run: pip install pandas") from error
        return pandas.DataFrame({name: value.cpu().numpy() for name, value in self.image_scores.items()})


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
    how: Sampling,
) -> MapPrediction:
    """The prediction of a batch.

    Args:
        network: of the user's model.
        x: its inputs.
        logits: what it gives, `(N, K, ...)`.
        strange: `(N,)`, leverage over its limit.
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


def _drawn(network: Network, x: Any, c: ClassCalibration, rate: float, how: Sampling) -> tuple[Tensor, Tensor]:
    (moments,) = sample_rates(network, x, [rate], c.sites, how)
    mean, alone, own = moments.mean.split([c.classes, c.classes, 1], 1)
    least = torch.finfo(mean.dtype).tiny
    both = entropy(alone.clamp_min(least).log().movedim(1, -1))
    return mean.clamp_min(least).log(), (both - own[:, 0]).clamp_min(0)
