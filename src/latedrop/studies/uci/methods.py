"""Other ways to a variance, on the same networks and splits: constant, linear with floor, Laplace, conformal.

All see a network through the same few numbers: its output and the first-order variance of each site. What is fitted is
fitted on the validation rows, save the Laplace approximation, which has its evidence on the training rows,

    posterior precision  A = features' features / noise + alpha,     Var y = noise + f' A^-1 f,

for the features f that enter the last layer (and 1 for its bias). `alpha` and `noise` maximise the evidence by MacKay's
fixed point: with `lam` the eigenvalues of features' features and `gamma = sum(lam / (lam + noise · alpha))`,

    alpha = gamma / |w|^2,     noise = sum(e^2) / (n - gamma).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from latedrop.calibration.fit import fit_sites
from latedrop.metrics.levels import even_levels
from latedrop.studies.scores import conformal_reach
from latedrop.studies.uci.measures import LEVEL, Member, Predicted, first_order, hidden_units, scores

__all__ = [
    "Network",
    "conformal_scores",
    "constant",
    "laplace",
    "learned",
    "linear",
    "network",
    "posterior_variance",
    "table_of",
]

Scores: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Network:
    """One trained network on one split, in the standardised unit of the target.

    Attributes:
        member: its layers.
        x: inputs by part.
        mean: output by part, `(n,)`.
        by_site: first-order variance of each site by part, `(n, sites)`.
        target: by part, `(n,)`.
    """

    member: Member
    x: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    by_site: Mapping[str, Tensor]
    target: Mapping[str, Tensor]

    def error(self, part: str) -> Tensor:
        """Target minus output, `(n,)`."""
        return self.target[part] - self.mean[part]

    def scored(self, variance: Tensor, unit: float) -> Scores:
        """The measures of a variance of the test rows, `(n,)`, in a target's unit that is `unit` times ours."""
        rows = self.mean["test"] * unit, variance * unit**2, self.target["test"] * unit
        return {name: float(value) for name, value in scores(Predicted(*(row[None] for row in rows))).items()}


def network(member: Member, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Network:
    """Run a network on every part."""
    found = {part: first_order(member, rows) for part, rows in x.items()}
    return Network(
        member, x, {part: mean for part, (mean, _) in found.items()}, {part: v for part, (_, v) in found.items()}, y
    )


def constant(net: Network) -> Tensor:
    """The validation rows' mean squared error as the variance of every test row: what every method must beat."""
    return net.error("validation").square().mean().expand_as(net.mean["test"])


def linear(net: Network, *, per_site: bool) -> Tensor:
    """`sum_s odds_s v_s + floor` on the test rows, fitted by NLL on the validation rows."""
    error, by_site = net.error("validation").cpu(), net.by_site["validation"].cpu()
    fit = fit_sites(error[:, None], by_site[:, None], per_site=per_site, floor=True)
    test = net.by_site["test"]
    return test @ fit.odds.to(test) * fit.scales.to(test) + fit.floors.to(test)


def laplace(net: Network, *, scaled: bool = False) -> Tensor:
    """Variance of the test rows from a Gaussian posterior over the last layer; `scaled` on validation rows."""
    features = _with_ones(hidden_units(net.member, net.x["train"])[-1])
    weight = torch.cat([net.member[-1][0].flatten(), net.member[-1][1]])
    alpha, noise, values, vectors = _evidence(features, weight, net.error("train"))

    def variance(part: str) -> Tensor:
        rows = _with_ones(hidden_units(net.member, net.x[part])[-1])
        return posterior_variance(rows, alpha, noise, values, vectors) + noise

    return variance("test") * (_scale(net, variance("validation")) if scaled else 1.0)


def learned(net: Network, rate: float, noise: float, *, scaled: bool = False) -> Tensor:
    """Variance of the test rows of a network that learned its rate and its noise; `scaled` on validation rows."""

    def variance(part: str) -> Tensor:
        return rate / (1 - rate) * net.by_site[part].sum(1) + noise

    return variance("test") * (_scale(net, variance("validation")) if scaled else 1.0)


def posterior_variance(features: Tensor, alpha: Tensor, noise: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """`f' A^-1 f` for each row of features, from the eigenvalues and vectors of features' features."""
    return (features @ vectors).square() @ (1 / (values / noise + alpha))


def conformal_scores(net: Network, scale: Mapping[str, Tensor] | None, unit: float) -> Scores:
    """Split conformal intervals `mean ± s · std` on the test rows, s ranked on the validation rows.

    Args:
        net: the network.
        scale: the standard deviation by part, `(n,)`; one for all where None.
        unit: of the target, in which the width is.

    There is no density, and so neither NLL nor CRPS. A level above `n / (n + 1)` has an unbounded interval.
    """
    held, test = net.error("validation").abs(), net.error("test").abs()
    spread = torch.ones_like(test)
    if scale is not None:
        held, spread = held / scale["validation"], scale["test"]
    levels = even_levels(99).tolist()
    *radii, radius = (reach * spread for reach in conformal_reach(held, [*levels, LEVEL]))
    observed = [float((test <= reach).double().mean()) for reach in radii]
    return {
        "rmse": float(test.square().mean().sqrt()) * unit,
        "ma": sum(abs(pi - a) for pi, a in zip(observed, levels, strict=True)) / len(levels),
        "coverage": float((test <= radius).double().mean()),
        "width": 2 * float(radius.mean()) * unit,
    }


def _evidence(features: Tensor, weight: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prior precision and noise of the largest evidence, and the eigen-decomposition of features' features."""
    values, vectors = torch.linalg.eigh(features.T @ features)
    values = values.clamp_min(0)
    square, sum_of_squares, n = weight.square().sum(), error.square().sum(), len(error)
    alpha, noise = weight.new_ones(()), sum_of_squares / n
    for _ in range(200):
        gamma = (values / (values + noise * alpha)).sum().clamp(1e-6, n - 1)
        alpha, noise = gamma / square, sum_of_squares / (n - gamma)
    return alpha, noise, values, vectors


def _scale(net: Network, variance: Tensor) -> Tensor:
    """The scale of least NLL on the validation rows."""
    return (net.error("validation").square() / variance).mean()


def _with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)


def table_of(rows: Sequence[Scores]) -> dict[str, list[float]]:
    """The scores of all splits, measure by measure."""
    return {name: [row[name] for row in rows] for name in rows[0]}
