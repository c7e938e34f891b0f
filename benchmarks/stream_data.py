"""Series for the benchmark of streams: the crowd study's test frames, and synthetic drifts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from latedrop.metrics.levels import normal_quantile
from latedrop.streams.bag import Usual, from_curve

CROWD = Path(__file__).parents[1] / "studies" / "results" / "crowd"
SETS = ("mall", "ucsd", "pets")
DRIFTS = ("steady", "step", "growth", "bias", "walk")


@dataclass(frozen=True)
class Series:
    """Predictions and truths in the order of time; `usual` is how validation rows were spread."""

    mean: np.ndarray
    std: np.ndarray
    truth: np.ndarray
    usual: Usual


@dataclass(frozen=True)
class Given:
    """Some rows of a series, as a prediction."""

    mean: Tensor
    std: Tensor

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Gaussian."""
        half = normal_quantile((1 + level) / 2) * self.std
        return self.mean - half, self.mean + half

    @classmethod
    def of(cls, series: Series, at: slice | list[int]) -> Given:
        """Rows by their places."""
        return cls(torch.as_tensor(series.mean[at]), torch.as_tensor(series.std[at]))


def crowd(name: str, folder: Path = CROWD) -> Series:
    """Counts of the test frames with the scaled variance that the study chose on validation frames."""
    record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    found = {key: np.array(value, float) for key, value in record["series"].items() if key != "level"}
    std = (found["high"] - found["low"]) / 2 / normal_quantile((1 + record["series"]["level"]) / 2)
    curve = record["curves"]["count"]["validation"]["scaled"]
    usual = Usual(errors=from_curve(record["levels"], curve, record["frames"]["validation"]))
    return Series(found["mean"], std, found["truth"], usual)


def drift(kind: str, seed: int, count: int = 500) -> Series:
    """Predictions of 0 with a standard deviation of 1, and truths that drift away from them."""
    rng = np.random.default_rng([seed, DRIFTS.index(kind)])
    noise, time = rng.standard_normal(count), np.arange(count)
    truth = {
        "steady": noise,
        "step": noise * np.where(time < count // 2, 1, 3),
        "growth": noise * np.exp(np.linspace(0, 2, count)),
        "bias": noise + np.where(time < count // 3, 0, 3),
        "walk": noise + np.cumsum(0.1 * rng.standard_normal(count)),
    }[kind]
    return Series(np.zeros(count), np.ones(count), truth, Usual())
