r"""How good probabilities of classes are: pure functions of `(probabilities, labels)`.

`probabilities` is `(N, K)`, rows summing to 1, a tensor or array; `labels` `(N,)` are whole numbers from 0 to `K - 1`.
With `p_y` the probability of the label, `c` the largest one and `a` whether it is the label's,

$$
\mathrm{NLL} = \mathrm{mean}(-\log p_y), \qquad \mathrm{Brier} = \mathrm{mean}\left( \sum_k (p_k - [k = y])^2 \right),
\qquad \mathrm{ECE} = \sum_b \frac{n_b}{N} \left| \bar a_b - \bar c_b \right|,
$$

the last over bins `b` of the confidence `c`, with `n_b` rows each.

References: Guo et al., "On Calibration of Modern Neural Networks" (2017). Nixon et al., "Measuring Calibration in Deep
Learning" (2019). Geifman, El-Yaniv, "Selective Classification for Deep Neural Networks" (2017).
"""

from __future__ import annotations

import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.entries import Array

__all__ = [
    *("accuracy", "brier", "cross_entropy", "ece", "reliability", "risk_coverage", "selective_risk", "set_coverage"),
]

_BINS = 15


def accuracy(probabilities: Array, labels: Array) -> Tensor:
    """Return the share of rows whose likeliest class is the label.

    >>> accuracy([[0.2, 0.8], [0.6, 0.4]], [1, 1])
    tensor(0.5000)
    """
    p, y = _checked(probabilities, labels)
    return (p.argmax(1) == y).to(p.dtype).mean()


def cross_entropy(probabilities: Array, labels: Array) -> Tensor:
    """Return the mean of `-log p_y`, in nats: the NLL of the labels.

    >>> cross_entropy([[0.5, 0.5]], [1])
    tensor(0.6931)
    """
    p, y = _checked(probabilities, labels)
    return -p.gather(1, y[:, None]).log().mean()


def brier(probabilities: Array, labels: Array) -> Tensor:
    """Return the mean over rows of the squared distance to the label's corner, from 0 to 2.

    >>> brier([[0.5, 0.5]], [1])
    tensor(0.5000)
    """
    p, y = _checked(probabilities, labels)
    return (p - torch.nn.functional.one_hot(y, p.shape[1]).to(p)).square().sum(1).mean()


def ece(probabilities: Array, labels: Array, *, bins: int = _BINS, mass: bool = False) -> Tensor:
    """Return the expected calibration error of the largest probability, in bins of equal width, or of equal mass.

    >>> ece([[0.2, 0.8], [0.2, 0.8]], [1, 0])
    tensor(0.3000)
    """
    confidence, share, count = reliability(probabilities, labels, bins=bins, mass=mass)
    return (count * (confidence - share).abs()).sum() / count.sum()


def reliability(
    probabilities: Array, labels: Array, *, bins: int = _BINS, mass: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, accuracy and number of rows of every bin that has any: a reliability diagram.

    >>> confidence, right, rows = reliability([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]], [0, 1, 1], bins=2)
    >>> rows
    tensor([3.])
    """
    p, y = _checked(probabilities, labels)
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ArgumentError(f"expected at least 1 bin; found {bins!r}.")
    sure, label = p.max(1)
    if mass:
        place = sure.argsort(stable=True).argsort() * bins // len(sure)
    else:
        place = (sure * bins).ceil().long().sub(1).clamp(0, bins - 1)  # (0, 1/b], (1/b, 2/b], ...
    count = torch.bincount(place, minlength=bins).to(sure)
    used = count > 0
    confidence, right = (torch.zeros_like(count).index_add_(0, place, part.to(sure)) for part in (sure, label == y))
    return confidence[used] / count[used], right[used] / count[used], count[used]


def risk_coverage(score: Array, wrong: Array) -> tuple[Tensor, Tensor]:
    """Return the share of rows kept, and their error rate, keeping rows of least `score` first; `(N,)` each.

    Rows of equal score count as their mean.

    >>> kept, risk = risk_coverage([0.1, 0.2, 0.9, 0.8], [False, False, True, False])
    >>> kept.tolist(), risk.tolist()
    ([0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.0, 0.25])
    """
    doubt, bad = (torch.as_tensor(part).detach().double().cpu() for part in (score, wrong))
    if doubt.dim() != 1 or doubt.shape != bad.shape or not len(doubt):
        raise DataError(f"expected two rows (N,) of one length; found {tuple(doubt.shape)} and {tuple(bad.shape)}.")
    _, group, counts = torch.unique(doubt, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, group, bad) / counts
    rows = torch.arange(1, len(doubt) + 1, dtype=torch.float64)
    return rows / len(doubt), mean.repeat_interleave(counts).cumsum(0) / rows


def selective_risk(score: Array, wrong: Array) -> Tensor:
    """Return the area under the risk-coverage curve: the mean error rate over all shares that are kept.

    >>> selective_risk([0.1, 0.9], [0, 1])
    tensor(0.2500, dtype=torch.float64)
    """
    return risk_coverage(score, wrong)[1].mean()


def set_coverage(members: Array, labels: Array) -> Tensor:
    """Return the share of rows whose set `(N, K)` of bools holds the label.

    >>> set_coverage([[True, False], [True, True]], [1, 1])
    tensor(0.5000)
    """
    inside, y = torch.as_tensor(members).bool(), torch.as_tensor(labels).long()
    if inside.dim() != 2 or y.dim() != 1 or len(inside) != len(y):
        raise DataError(f"expected sets (N, K) and labels (N,); found {tuple(inside.shape)} and {tuple(y.shape)}.")
    return inside.gather(1, y.to(inside.device)[:, None]).float().mean()


def _checked(probabilities: Array, labels: Array) -> tuple[Tensor, Tensor]:
    p, y = torch.as_tensor(probabilities).detach(), torch.as_tensor(labels).detach()
    if p.dim() != 2 or y.dim() != 1 or len(p) != len(y) or not len(p):
        raise DataError(
            f"expected probabilities (N, K) and labels (N,); found shapes {tuple(p.shape)} and {tuple(y.shape)}."
        )
    if y.is_floating_point() or int(y.min()) < 0 or int(y.max()) >= p.shape[1]:
        raise DataError(f"expected labels as whole numbers from 0 to {p.shape[1] - 1}; found others.")
    p = p if p.dtype == torch.float64 else p.float()
    if not bool(((p >= 0) & (p <= 1 + 1e-4)).all()) or not bool(((p.sum(1) - 1).abs() < 1e-2).all()):
        raise DataError("expected rows of probabilities that sum to 1; found others. Pass a softmax of logits.")
    return p, y.long().to(p.device)
