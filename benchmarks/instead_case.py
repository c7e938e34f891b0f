"""What every method of `benchmarks.instead` may see, what it gives, and how that is judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from latedrop import metrics
from latedrop.metrics.tails import Tail

__all__ = ["LEVELS", "Bounds", "Case", "Judged", "Predicted", "Rule", "measures", "output"]

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
COMPONENTS = 32
LEAST = 1e-4
"""A variance is at least this part of the mean squared validation error."""


class Judged(Protocol):
    """Predictions of n rows."""

    mean: Tensor

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return both ends, `(n,)` each."""

    def nll(self, y: Tensor) -> float:
        """Return the mean, NaN where there is no density."""

    def crps(self, y: Tensor) -> float:
        """Return the mean, NaN where there is no distribution."""


Rule = Callable[[Tensor], Judged]


@dataclass(frozen=True)
class Predicted:
    """Means `(n,)`, variances, and the tail of the standardised errors."""

    mean: Tensor
    variance: Tensor
    tail: Tail = field(default_factory=Tail)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """See `Judged`."""
        reach = self.tail.quantile((1 + level) / 2) * self.variance.sqrt()
        return self.mean - reach, self.mean + reach

    def nll(self, y: Tensor) -> float:
        """See `Judged`."""
        return float(self.tail.nll(y - self.mean, self.variance).mean())

    def crps(self, y: Tensor) -> float:
        """See `Judged`."""
        return float(self.tail.crps(y - self.mean, self.variance).mean())


@dataclass(frozen=True)
class Bounds:
    """Means `(n,)`, the ends of their intervals `(levels, n)`, and perhaps a distribution as points `(n, points)`."""

    mean: Tensor
    low: Tensor
    high: Tensor
    points: Tensor | None = None

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """See `Judged`."""
        place = LEVELS.index(level)
        return self.low[place], self.high[place]

    def nll(self, y: Tensor) -> float:
        """See `Judged`."""
        return math.nan

    def crps(self, y: Tensor) -> float:
        """See `Judged`."""
        if self.points is None:
            return math.nan
        ordered = self.points.double().sort(1).values
        count = ordered.shape[1]
        ranks = 2 * torch.arange(1, count + 1, dtype=torch.float64) - count - 1
        apart = ordered @ ranks / count**2  # half the mean distance of two points
        return float(((ordered - y[:, None]).abs().mean(1) - apart).mean())


@dataclass(frozen=True)
class Case:
    """Five networks, the rows that they were trained on, and validation rows with float64 targets `(n,)`.

    `kept` holds what methods made of networks and training rows, which cases of one situation share.
    """

    nets: list[nn.Module]
    x_train: Tensor
    y_train: Tensor
    x_val: Tensor
    y_val: Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def net(self) -> nn.Module:
        """The one network."""
        return self.nets[0]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Validation data as `calibrate` takes it."""
        return self.x_val, self.y_val[:, None].float()

    @property
    def error(self) -> Tensor:
        """Of the one network on the validation rows, `(n,)`."""
        return self.y_val - output(self.net, self.x_val)

    def table(self, x: Tensor) -> np.ndarray:
        """Return rows as libraries for tables take them: as they are, or components of the last layer's inputs."""
        if x.dim() == 2 and x.is_floating_point():
            return x.double().numpy()
        if "components" not in self.kept:
            features = last_features(self.net, self.x_train)
            center = features.mean(0)
            basis = torch.linalg.svd(features - center, full_matrices=False)[2][:COMPONENTS].T
            self.kept["components"] = center, basis
        center, basis = self.kept["components"]
        return ((last_features(self.net, x) - center) @ basis).numpy()


def output(net: nn.Module, x: Tensor) -> Tensor:
    """Return predictions `(n,)`, float64."""
    with torch.no_grad():
        found: Tensor = net(x)[:, 0].double()
    return found


def last_features(net: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of the last linear layer, `(n, units)`, float64."""
    seen: list[Tensor] = []
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    handle = last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        net(x)
    handle.remove()
    return seen[0].double()


def measures(found: Judged, y: Tensor, inside: Judged | None = None) -> dict[str, Any]:
    """Return scores on test rows with targets `(n,)`; with rows from `inside`, how well widths tell these apart."""
    y = y.double()
    ends = [found.interval(level) for level in LEVELS]
    low, high = ends[LEVELS.index(0.9)]
    wide = width_of(found)
    scores = {
        "nll": found.nll(y),
        "crps": found.crps(y),
        "score": float((high - low + 20 * (torch.relu(low - y) + torch.relu(y - high))).mean()),
        "coverage": [round(float(((y >= a) & (y <= b)).double().mean()), 4) for a, b in ends],
        "width": float((high - low).mean()),
        "ranking": float(metrics.rank_correlation(found.mean, wide.square(), y)),
        "rmse": float((y - found.mean).square().mean().sqrt()),
    }
    if inside is not None:
        both = torch.cat([wide, width_of(inside)])
        scores["auroc"] = float(metrics.auroc(both, torch.arange(len(both)) < len(wide)))
    return scores


def width_of(found: Judged) -> Tensor:
    """Return widths of 80 % intervals, `(n,)`, rounded, so that equal widths are equal."""
    low, high = found.interval(0.8)
    wide = (high - low).nan_to_num(posinf=1e30).clamp_max(1e30)
    digits = 10 ** (6 - wide.clamp_min(1e-30).log10().floor())
    return (wide * digits).round() / digits
