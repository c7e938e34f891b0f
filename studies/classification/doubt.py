"""Probabilities of uncertain logits, to first order in injected dropout or under a Laplace approximation.

With logits `z` and `D_kj` the variance of `z_k - z_j`, take one class against all others: with
`q_j = p_j / (1 - p_k)` and `l_k = z_k - log sum_(j != k) exp z_j`, to second order in the doubt

    E l_k = l_k - B_k / 2,    Var l_k = sum_j q_j D_kj - B_k,    B_k = sum_ij q_i q_j D_ij / 2,

and the mean of the softmax is about that of `sigmoid(l_k)` with a Gaussian `l_k`, brought to a sum of 1. This mean is
summed over a few points: the better-known `sigmoid(E l_k / sqrt(1 + pi / 8 · Var l_k))` (MacKay 1992) is off by up to
0.02, and by several nats for labels that are very unlikely. A temperature divides `z`, and its square `D`.

`D` is `odds` times what was measured; the odds are fitted with the temperature, as `latedrop.calibrate` fits that.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration.fit_classes import Measured, information, log_temperatures, losses, minimised, prior, starts
from latedrop.dropout.first_order import first_order

_STEP, _POINTS = 0.5, 10
_WIDEST = 6.0
_ROWS = 500  # that run at once
_STARTS = (-2.0, 1.0)  # of the log of the odds
_LARGEST, _FARTHEST, _PRICE = 30.0, 60.0, 2.0  # as in `latedrop.calibration.fit_classes`


@dataclass(frozen=True)
class DoubtFit:
    """From logits and the variances of their differences to probabilities.

    Attributes:
        temperature: of rows at a novelty of 1, or of all rows.
        slope: how the log of the temperature grows with the log of the novelty; None: one temperature for all rows.
        odds: what variances are multiplied by.
    """

    temperature: float
    slope: float | None
    odds: float

    def log_probabilities(self, rows: Measured, spread: Tensor) -> Tensor:
        """`(N, K)`, of rows with variances `(N, K, K)`."""
        logits = rows.logits.double()
        slope = None if self.slope is None else logits.new_tensor(self.slope)
        logs = log_temperatures(rows.novelty, logits, logits.new_tensor(self.temperature).log(), slope)
        return log_mean_softmax(logits, self.odds * spread, logs.exp())


def fitted_with_doubt(rows: Measured, spread: Tensor, *, sloped: bool | None) -> DoubtFit:
    """Fit temperature, slope and odds to rows `(N, K)` with variances `(N, K, K)`."""
    logits = rows.logits.double()
    unit = float(1 / spread.mean().clamp_min(1e-30).double())

    def parts(p: Tensor) -> tuple[Tensor | None, Tensor]:
        grown = p[1:].clamp_max(_LARGEST).exp()
        slope = None if sloped is None else grown[0] if sloped else p.new_zeros(())
        return slope, grown[1]

    def loss(p: Tensor) -> Tensor:
        slope, odds = parts(p)
        temperature = log_temperatures(rows.novelty, logits, p[0], slope).exp()
        cost = prior(p[0]) + (0 if slope is None else slope) + odds
        logs = log_mean_softmax(logits, odds * unit * spread, temperature)
        return losses(logs, rows.labels).mean() + _PRICE / len(rows.labels) * cost

    tried = [minimised(loss, [log_t, -1.5, start]) for log_t in starts(logits) for start in _STARTS]
    best = min(tried, key=lambda pair: pair[0])[1]
    slope, odds = parts(best)
    temperature = float(best[0].clamp(-_FARTHEST, _FARTHEST).exp())
    return DoubtFit(temperature, None if slope is None else float(slope), float(odds) * unit)


def differences(net: nn.Module, x: Tensor, sites: latedrop.Sites) -> Tensor:
    """Return how far dropout moves K logits apart: the variances of their differences, `(N, K, K)`.

    With `phi_k` that of logit k, the variance per unit of `rate / (1 - rate)` is

        D_kj = |phi_k - phi_j|^2 = |phi_k|^2 + |phi_j|^2 - 2 phi_k · phi_j.

    Something taken from all `phi_k` alike changes nothing, so that those of `z_k - z_K`, one backward pass for each
    logit but the last, give the variances of all differences.
    """
    network, parts = latedrop.Network.of(net), []
    for rows in x.split(_ROWS):
        for part in first_order(network, rows, sites, lambda z: z[:, :-1] - z[:, -1:], phi=True):
            each = [torch.stack([entry[site.name] for entry in part.phi], 1) for site in sites]
            gram = nn.functional.pad(sum((phi @ phi.mT for phi in each), torch.zeros(())), (0, 1, 0, 1))
            squares = gram.diagonal(dim1=1, dim2=2)
            parts.append((squares[:, :, None] + squares[:, None] - 2 * gram).clamp_min(0))
    return torch.cat(parts)


def log_mean_softmax(logits: Tensor, spread: Tensor, temperature: Tensor) -> Tensor:
    """Return log probabilities `(N, K)`.

    Args:
        logits: `(N, K)`.
        spread: `(N, K, K)`, the variances of their differences.
        temperature: `(N,)`.
    """
    z, d = logits / temperature[:, None], spread / temperature[:, None, None].square()
    own = torch.eye(z.shape[1], dtype=torch.bool, device=z.device)
    rest = z[:, None].expand(-1, z.shape[1], -1).masked_fill(own, -torch.inf)  # `(N, k, j)`, j without k
    together = rest.logsumexp(2)
    q = torch.softmax(rest, 2)
    bent = torch.einsum("nki,nij,nkj->nk", q, d, q) / 2
    variance = (torch.einsum("nkj,nkj->nk", q, d) - bent).clamp_min(0)
    return torch.log_softmax(_log_mean_sigmoid(z - together - bent / 2, variance), 1)


def _log_mean_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the log of the mean of `sigmoid(l)`, `l` Gaussian; the probability is off by 0.0015 at most.

    With `e^(-a l)`, `0 <= a <= 1`, taken out of the sigmoid, the points lie where the product with the density is
    large, also for a mean far below 0. They are too far apart for a larger deviation than `_WIDEST`, where a sigmoid
    is nearly a step: there the mean shrinks with the deviation.
    """
    own = math.pi**2 / 3  # the variance of which a sigmoid is the distribution
    variance = variance.clamp_min(1e-12)
    narrow = variance.clamp_max(_WIDEST**2)
    mean = mean * ((narrow + own) / (variance + own)).sqrt()
    tilt = (-mean / narrow).clamp(0, 1)
    points = _STEP * torch.arange(-_POINTS, _POINTS + 1, dtype=mean.dtype, device=mean.device)
    weights = torch.log_softmax(-points.square() / 2, 0)
    at = (mean + tilt * narrow)[..., None] + narrow.sqrt()[..., None] * points
    terms = torch.nn.functional.logsigmoid(at) - tilt[..., None] * at + weights
    return terms.logsumexp(-1) + tilt * mean + tilt.square() * narrow / 2


def mutual_information(logits: Tensor, spread: Tensor, draws: int = 256, seed: int = 0) -> Tensor:
    """Return what the label would tell about the thinned network, `(N,)` in nats: entropy of the mean minus the mean.

    Gaussian logits with these variances of their differences stand for draws of the network.
    """
    k = logits.shape[1]
    center = torch.eye(k, dtype=logits.dtype, device=logits.device) - 1 / k
    values, vectors = torch.linalg.eigh(-center @ spread @ center / 2)  # of logits less their mean, which goes unseen
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws // 2, k, dtype=torch.float64, generator=generator).to(logits)
    logs = torch.log_softmax(logits + torch.einsum("nkj,tj->tnk", root, torch.cat([noise, -noise])), 2)
    return information(logs)
