"""Ways to a mean and a variance, on the same splits: what the study compares.

Each function takes one split and gives, for every part but the training rows, a mean and a raw variance `(n,)` in the
standardised unit of the target: its moments. What is fitted to errors is fitted on the validation rows, here or in
`processing`, save the last-layer Laplace approximation, which has its evidence on the training rows,

    posterior precision  A = features' features / noise + alpha,     Var y = noise + f' A^-1 f,

for the features f that enter the last layer (and 1 for its bias). `alpha` and `noise` maximise the evidence by MacKay's
fixed point: with `lam` the eigenvalues of features' features and `gamma = sum(lam / (lam + noise · alpha))`,

    alpha = gamma / |w|^2,     noise = sum(e^2) / (n - gamma).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from latedrop.calibration.fit_sites import fit_sites
from latedrop.devices import one_thread
from latedrop.errors import LatedropWarning
from latedrop.metrics.levels import even_levels
from latedrop.prediction.calibrate import calibrate
from latedrop.studies.scores import conformal_reach
from latedrop.studies.uci.gaussian import heads
from latedrop.studies.uci.measures import (
    LEVEL,
    Member,
    first_order,
    hidden_units,
    mask_numbers,
    rank_correlation,
    sampled,
)
from latedrop.studies.uci.rate_in import row_rates

__all__ = [
    "Moments",
    "Network",
    "conformal_scores",
    "constant",
    "default",
    "dropout",
    "ensemble",
    "gaussian",
    "gaussian_ensemble",
    "laplace",
    "network",
    "per_site",
    "posterior_variance",
    "rate_in",
    "spread",
]

Scores: TypeAlias = dict[str, float]
Moments: TypeAlias = dict[str, tuple[Tensor, Tensor]]


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

    @property
    def judged(self) -> list[str]:
        """The parts that a variance is wanted for: all but the training rows."""
        return [part for part in self.x if part != "train"]

    def error(self, part: str) -> Tensor:
        """Target minus output, `(n,)`."""
        return self.target[part] - self.mean[part]


def network(member: Member, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Network:
    """Run a network on every part."""
    found = {part: first_order(member, rows) for part, rows in x.items()}
    return Network(
        member, x, {part: mean for part, (mean, _) in found.items()}, {part: v for part, (_, v) in found.items()}, y
    )


def dropout(
    net: Network, rates: Sequence[float], draws: int | None, seed: int, *, noise: float = 0.0, parts: Sequence[str] = ()
) -> Moments:
    """Dropout at the rate of each site, plus noise: injected, embedded or concrete is what the network was trained as.

    Args:
        net: the network.
        rates: of the sites.
        draws: masks, in float32; None: to first order, which is exact for one hidden layer.
        seed: of the masks, the same numbers for every rate.
        noise: variance that is added.
        parts: those wanted; all but the training rows where empty.
    """
    parts = parts or net.judged
    if draws is None:
        odds = net.by_site["validation"].new_tensor([rate / (1 - rate) for rate in rates])
        return {part: (net.mean[part], net.by_site[part] @ odds + noise) for part in parts}
    member = [(weight.float(), bias.float()) for weight, bias in net.member] if len(net.member) > 2 else net.member
    numbers = mask_numbers(member, draws, seed)
    found = {part: sampled(member, net.x[part].to(member[0][0]), rates, numbers) for part in parts}
    return {part: (mean.double(), variance.double() + noise) for part, (mean, variance) in found.items()}


def rate_in(net: Network) -> Moments:
    """Dropout at rates of each site and row that lose a fixed share of information, to first order."""
    found = {}
    for part in net.judged:
        rates = torch.stack([row_rates(units) for units in hidden_units(net.member, net.x[part])], 1)
        found[part] = net.mean[part], (rates / (1 - rates) * net.by_site[part]).sum(1)
    return found


def laplace(net: Network) -> Moments:
    """Variance from a Gaussian posterior over the last layer, with its noise."""
    features = _with_ones(hidden_units(net.member, net.x["train"])[-1])
    weight = torch.cat([net.member[-1][0].flatten(), net.member[-1][1]])
    alpha, noise, values, vectors = _evidence(features, weight, net.error("train"))

    def variance(part: str) -> Tensor:
        rows = _with_ones(hidden_units(net.member, net.x[part])[-1])
        return posterior_variance(rows, alpha, noise, values, vectors) + noise

    return {part: (net.mean[part], variance(part)) for part in net.judged}


def ensemble(nets: Sequence[Network]) -> Moments:
    """Mean and variance over networks."""
    outputs = {part: torch.stack([net.mean[part] for net in nets]) for part in nets[0].judged}
    return {part: (found.mean(0), found.var(0)) for part, found in outputs.items()}


def spread(net: Network, moments: Moments) -> Moments:
    """The variance of moments on the mean of one network."""
    return {part: (net.mean[part], variance) for part, (_, variance) in moments.items()}


def gaussian(member: Member, x: Mapping[str, Tensor]) -> Moments:
    """What a Gaussian head says."""
    return {part: heads(member, rows) for part, rows in x.items() if part != "train"}


def gaussian_ensemble(members: Sequence[Member], x: Mapping[str, Tensor]) -> Moments:
    """Mean and variance of the mixture of Gaussian heads: mean of the variances plus variance of the means."""
    each = [gaussian(member, x) for member in members]
    found = {}
    for part in each[0]:
        mean, variance = (torch.stack(values) for values in zip(*(one[part] for one in each), strict=True))
        found[part] = mean.mean(0), variance.mean(0) + mean.var(0, correction=0)
    return found


def constant(net: Network) -> Moments:
    """The validation rows' mean squared error as the variance of every row: what every method must beat."""
    level = net.error("validation").square().mean()
    return {part: (net.mean[part], level.expand_as(net.mean[part])) for part in net.judged}


