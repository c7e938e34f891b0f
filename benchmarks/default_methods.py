"""What is compared: from networks and validation rows to a mean and a variance for other rows.

A method is a function of `Case` that returns a rule `x -> (mean, variance)`; a new one is a function and a line in
`METHODS`. All work on float64 targets in standardised units, and none sees a test row before its rule is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

import latedrop
from latedrop import metrics
from latedrop.calibration.scale import fit_floor

Rule: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
RIDGES = tuple(10.0**i for i in range(-6, 3))


@dataclass(frozen=True)
class Case:
    """What a method may see.

    Attributes:
        nets: trained on the same rows from other weights; methods for one network take the first.
        x_train: inputs that the networks were trained on.
        x_val: validation inputs.
        y_val: their targets `(n,)`.
    """

    nets: Sequence[nn.Sequential]
    x_train: Tensor
    x_val: Tensor
    y_val: Tensor

    @property
    def net(self) -> nn.Sequential:
        """The one network."""
        return self.nets[0]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Validation data as `calibrate` takes it."""
        return self.x_val, self.y_val[:, None].float()


def constant(case: Case) -> Rule:
    """The mean squared validation error for every row."""
    level = (case.y_val - output(case.net, case.x_val)).square().mean()

    def rule(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = output(case.net, x)
        return mean, level.expand_as(mean)

    return rule


def paper(case: Case) -> Rule:
    """Draws at the rate with the best scaled NLL, times the scale: no floor."""
    return _predicting(latedrop.calibrate(case.net, case.pair, method="sample", progress=False))


def linear_floor(case: Case) -> Rule:
    """First order with a rate for each site, plus a floor."""
    made = latedrop.calibrate(
        case.net, case.pair, method=latedrop.FirstOrder(per_site=True, floor=True), progress=False
    )
    return _predicting(made)


def laplace_floor(case: Case) -> Rule:
    """`scale · h' (H'H / n + ridge · I)^-1 h + floor`, `h` the last features and a 1, `H` those of training rows.

    The ridge, relative to the mean of the diagonal, is the one with the best validation NLL.
    """
    reference, mean = features(case.net, case.x_train), output(case.net, case.x_val)
    gram = reference.T @ reference / len(reference)
    size = gram.diagonal().mean()
    best = (math.inf, torch.empty(0), torch.empty(0), torch.empty(0))
    for ridge in RIDGES:
        inverse = torch.linalg.inv(gram + ridge * size * torch.eye(len(gram), dtype=gram.dtype))
        raw = _quadratic(features(case.net, case.x_val), inverse)
        scale, floor = fit_floor(mean, raw, case.y_val)
        score = float(metrics.nll(mean, scale * raw + floor, case.y_val))
        if score < best[0]:
            best = (score, inverse, scale, floor)
    _, inverse, scale, floor = best

    def rule(x: Tensor) -> tuple[Tensor, Tensor]:
        return output(case.net, x), scale * _quadratic(features(case.net, x), inverse) + floor

    return rule


def ensemble_floor(case: Case) -> Rule:
    """The mean over all networks; `scale · variance over them + floor`."""

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.stack([output(net, x) for net in case.nets])
        return outputs.mean(0), outputs.var(0)

    mean, raw = moments(case.x_val)
    scale, floor = fit_floor(mean, raw, case.y_val)

    def rule(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = moments(x)
        return mean, scale * raw + floor

    return rule


def default(case: Case) -> Rule:
    """What the library does when it is told nothing."""
    return _predicting(latedrop.calibrate(case.net, case.pair, progress=False))


def default_reference(case: Case) -> Rule:
    """The same with training inputs as reference rows."""
    return _predicting(latedrop.calibrate(case.net, case.pair, progress=False, **{"reference": case.x_train}))


METHODS: dict[str, Callable[[Case], Rule]] = {
    "constant": constant,
    "paper": paper,
    "linear + floor": linear_floor,
    "laplace + floor": laplace_floor,
    "ensemble + floor": ensemble_floor,
    "default": default,
    "default + reference": default_reference,
}


def available() -> dict[str, Callable[[Case], Rule]]:
    """The methods that this version of the library has."""
    has = "reference" in inspect.signature(latedrop.calibrate).parameters
    return {name: method for name, method in METHODS.items() if has or method is not default_reference}


def output(net: nn.Module, x: Tensor) -> Tensor:
    """The network's prediction `(n,)`, float64."""
    with torch.no_grad():
        found: Tensor = net(x)[:, 0].double()
    return found


def features(net: nn.Sequential, x: Tensor) -> Tensor:
    """What enters the last layer, with a 1 appended, float64."""
    with torch.no_grad():
        last: Tensor = net[:-1](x).double()
    return torch.cat([last, torch.ones_like(last[:, :1])], 1)


def _quadratic(rows: Tensor, inverse: Tensor) -> Tensor:
    return ((rows @ inverse) * rows).sum(1)


def _predicting(predictor: latedrop.Predictor) -> Rule:
    def rule(x: Tensor) -> tuple[Tensor, Tensor]:
        found = predictor.predict(x)
        return found.mean[:, 0].double(), found.variance[:, 0].double()

    return rule
