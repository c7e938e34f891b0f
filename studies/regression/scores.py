"""Predictions of a network with dropout at its sites, fits to their variance, and scores.

With inverted dropout before the last of `L` linear layers and before others further up, first-order variance is

    Var y = rate / (1 - rate) · sum_s v_s,     v_s = sum over the units i of site s of (a_i · dy/da_i)^2,

which for one hidden layer (a single site before the output layer) is exact: no draws are needed, the mean is the plain
network's, and the scaled variance does not depend on the rate. The paper draws masks instead.

A *measure* is, for each part of the rows, a mean and a raw variance of K networks `(K, n)`. On the validation rows are
fitted, with `e2 = (target - mean)^2`,

    raw       nothing: 1 · v + 0
    scaled    scale · v,           scale = mean(e2 / v), of least NLL
    relaxed   scale · v,           scale that balances the calibration curve
    floor     scale · v + floor,   both >= 0, of least NLL

by `latedrop.calibration.scale`, and applied to every part. No variance is below `LEAST` of the plain
network's mean squared validation error, whatever the method. Every quantity is in the target's own unit; NLLs leave out
`log(2 pi) / 2`, as the paper does; areas are over 99 levels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.calibration.scale import fit_floor, optimal_scale, relaxed_scale
from latedrop.errors import ArgumentError
from latedrop.quantiles import conformal_score


def conformal_reach(scores: Tensor, levels: list[float]) -> list[float]:
    """Half widths of split conformal intervals from the scores `|e| / std` of held-out rows `(n,)`, level by level.

    A level above `n / (n + 1)` has an unbounded interval.

    >>> conformal_reach(torch.tensor([3.0, 1.0, 2.0]), [0.5, 0.9])
    [2.0, inf]
    """
    # Not by `conformal`, which refuses infinite scores: a row without variance is one that no interval holds.
    ordered = scores.double().abs().sort().values.tolist()

    def reach(level: float) -> float:
        try:
            return conformal_score(ordered, level)
        except ArgumentError:
            return math.inf

    return [reach(level) for level in levels]


Member: TypeAlias = Sequence[tuple[Tensor, Tensor]]
LEVEL = 0.9


@dataclass(frozen=True)
class Predicted:
    """Mean, variance and target of n rows of K networks or rates, `(K, n)`, in the target's unit."""

    mean: Tensor
    variance: Tensor
    target: Tensor

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and target as the library takes K outputs: `(n, K)`, on the CPU."""
        return self.mean.T.cpu(), self.variance.T.cpu(), self.target.T.cpu()


def hidden_units(member: Member, x: Tensor) -> list[Tensor]:
    """Return the inputs of each layer but the first, `(n, units)`: the activations at the sites."""
    units = [x]
    for weight, bias in member[:-1]:
        units.append(torch.relu(units[-1] @ weight + bias))
    return units[1:]


def scores(predicted: Predicted) -> dict[str, Tensor]:
    """Measure `(K, n)` predictive Gaussians by `latedrop.metrics`, each measure `(K,)`, on the CPU."""
    rows = predicted.columns()
    return {
        "rmse": metrics.rmse(*rows, per_output=True),
        "nll": metrics.nll(*rows, per_output=True, constant=False),
        "ma": metrics.miscalibration_area(*rows, per_output=True),
        "crps": metrics.crps(*rows, per_output=True),
        "coverage": metrics.coverage(*rows, per_output=True, level=LEVEL),
        "width": metrics.interval_width(*rows, per_output=True, level=LEVEL),
        "ranking": metrics.rank_correlation(*rows, per_output=True),
    }


Measure: TypeAlias = Mapping[str, Predicted]
"""By part of the rows; the raw variance of K networks."""

HOWS = ("raw", "scaled", "relaxed", "floor")
LEAST = 1e-4


class Fit(NamedTuple):
    """`scale · variance + floor`, `(K,)` each; the floor in the squared unit of the target."""

    scale: Tensor
    floor: Tensor

    def applied(self, part: Predicted, least: Tensor) -> Predicted:
        """The part with the fitted variance, which is at least `least`, `(K,)`."""
        variance = part.variance * self.scale[:, None] + self.floor[:, None]
        return Predicted(part.mean, torch.maximum(variance, least[:, None]), part.target)


def processed(measure: Measure, least: Tensor, hows: Sequence[str] = HOWS) -> dict[str, dict[str, Predicted]]:
    """Every part, by how its variance was treated. See the module."""
    measure = lifted(measure)
    fitted = fits(measure["validation"], hows)
    return {how: {name: fitted[how].applied(part, least) for name, part in measure.items()} for how in hows}


def lifted(measure: Measure) -> dict[str, Predicted]:
    """Rows without variance, where every unit is off, are given the smallest one of the validation rows."""
    validation = measure["validation"].variance
    least = torch.where(validation > 0, validation, torch.inf).amin(1, keepdim=True)
    least = torch.where(least.isinf(), 1.0, least)
    return {
        name: Predicted(part.mean, torch.where(part.variance > 0, part.variance, least), part.target)
        for name, part in measure.items()
    }


def fits(validation: Predicted, hows: Sequence[str] = HOWS) -> dict[str, Fit]:
    """Fit to the validation rows, by how, with the functions that `calibrate` fits with."""
    rows, like = validation.columns(), validation.variance
    one, zero = torch.ones_like(like[:, 0]), torch.zeros_like(like[:, 0])
    made: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "raw": lambda: (one, zero),
        "scaled": lambda: (optimal_scale(*rows, per_output=True), zero),
        "relaxed": lambda: (relaxed_scale(*rows, per_output=True), zero),
        "floor": lambda: fit_floor(*rows, per_output=True),
    }
    return {how: Fit(*(value.to(like) for value in made[how]())) for how in hows}


def rate_measures(measure: Measure, least: Tensor) -> dict[str, dict[str, Tensor]]:
    """Every measure of K rates and splits by part, `(K,)` each: of the raw variance and of all that is made of it."""
    measure = lifted(measure)
    fitted_by = fits(measure["validation"])
    floor = fitted_by["floor"]
    fitted = {"scale": fitted_by["scaled"].scale, "relaxed_scale": fitted_by["relaxed"].scale}
    fitted |= {"floor_scale": floor.scale, "floor": floor.floor}
    rows = {}
    for name, part in measure.items():
        share = floor.floor / (floor.scale * part.variance.mean(1) + floor.floor)
        ideal = metrics.ideal_nll(*part.columns(), per_output=True, constant=False)
        row = {"nll_ideal": ideal, **fitted, "floor_share": share}
        row["ranking"] = metrics.rank_correlation(*part.columns(), per_output=True)
        for how, fit in fitted_by.items():
            measured = scores(fit.applied(part, least))
            row["rmse"] = measured.pop("rmse")
            row |= {f"{kind}_{'unscaled' if how == 'raw' else how}": value for kind, value in measured.items()}
        rows[name] = row
    return rows