def per_site(net: Network) -> Moments:
    """`sum_s odds_s v_s + floor`, an odds for each site, fitted by NLL on the validation rows."""
    error, by_site = net.error("validation").cpu(), net.by_site["validation"].cpu()
    with one_thread():
        fit = fit_sites(error[:, None], by_site[:, None], per_site=True, floor=True)
    found = {}
    for part in net.judged:
        v = net.by_site[part]
        found[part] = net.mean[part], v @ fit.odds.to(v) * fit.scales.to(v) + fit.floors.to(v)
    return found


def default(net: Network, *, reference: bool) -> Moments:
    """What `latedrop.calibrate` does when it is told nothing, or only which inputs the network was trained on."""
    model, device = _sequential(net.member), net.mean["validation"].device
    x = {part: rows.cpu().float() for part, rows in net.x.items()}
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)  # that it is little better than a constant is what is measured
        usual = x["train"] if reference else None
        target = net.target["validation"].cpu().float()[:, None]
        predictor = calibrate(model, (x["validation"], target), progress=False, reference=usual)
        predicted = {part: predictor.predict(x[part]) for part in net.judged}
    return {
        part: (found.mean[:, 0].double().to(device), found.variance[:, 0].double().to(device))
        for part, found in predicted.items()
    }


def posterior_variance(features: Tensor, alpha: Tensor, noise: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """`f' A^-1 f` for each row of features, from the eigenvalues and vectors of features' features."""
    return (features @ vectors).square() @ (1 / (values / noise + alpha))


def conformal_scores(net: Network, scale: Mapping[str, Tensor] | None, unit: float, part: str = "test") -> Scores:
    """Split conformal intervals `mean ± s · std` on the rows of a part, s ranked on the validation rows.

    Args:
        net: the network.
        scale: the standard deviation by part, `(n,)`; one for all where None.
        unit: of the target, in which the width is.
        part: that is judged.

    There is no density, and so neither NLL nor CRPS. A level above `n / (n + 1)` has an unbounded interval.
    """
    held, test = net.error("validation").abs(), net.error(part).abs()
    std = torch.ones_like(test)
    if scale is not None:
        held, std = held / scale["validation"], scale[part]
    levels = even_levels(99).tolist()
    *radii, radius = (reach * std for reach in conformal_reach(held, [*levels, LEVEL]))
    observed = [float((test <= reach).double().mean()) for reach in radii]
    return {
        "rmse": float(test.square().mean().sqrt()) * unit,
        "ma": sum(abs(pi - a) for pi, a in zip(observed, levels, strict=True)) / len(levels),
        "coverage": float((test <= radius).double().mean()),
        "width": 2 * float(radius.mean()) * unit,
        "ranking": float(rank_correlation(std[None], test[None])),
    }


def _sequential(member: Member) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in member:
        layer = nn.Linear(*weight.shape)
        layer.weight.data, layer.bias.data = weight.T.cpu().float().contiguous(), bias.cpu().float()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


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


def _with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)
