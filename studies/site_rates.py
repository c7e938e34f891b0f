"""How much each site counts: `variance = floor + sum_s a_s · v_s` fitted to the errors, `a_s >= 0`, `floor >= 0`.

With `u_ij >= 0` the columns (the sites' first-order variances, and ones for the floor) the likelihood of squared errors
`e2_i` under the variances `w_i = sum_j theta_j u_ij` has

    NLL = mean(e2 / w + log w) / 2,      expected curvature  H = U' diag(1 / w^2) U / (2 n).

Fisher scoring minimises the quadratic model with curvature H under `theta >= 0`, which is a non-negative least squares
problem, and then walks towards that minimum only as far as the NLL falls. The sequence of NLLs therefore falls to a
stationary point, and no step is random.

Per-site coefficients are measured in units of the fit with one common rate and pulled towards it, by
`sum_s (theta_s - 1)^2 / (2 n)`: the weight of one row for each site, which fades with the rows and makes more sites
than rows harmless. As the pull is zero at the common rate, the fit never has a larger NLL than that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from latedrop.calibration.scale import fit_floor, least_positive
from latedrop.metrics import nll
from latedrop.metrics.entries import average

__all__ = ["SiteFit", "fit_sites", "scored"]

_STEPS = 100
_NOMINAL_ODDS = 0.01


@dataclass(frozen=True)
class SiteFit:
    """`variance = scales · sum_s odds_s v_s + floors`.

    Attributes:
        odds: `(sites,)`, `rate / (1 - rate)` of each site.
        scales: `(K,)`, one per output, with geometric mean 1; 0 where the floor explains all.
        floors: `(K,)`.
    """

    odds: Tensor
    scales: Tensor
    floors: Tensor

    def variance(self, by_site: Tensor) -> Tensor:
        """The fitted variance `(n, K)` from `(n, K, sites)`."""
        return by_site @ self.odds * self.scales + self.floors


def fit_sites(error: Tensor, by_site: Tensor, *, per_site: bool, floor: bool, weights: Tensor | None = None) -> SiteFit:
    """Fit the sites' odds, shared by all outputs, and a scale and a floor for each output.

    Args:
        error: `(n, K)`, target minus mean.
        by_site: `(n, K, sites)`, the variance of each site per unit of `rate / (1 - rate)`.
        per_site: each site has its own odds; False: one for all.
        floor: also fit a constant.
        weights: `(n,)`, what each row counts, with mean 1.
    """
    error, by_site = error.double(), _lifted(by_site.double())
    zero, total = torch.zeros_like(error), by_site.sum(2)
    candidates = []
    for constant in (False, True) if floor else (False,):
        if constant:
            scales, floors = fit_floor(zero, total, error, per_output=True, weights=weights)
        else:
            scales = torch.stack([average(column, weights) for column in (error.square() / total).unbind(1)])
            floors = torch.zeros_like(scales)
        candidates.append(_fit(scales, floors, torch.ones_like(by_site[0, 0])))
        if per_site:
            candidates.append(_own(error, by_site, scales, floors, constant, weights))
    # The nested models are candidates too, so that the larger one never ends worse.
    size = error.square().mean(0).sqrt()
    return min(candidates, key=lambda fit: _nll(error / size, fit.variance(by_site) / size.square(), weights))


def _fit(scales: Tensor, floors: Tensor, odds: Tensor) -> SiteFit:
    if not bool(odds.any()):  # the floor explains all: a scale of 0 says so, and rates above 0 leave a raw variance
        odds, scales = torch.ones_like(odds), torch.zeros_like(scales)
    size = scales[scales > 0].log().mean().exp() if bool(scales.any()) else scales.new_tensor(_NOMINAL_ODDS)
    return SiteFit(odds * size, scales / size, floors)


def _own(
    error: Tensor,
    by_site: Tensor,
    scales: Tensor,
    floors: Tensor,
    floor: bool,
    weights: Tensor | None,
) -> SiteFit:
    """Odds of their own for every site, from the common ones; outputs are brought to one size by their scales."""
    rows, outputs, sites = by_site.shape
    # Where a floor explained all there is, the sites start from a tenth of the squared error and not from nothing.
    whole = (error.square() / by_site.sum(2)).mean(0)
    scales = torch.where(scales > 0, scales, 0.1 * whole)
    columns = by_site.reshape(rows * outputs, sites)
    start = torch.ones(sites, dtype=columns.dtype, device=columns.device)
    pull = start / (rows * outputs)
    if floor:
        columns = torch.cat([columns, torch.eye(outputs).to(columns).repeat(rows, 1)], 1)
        start = torch.cat([start, floors / scales])
        pull = torch.cat([pull, torch.zeros_like(scales)])
    flat = (error / scales.sqrt()).flatten()
    counted = None if weights is None else weights.repeat_interleave(outputs)
    theta = scored(flat.square(), columns, start, pull, weights=counted)
    return _fit(scales, theta[sites:] * scales if floor else torch.zeros_like(scales), theta[:sites])


def scored(
    e2: Tensor,
    columns: Tensor,
    start: Tensor,
    pull: Tensor,
    charge: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Fisher scoring with non-negative steps and backtracking.

    Minimises `NLL + sum_j (pull_j (theta_j - start_j)^2 / 2 + charge_j theta_j)`; `weights` have mean 1.
    """
    price = torch.zeros_like(pull) if charge is None else charge
    counts = torch.ones_like(e2) if weights is None else weights.to(e2)

    def objective(theta: Tensor) -> float:
        w = columns @ theta
        if bool((w <= 0).any()):
            return float("inf")
        value = ((counts * (e2 / w + w.log())).mean() + (pull * (theta - start).square()).sum()) / 2 + price @ theta
        return float(value)

    theta, value = start.clone(), objective(start)
    for _ in range(_STEPS):
        weight = (columns @ theta).reciprocal()
        scaled = columns * weight[:, None]
        curvature = scaled.T @ (counts[:, None] * scaled) / len(e2) + torch.diag(2 * pull)
        linear = scaled.T @ (counts * e2 * weight) / len(e2) + 2 * pull * start - 2 * price
        aim = _non_negative(curvature, linear, theta)
        step = 1.0
        while step > 1e-6:
            moved = theta + step * (aim - theta)
            new = objective(moved)
            if new < value:
                break
            step /= 2
        else:
            return theta
        finished = value - new < 1e-10 * max(1.0, abs(value))
        theta, value = moved, new
        if finished:
            return theta
    return theta


