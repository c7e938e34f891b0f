"""Rows of another population, without labels: labelled rows count as much as the new ones are like them.

With covariate shift the inputs x are distributed otherwise, and targets given x are not. A labelled row then stands for
`w(x) = target(x) / labelled(x)` rows of the target. Logistic regression on the features of the network, and on the
inputs where these are a table, tells target rows (T of them) from labelled ones (n): `w = n / T · p / (1 - p)`. Five
folds make it: a labelled row is weighed by a classifier that has not seen it, a new row by the mean of the logarithms.
Weights are cut at `sqrt(n)` times their mean (Ionides 2008). With the calibrated standard deviation s:

- the variance of each output is multiplied by the weighted mean of `((target - mean) / s)^2`, with ten rows of 1;
- the interval of a row x is `mean ± q(x) s`, where q(x) is the smallest score `|target - mean| / s` for which the
  labelled rows below have the share `level` of all weight, with that of x itself at infinity (Tibshirani, Barber,
  Candes and Ramdas 2019).

`(sum w)^2 / sum w^2` rows of one weight would tell as much (Kish 1965). Where these are few, or many target rows are so
unlike the labelled ones that their own weight decides, there is no answer to be had from labels elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from warnings import warn

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import CrossValidation, effective_rows
from latedrop.calibration.fit_classes import logistic
from latedrop.calibration.record import Calibration
from latedrop.calibration.scale import TradeoffPoint, residuals
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.prediction.prediction import Prediction
from latedrop.quantiles import checked_level

__all__ = ["AdaptedPrediction", "Density", "Shift", "check_adaptable", "fit_shift"]

LEAST_ROWS = 30
"""Effective rows."""
_LEVEL, _MOST_BEYOND = 0.9, 0.1
_FOLDS = 5
_COMPONENTS = 32
_RIDGES = (0.3, 3.0, 30.0, 300.0)
_FREE = 1e-6  # ridge of the constant
_PRIOR = 10.0  # rows whose standardised errors have a mean square of 1


@dataclass(frozen=True)
class Density:
    """Logistic regressions of standardised features, one for each fold."""

    centre: Tensor  # `(F,)`, the mean of the features
    basis: Tensor  # `(F, P)`, to components of unit variance
    weights: Tensor  # `(folds, P + 1)`, the constant last
    ratio: float  # `n / T`, the factor that makes odds a ratio of densities

    @classmethod
    def fit(cls, labelled: Tensor, target: Tensor) -> tuple[Density, Tensor, Tensor]:
        """Fit to features `(n, F)` and `(T, F)`; return weights of both by classifiers that did not see the row."""
        both = torch.cat([labelled, target]).double()
        centre, std = both.mean(0), both.std(0)
        unit = torch.where(std > 1e-9 * std.max(), 1 / std, 0.0)
        _, size, directions = torch.linalg.svd((both - centre) * unit, full_matrices=False)
        size = size / math.sqrt(len(both) - 1)
        keep = (size > 1e-3 * size[0])[:_COMPONENTS].nonzero()[:, 0]
        basis = unit[:, None] * directions[keep].T / size[keep]
        inputs = _with_one((both - centre) @ basis)
        is_target = torch.cat([torch.zeros(len(labelled)), torch.ones(len(target))]).double()
        splits = list(CrossValidation(count=_FOLDS).splits(len(both)))
        best, least = torch.empty(0), math.inf
        left_out = torch.empty(len(both), dtype=torch.float64)
        for ridge in _RIDGES:
            penalty = torch.full_like(inputs[0], ridge)
            penalty[-1] = _FREE
            weights = torch.stack([logistic(inputs[rest], is_target[rest], penalty) for rest, _ in splits])
            logits = torch.empty_like(is_target)
            for fold, (_, out) in zip(weights, splits, strict=True):
                logits[out] = inputs[out] @ fold
            loss = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, is_target))
            if loss < least:
                best, least, left_out = weights, loss, logits
        made = cls(centre, basis, best, len(labelled) / len(target))
        ratios = made.ratio * left_out.exp()
        return made, ratios[: len(labelled)], ratios[len(labelled) :]

    def of(self, features: Tensor) -> Tensor:
        """Return the ratio of densities of rows, `(N,)`, from features `(N, F)`."""
        inputs = _with_one((features.double().cpu() - self.centre) @ self.basis)
        return self.ratio * (inputs @ self.weights.T).mean(1).exp()


@dataclass(frozen=True)
class Shift:
    """Weighs labelled rows by how much they are like those of the target."""

    density: Density  # of any row, beside the labelled rows
    weights: Tensor  # `(n,)` of the labelled rows, cut
    most: float  # where weights are cut
    scores: tuple[Tensor, ...]  # `(n,)` of each output, or of all together: `|target - mean| / std`
    effective_rows: float  # how many rows of one weight tell as much as the labelled ones
    beyond: float  # the share of the target rows that are so unlike the labelled ones that no 90 % interval has an end

    def reach(self, ratio: Tensor, level: float) -> Tensor:
        """Return the score that an interval reaches, `(N, K)`, of rows with a ratio `(N,)`; infinite where none is."""
        own = ratio.double().cpu().clamp_max(self.most)
        # The weight needed below, of a total with the row's own, which is never reached by the others alone.
        needed = level * (self.weights.sum() + own)
        reached = []
        for scores in self.scores:
            ordered, order = scores.sort()
            below = self.weights[order].cumsum(0)
            place = torch.searchsorted(below, needed - 1e-9 * below[-1])
            ends = torch.cat([ordered, ordered.new_tensor([math.inf])])
            reached.append(ends[place])
        return torch.stack(reached, 1)


@dataclass(frozen=True, kw_only=True, repr=False)
class AdaptedPrediction(Prediction):
    """Predictions of rows of a target, with intervals from weighted labelled rows.

    Attributes:
        features: `(N, F)`, by which rows are compared.
        shift: what is known of the target.
    """

    features: Tensor
    shift: Shift

    @property
    def weight(self) -> Tensor:
        """`(N,)`: how much more frequent such a row is in the target than among the labelled rows."""
        return self.shift.density.of(self.features)

    def _at(self, q: float) -> Tensor:
        q = checked_level(q)
        # Quantiles are ends of central intervals, as those of split-conformal predictors are.
        reach = self.shift.reach(self.weight, abs(2 * q - 1)).to(self.output)
        reach = reach[:, 0] if self.output.dim() == 1 else reach
        ends = self.output + math.copysign(1.0, q - 0.5) * reach * self.spread
        most = torch.finfo(ends.dtype).max
        unit, ends = self.calibration.target, ends.nan_to_num(posinf=most, neginf=-most)
        return ends if unit is None else unit.inverse(ends)


def check_adaptable(calibration: Calibration) -> None:
    """Raise `ArgumentError` where outputs are maps, or no features tell rows apart."""
    if len(calibration.output_shape) > 1:
        raise ArgumentError(
            f"expected one value or a vector for each row to adapt to a target; found outputs of shape "
            f"{calibration.output_shape}. Pass a readout, such as a map's sum."
        )
    if any(site.coupled for site in calibration.sites):
        raise ArgumentError(
            "expected a model whose rows do not affect each other, to weigh each by its features; found one whose rows "
            "do. Calibrate with labelled rows of the target."
        )


def fit_shift(p: AdaptedPrediction, y: Tensor, target: AdaptedPrediction) -> tuple[Shift, Calibration]:
    """Weigh labelled rows, in the model's unit, by how much they are like the target; fit scores and scales to them."""
    if min(len(p), len(target)) < LEAST_ROWS:
        raise DataError(
            f"expected at least {LEAST_ROWS} labelled rows and as many of the target; found {len(p)} and "
            f"{len(target)}. Pass more of them."
        )
    density, ratios, of_target = Density.fit(p.features, target.features)
    most = float(ratios.mean()) * math.sqrt(len(ratios))
    weights = ratios.clamp_max(most)
    effective = effective_rows(weights, len(weights))
    beyond = float((of_target > (1 - _LEVEL) * (weights.sum() + of_target)).double().mean())
    if effective < LEAST_ROWS or beyond > _MOST_BEYOND:
        raise DataError(
            f"expected labelled rows like those of the target: {LEAST_ROWS} effective rows at least, and "
            f"{1 - _MOST_BEYOND:.0%} of the target among them; found {effective:.0f} effective rows of {len(weights)}, "
            f"and {beyond:.0%} of the target rows beyond all labelled ones. Label rows of the target, and calibrate "
            "with these."
        )
    if beyond > 0:
        warn(
            f"{beyond:.1%} of the target rows are unlike all labelled rows, so that nothing holds for these; look at "
            "their weight, and label some of them.",
            LatedropWarning,
            stacklevel=3,
        )
    columns = residuals(p.mean, p.variance, y, per_output=p.mean.dim() > 1)
    squares = torch.stack([(weights * z.double().square()).sum() / weights.sum() for z in columns])
    factors = (effective * squares + _PRIOR) / (effective + _PRIOR)
    c = target.calibration
    each = factors if len(c.chosen()[0]) > 1 else factors.mean()[None]
    scale, floor = (tuple((torch.tensor(part, dtype=torch.float64) * each).tolist()) for part in c.chosen())
    scaled = TradeoffPoint(scale, floor, c.row.nll_scaled, c.row.ma_scaled)
    divisors = each.sqrt().expand(len(columns))
    scores = tuple(z.double().abs() / divisor for z, divisor in zip(columns, divisors, strict=True))
    # Intervals of its own belong to another scale.
    return Shift(density, weights, most, scores, effective, beyond), replace(c, intervals=None, choice=scaled)


def _with_one(inputs: Tensor) -> Tensor:
    return torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)
