"""How much each site counts: `variance = floor + sum_s a_s · v_s` fitted to the errors, `a_s >= 0`, `floor >= 0`.

With `u_ij >= 0` the columns (the sites' first-order variances, and ones for the floor) the likelihood of squared errors
`e2_i` under the variances `w_i = sum_j theta_j u_ij` has

    NLL = mean(e2 / w + log w) / 2.

Per-site coefficients are measured in units of the fit with one common rate and pulled towards it, by
`sum_s (theta_s - 1)^2 / (2 n)`: the weight of one row for each site, which fades with the rows and makes more sites
than rows harmless. As the pull is zero at the common rate, the fit never has a larger NLL than that one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from latedrop.calibration.scale import fit_floor
from latedrop.metrics import nll

_NOMINAL_ODDS = 0.01


@dataclass(frozen=True)
class SiteFit:
    """`variance = scale · sum_s odds_s v_s + floor`.

    Attributes:
        odds: `(sites,)`, `rate / (1 - rate)` of each site.
        floor: a constant.
        scale: 1; 0 where the floor explains all.
    """

    odds: Tensor
    floor: float
    scale: float = 1.0

    def variance(self, by_site: Tensor) -> Tensor:
        """The fitted variance `(n,)` from `(n, sites)`."""
        return by_site @ self.odds.to(by_site) * self.scale + self.floor


def fit_sites(error: Tensor, by_site: Tensor) -> SiteFit:
    """Fit an odds for each site, and a floor.

    The nested models, one odds for all sites and no floor, are candidates too, so that the largest never ends worse.

    Args:
        error: `(n,)`, target minus mean.
        by_site: `(n, sites)`, the variance of each site per unit of `rate / (1 - rate)`.
    """
    error, by_site = error.double(), _lifted(by_site.double())
    total, ones = by_site.sum(1), torch.ones_like(by_site[0])
    scale, floor = (float(value) for value in fit_floor(torch.zeros_like(error), total, error))
    candidates = []
    for factor, constant in ((float((error.square() / total).mean()), None), (scale, floor)):
        candidates += [_fit(factor, constant or 0.0, ones), _per_site(error, by_site, factor, constant)]
    size = float(error.square().mean())
    # Rounded, so that a smaller model wins where the larger one gains nothing but rounding.
    return min(candidates, key=lambda fit: round(_nll(error / size**0.5, fit.variance(by_site) / size), 9))


def _fit(scale: float, floor: float, odds: Tensor) -> SiteFit:
    if scale > 0 and bool(odds.any()):
        return SiteFit(odds * scale, floor)
    # The floor explains all: a scale of 0 says so, and odds above 0 leave a raw variance.
    return SiteFit(torch.full_like(odds, _NOMINAL_ODDS), floor, 0.0)


def _per_site(error: Tensor, by_site: Tensor, scale: float, floor: float | None) -> SiteFit:
    """Fit odds of their own for every site, from the common ones; `floor` is where that of the fit starts."""
    # Where a floor explained all there is, the sites start from a tenth of the squared error and not from nothing.
    scale = scale if scale > 0 else 0.1 * float((error.square() / by_site.sum(1)).mean())
    rows, sites = by_site.shape
    start, pull = torch.ones_like(by_site[0]), torch.full_like(by_site[0], 1 / rows)
    if floor is not None:
        by_site = torch.cat([by_site, torch.ones_like(by_site[:, :1])], 1)
        start = torch.cat([start, start.new_tensor([floor / scale])])
        pull = torch.cat([pull, pull.new_zeros(1)])
    theta = scored(error.square() / scale, by_site, start, pull)
    return _fit(scale, scale * float(theta[sites:].sum()), theta[:sites])


def scored(e2: Tensor, columns: Tensor, start: Tensor, pull: Tensor, charge: Tensor | None = None) -> Tensor:
    """Minimise `NLL + sum_j (pull_j (theta_j - start_j)^2 / 2 + charge_j theta_j)` over `theta >= 0`."""
    u, squares, first, strength = (value.cpu().numpy() for value in (columns, e2, start, pull))
    price = np.zeros_like(first) if charge is None else charge.cpu().numpy()

    def objective(theta: Any) -> tuple[float, Any]:
        w = np.maximum(u @ theta, 1e-12)
        off = theta - first
        value = (np.mean(squares / w + np.log(w)) + strength @ off**2) / 2 + price @ theta
        return value, u.T @ ((1 - squares / w) / w) / (2 * len(w)) + strength * off + price

    options = {"ftol": 1e-14, "gtol": 1e-10, "maxiter": 2000, "maxfun": 4000}
    best = minimize(objective, first, jac=True, bounds=[(0, None)] * len(first), method="L-BFGS-B", options=options)
    return torch.from_numpy(best.x).to(start)


def _lifted(by_site: Tensor) -> Tensor:
    """Give rows that no site touches the smallest variance of the others, in equal parts."""
    total = by_site.sum(1)
    least = torch.where(total > 0, total, torch.inf).min() / by_site.shape[1]
    return torch.where(total[:, None] > 0, by_site, least)


def _nll(error: Tensor, variance: Tensor) -> float:
    if bool((variance <= 0).any()):
        return torch.inf
    return float(nll(torch.zeros_like(error), variance, error, constant=False))
