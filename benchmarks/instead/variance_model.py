"""All that one network's validation rows tell about its errors, as one model of mean, variance and tail.

    variance = grown( floor + a · leverage + b · leverage of features + c · dropout + d · forest ),
     error / sqrt(variance) ~ Student t

`shape_fit` says how the coefficients are fitted and how the variance grows for rows that are unlike the usual ones,
`mask_gradients` what leverage is, `error_model` and `corrected_mean` what is learned by trees, `tails` what the t is.
Everything here is a function of arrays: which network made them does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.instead import error_model
from benchmarks.instead.corrected_mean import Correction, fit_correction
from benchmarks.instead.error_model import ErrorModel, error_inputs
from benchmarks.instead.mask_gradients import Leverage
from benchmarks.instead.shape_fit import (
    Guard,
    Shape,
    crossed_shape,
    fit_shape,
    typical_shares,
)
from benchmarks.instead.tails import Tail, fit_tail

__all__ = ["Crossed", "Predicted", "VarianceModel"]

MOST_ROWS = 20_000
"""Validation rows that are learned from; more add nothing but time."""
GUARDED = [0, 1]
"""Columns that the guard looks at: both kinds of leverage."""
_TERMS = ("leverage", "features", "dropout")


class Predicted(NamedTuple):
    """Predictions of n rows with K outputs.

    Attributes:
        mean: `(n, K)`, corrected where a correction is in use.
        variance: `(n, K)`; the error divided by its root follows the model's `tail`.
        novelty: `(n,)`; above 1 beyond the usual rows.
    """

    mean: Tensor
    variance: Tensor
    novelty: Tensor


class Crossed(NamedTuple):
    """What is said of the validation rows by fits that did not see them, to judge by.

    Attributes:
        rows: `(m,)`, the places of the validation rows in use: all n, or a sample of very many.
        error: `(m, K)`, target minus mean, corrected out of fold.
        variance: `(m, K)`; the error divided by its root follows the model's `tail`.
        novelty: `(m,)`.
    """

    rows: Tensor
    error: Tensor
    variance: Tensor
    novelty: Tensor


@dataclass(frozen=True)
class VarianceModel:
    """The fitted model.

    Attributes:
        metric: of the mask gradients of the reference rows.
        feature_metric: of their features.
        guard: growth for rows that are unlike usual ones.
        shape: coefficients of both kinds of leverage, dropout and, where there is one, the forest.
        simple: coefficients without the forest, for errors that are not corrected.
        tail: of the standardised errors.
        forest: the error model; None with few rows.
        correction: of the mean; None where it was not asked for.
    """

    metric: Leverage
    feature_metric: Leverage
    guard: Guard
    shape: Shape
    simple: Shape
    tail: Tail
    forest: ErrorModel | None
    correction: Correction | None

    @classmethod
    def fit(
        cls,
        x: Any,
        mean: Tensor,
        phi: Tensor,
        features: Tensor,
        target: Tensor,
        metric: Leverage,
        feature_metric: Leverage,
        weights: Tensor | None = None,
        *,
        reference: bool,
        corrected: bool = False,
        seed: int = 0,
    ) -> tuple[VarianceModel, Crossed]:
        """Fit everything to n validation rows with K outputs.

        Args:
            x: `(n, D)`, inputs of the trees: the rows themselves, or principal components of features.
            mean: `(n, K)`, predictions.
            phi: `(n, K, U)`, mask gradients.
            features: `(n, F)`, what enters the sites.
            target: `(n, K)`.
            metric: fitted to the mask gradients of reference rows.
            feature_metric: fitted to their features, `(n, 1, F)`.
            weights: `(n,)`, what each row counts.
            reference: True where the metrics are those of other rows, False where they are those of these.
            corrected: also correct the mean.
            seed: of forests and folds.
        """
        rows = torch.arange(len(target))
        if len(rows) > MOST_ROWS:
            rows = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(rows))[:MOST_ROWS]))
            x, mean, phi, features, target = (part[rows] for part in (x, mean, phi, features, target))
            weights = None if weights is None else weights[rows]
        mean, target = mean.double().cpu(), target.double().cpu()
        plain_error = error = target - mean
        columns = _columns(phi, features, metric, feature_metric, own=not reference)
        sizes, usual = columns.mean(0), columns[:, :, :2]
        if reference:
            usual = torch.stack([metric.sample, feature_metric.sample.expand_as(metric.sample)], 2).cpu()
            sizes = torch.cat([usual.mean(0), metric.dropout.cpu()[:, None]], 1)
        guard = Guard.fit(usual[:, :, GUARDED], error, target, weights)
        novelty = guard.novelty(columns[:, :, GUARDED])
        inputs = _inputs(x, mean, columns)
        counts = None if weights is None else weights.numpy()
        shares = typical_shares(_TERMS)
        simple = fit_shape(plain_error, columns, sizes, shares, weights)
        without = crossed_shape(plain_error, columns, sizes, shares, weights)
        correction, forest = None, None
        if corrected:
            directions = metric.directions(phi).cpu().numpy()
            correction, added = fit_correction(inputs, directions, error.numpy(), without.numpy(), counts, seed=seed)
            error = plain_error - torch.from_numpy(added)
        if len(error) >= error_model.LEAST_ROWS:
            forest, bag = ErrorModel.fit(inputs, error.numpy(), counts, seed=seed)
            column = torch.from_numpy(bag)
            columns = torch.cat([columns, column[:, :, None]], 2)
            sizes = torch.cat([sizes, column.mean(0)[:, None]], 1)
            shares = typical_shares((*_TERMS, "forest"))
        shape, variance = simple, without
        if forest is not None or correction is not None:
            shape = fit_shape(error, columns, sizes, shares, weights)
            variance = crossed_shape(error, columns, sizes, shares, weights)
        variance = guard.grown(variance, novelty, mean, without)
        entries = None if weights is None else weights[:, None].expand_as(error)
        tail = fit_tail(error / variance.sqrt(), entries, float(len(error)))
        model = cls(metric, feature_metric, guard, shape, simple, tail, forest, correction)
        return model, Crossed(rows, error, variance, novelty)

    def predict(self, x: Any, mean: Tensor, phi: Tensor, features: Tensor) -> Predicted:
        """Return mean, variance and novelty of new rows, on the CPU; the arguments are those of `fit`."""
        mean = mean.double().cpu()
        columns = _columns(phi, features, self.metric, self.feature_metric, own=False)
        novelty = self.guard.novelty(columns[:, :, GUARDED])
        without = self.simple.variance(columns)
        inputs: Any = None
        if self.forest is not None or self.correction is not None:
            inputs = _inputs(x, mean, columns)
        if self.forest is not None:
            column = torch.from_numpy(self.forest.predict(inputs))
            columns = torch.cat([columns, column[:, :, None]], 2)
        variance = self.guard.grown(self.shape.variance(columns), novelty, mean, without)
        if self.correction is not None and self.correction.used:
            directions = self.metric.directions(phi).cpu().numpy()
            mean = mean + torch.from_numpy(self.correction.predict(inputs, directions, novelty.numpy()))
        return Predicted(mean, variance, novelty)

    def state(self) -> dict[str, Any]:
        """Return what a record has to hold: arrays, numbers, and dictionaries of these."""
        return {
            "metric": self.metric.state(),
            "feature_metric": self.feature_metric.state(),
            "guard": _arrays(self.guard),
            "shape": _arrays(self.shape),
            "simple": _arrays(self.simple),
            "tail": vars(self.tail),
            "forest": None if self.forest is None else self.forest.state(),
            "correction": None if self.correction is None else self.correction.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> VarianceModel:
        """Return the inverse of `state`."""
        return cls(
            Leverage.from_state(state["metric"]),
            Leverage.from_state(state["feature_metric"]),
            Guard(**_tensors(state["guard"])),
            Shape(**_tensors(state["shape"])),
            Shape(**_tensors(state["simple"])),
            Tail(**state["tail"]),
            None if state["forest"] is None else ErrorModel.from_state(state["forest"]),
            None if state["correction"] is None else Correction.from_state(state["correction"]),
        )


def _columns(phi: Tensor, features: Tensor, metric: Leverage, feature_metric: Leverage, *, own: bool) -> Tensor:
    """Return both kinds of leverage and the dropout variance, `(n, K, 3)`, on the CPU."""
    leverage = metric.values(phi, reference=own)
    of_features = feature_metric.values(features[:, None], reference=own).expand_as(leverage)
    return torch.stack([leverage, of_features, phi.double().square().sum(2)], 2).cpu()


def _inputs(x: Any, mean: Tensor, columns: Tensor) -> Any:
    rows = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    return error_inputs(rows, mean.numpy(), *(columns[:, :, j].numpy() for j in range(len(_TERMS))))


def _arrays(value: Guard | Shape) -> dict[str, Any]:
    return {name: part.cpu().numpy() for name, part in vars(value).items()}


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(part, dtype=torch.float64) for name, part in state.items()}