def _non_negative(curvature: Tensor, linear: Tensor, start: Tensor) -> Tensor:
    """The minimum of `t' A t / 2 - b' t` over `t >= 0`, coordinate by coordinate; most stay at 0, and cost nothing."""
    a, b, t = (value.cpu().numpy().copy() for value in (curvature, linear, start))
    diagonal = a.diagonal().tolist()
    for _ in range(200):
        change, left = 0.0, b - a @ t
        for j, size in enumerate(diagonal):
            if size <= 0:
                continue
            move = max(-t[j], left[j] / size)
            if move:
                t[j] += move
                left -= move * a[j]
                change = max(change, abs(move) * size**0.5)
        if change < 1e-10:
            break
    return torch.from_numpy(t).to(start)


def _lifted(by_site: Tensor) -> Tensor:
    """Rows that no site touches are given the smallest variance of the others, in equal parts."""
    total = by_site.sum(2)
    least = least_positive(total, per_output=True) / by_site.shape[2]
    return torch.where(total[..., None] > 0, by_site, least[:, None])


def _nll(error: Tensor, variance: Tensor, weights: Tensor | None) -> float:
    if bool((variance <= 0).any()):
        return torch.inf
    return float(nll(torch.zeros_like(error), variance, error, constant=False, weights=weights))
