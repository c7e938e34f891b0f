"""Fit a temperature that depends on the row, and choose between candidates by cross-validation.

Let `r = log(novelty)`, where novelty is the leverage divided by its 95 % quantile over the reference rows. Then

    log T(x) = a + b · min(r, 0) + max(b, 1) · max(r, 0):

Inside the reference range (`r < 0`) the slope is fitted, with `b >= 0`; beyond it the slope is at least 1, as for the
guard of a regression. Every candidate with a guard keeps this part, because validation rows are rarely novel and cannot
show its benefit. If thinned networks are drawn, their softmax is averaged. `a` and `b` minimise the NLL of the labels
plus penalties of size `price / n`, which shrink them if there are few rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from latedrop.calibration.cross_validation import Candidate, CrossValidation, leading
from latedrop.calibration.guard import Guard
from latedrop.network.sites import Sites
from latedrop.records import Limits, record
from latedrop.terms import GradientLeverage, Leverage
from latedrop.terms.features import Features

__all__ = [
    *("ALONE", "Chosen", "ClassFit", "Measured", "chosen", "entropy", "fitted", "information", "log_temperatures"),
    *("logistic", "losses", "minimised", "prior", "starts"),
]

ALONE = "temperature alone"
_PRICE = 2.0
_FOLDS = 5
_FARTHEST = 60.0  # bound on |log T|: if all labels are right the best T is 0, and a search step may go anywhere
_LARGEST = 30.0  # upper bound on the log of the slope, for the same reason
_FAR = 3.0  # |log T| beyond which the penalty is constant, because cosine logits need an extreme T
_NEWTON_STEPS, _HALVES = 50, 20
_USUAL_SPREAD = 2.0  # typical standard deviation of the logits of a row


@dataclass(frozen=True)
class Measured:
    """Hold logits, labels and novelty of N validation rows, or of N pixels of validation images."""

    logits: Tensor  # (N, K), or (T, N, K) of T draws
    labels: Tensor  # class numbers, (N,)
    novelty: Tensor | None = None  # leverage divided by its limit, (N,), if there is a leverage
    image: Tensor | None = None  # index of the image of each pixel, (N,); None if rows are independent examples
    drawn: Mapping[float, Tensor] = field(default_factory=dict)  # logits of T draws, (T, N, K), by dropout rate
    sites: Sites = field(default_factory=Sites)
    features: Features | None = None  # that the leverage reads
    terms: tuple[GradientLeverage | Leverage, ...] = ()  # fitted, and their limits in `guard`
    guard: Guard | None = None
    reference_rows: int = 0  # 0 if the validation rows were used instead
    binary: bool = False  # whether the model has one logit for two classes

    @property
    def rows(self) -> int:
        """Return the number of validation rows, or of images."""
        return len(self.labels) if self.image is None else len(self.image.unique())

    def at(self, rows: Tensor) -> Measured:
        """Return logits, labels and novelty of the rows at an index."""
        novelty = None if self.novelty is None else self.novelty[rows]
        return Measured(self.logits[..., rows, :], self.labels[rows], novelty)

    @property
    def left_out(self) -> CrossValidation:
        """Return the folds for cross-validation; all pixels of an image are in the same fold."""
        return CrossValidation(groups=self.image, count=_FOLDS)


@record
@dataclass(frozen=True)
class ClassFit:
    """Turn logits into probabilities by a temperature that may depend on novelty.

    Attributes:
        temperature: temperature at novelty 1, or of all rows without a slope.
        slope: `b` in the equation above; None: one temperature for all rows.
    """

    temperature: Annotated[float, Limits(1e-30, 1e30)]
    slope: Annotated[float, Limits(0, 1e30)] | None = None

    def temperatures(self, novelty: Tensor | None, like: Tensor) -> Tensor:
        """Return temperatures `(N,)` for a novelty `(N,)`, with length, dtype and device of `like`, `(N, ...)`."""
        slope = None if self.slope is None else like.new_tensor(self.slope)
        return log_temperatures(novelty, like, like.new_tensor(self.temperature).log(), slope).exp()

    def log_probabilities(self, logits: Tensor, novelty: Tensor | None = None) -> Tensor:
        """Return log probabilities `(N, K)` of logits `(N, K)`, or of the mean softmax of draws `(T, N, K)`."""
        return _log_softmax(logits, self.temperatures(novelty, logits if logits.dim() == 2 else logits[0]))


def log_temperatures(novelty: Tensor | None, like: Tensor, log_t: Tensor, slope: Tensor | None) -> Tensor:
    """Compute log temperatures `(N,)` by the equation above; `like`, `(N, ...)`, gives dtype and device."""
    logs = log_t.expand(len(like))
    if slope is not None and novelty is not None:
        r = novelty.to(like).clamp_min(1e-12).log()
        logs = logs + slope * r.clamp_max(0) + slope.clamp_min(1) * r.clamp_min(0)
    return logs.clamp(-_FARTHEST, _FARTHEST)


def losses(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return minus the log probability of each label, `(N,)`."""
    return -log_probabilities.gather(1, labels[:, None])[:, 0]


def entropy(logs: Tensor) -> Tensor:
    """Return the entropy in nats, `(...,)`, of log probabilities `(..., K)`."""
    return 0 - (logs.exp() * logs.clamp_min(-1e30)).sum(-1)  # "0 -", because a unary minus gives -0.0 for a sure row


def information(logs: Tensor) -> Tensor:
    """Return entropy of the mean minus mean entropy, `(N,)`, of log probabilities of draws `(T, N, K)`."""
    mean = logs.logsumexp(0) - logs.new_full((), len(logs)).log()  # an ONNX file rounds plain numbers
    return (entropy(mean) - entropy(logs).mean(0)).clamp_min(0)


def fitted(rows: Measured, *, sloped: bool | None) -> ClassFit:
    """Fit temperature and slope to rows by maximum penalised likelihood.

    Args:
        rows: logits, labels and novelty.
        sloped: True: fit the slope below novelty 1; False: fix it to 0 there; None: one temperature for all rows.
    """
    rows = replace(rows, logits=rows.logits.double())
    like = rows.logits if rows.logits.dim() == 2 else rows.logits[0]

    def slope_of(parameters: Tensor) -> Tensor | None:
        if sloped is None:
            return None
        return parameters[1].clamp_max(_LARGEST).exp() if sloped else parameters.new_zeros(())

    def loss(parameters: Tensor) -> Tensor:
        slope = slope_of(parameters)
        temperature = log_temperatures(rows.novelty, like, parameters[0], slope).exp()
        cost = prior(parameters[0]) + (0 if slope is None else slope)
        logs = _log_softmax(rows.logits, temperature)
        return losses(logs, rows.labels).mean() + _PRICE / len(rows.labels) * cost

    tried = [minimised(loss, [log_t, -1.5]) for log_t in starts(rows.logits)]
    best = min(tried, key=lambda pair: pair[0])[1]
    slope = slope_of(best)
    return ClassFit(float(best[0].clamp(-_FARTHEST, _FARTHEST).exp()), None if slope is None else float(slope))


def starts(logits: Tensor) -> list[float]:
    """Return start values for log T: 0, and for logits of unusual size the value that rescales them."""
    other = math.log(max(float(logits.double().std(-1).mean()), 1e-30) / _USUAL_SPREAD)
    return [0.0, other] if abs(other) > _FAR else [0.0]


def prior(log_t: Tensor) -> Tensor:
    """Return the penalty on a log temperature, in units of `price / n`."""
    return log_t.square().clamp_max(_FAR**2) / 2


def minimised(loss: Callable[[Tensor], Tensor], start: Sequence[float]) -> tuple[float, Tensor]:
    """Minimise a loss of a few parameters by L-BFGS; return the smallest loss and the parameters."""
    parameters = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([parameters], max_iter=60, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimiser.zero_grad()
        value = loss(parameters)
        value.backward()
        return value

    optimiser.step(step)
    return float(step().detach()), parameters.detach()


def logistic(inputs: Tensor, labels: Tensor, ridge: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the coefficients `(P,)` of inputs `(N, P)` for labels `(N,)` of 0 and 1, by Newton's steps.

    Minimises `sum_i log(1 + exp(-s_i x_i' w)) + sum_j ridge_j (w_j - start_j)^2 / 2`, with `s = 1` for labels of 1 and
    `-1` for labels of 0. Steps that do not lower the loss are halved.

    >>> x = torch.tensor([[-1.0, 1.0], [1.0, 1.0]]).double()
    >>> bool(logistic(x, torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.1]))[0] > 0)
    True
    """
    ridge, labels = ridge.to(inputs), labels.to(inputs)
    start = inputs.new_zeros(inputs.shape[1]) if start is None else start.to(inputs)

    def cost(weights: Tensor) -> float:
        fit = binary_cross_entropy_with_logits(inputs @ weights, labels, reduction="sum")
        return float(fit + (ridge * (weights - start).square()).sum() / 2)

    weights, now = start, cost(start)
    for _ in range(_NEWTON_STEPS):
        p = torch.sigmoid(inputs @ weights)
        slope = inputs.T @ (p - labels) + ridge * (weights - start)
        curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + ridge.diag()
        step = torch.linalg.solve(curvature, slope)
        for _ in range(_HALVES):
            after = cost(weights - step)
            if after <= now:
                break
            step = step / 2
        if not after < now:
            break
        weights, last, now = weights - step, now, after
        if last - now <= 1e-12 * abs(last):
            break
    return weights


def _log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log probabilities `(N, K)` of logits `(N, K)`, or of the mean softmax of draws `(T, N, K)`."""
    each = torch.log_softmax(logits / temperature[:, None], -1)
    return each if logits.dim() == 2 else each.logsumexp(0) - math.log(len(each))


@dataclass(frozen=True)
class Chosen:
    """Hold the chosen candidate, and the baseline with one temperature for all rows."""

    name: str
    fit: ClassFit  # to all rows
    rate: float | None  # dropout rate of its draws; None: no draws
    candidates: tuple[Candidate, ...]  # that were compared, the simplest first
    left_out: Tensor  # cross-validated log probabilities of the candidate, (N, K)
    alone: Tensor  # the same of the baseline
    temperature: float  # of the baseline, fitted to all rows


def chosen(rows: Measured, *, guard: bool) -> Chosen:
    """Choose a candidate by cross-validation.

    With a guard, the default is the temperature that follows the leverage. Another candidate with a guard replaces it
    if it is better by more than one standard error and 0.001 nats. One temperature for all rows is used only without a
    guard.
    """
    tried: dict[str, tuple[Measured, bool | None]] = {ALONE: (rows, None)}
    guarded = rows.novelty is not None and guard
    home = "leverage" if guarded else ALONE
    if guarded:
        tried |= {"guard": (rows, False), "leverage": (rows, True)}
    rates = {f"leverage + draws at rate {r:g}" if guarded else f"draws at rate {r:g}": r for r in rows.drawn}
    tried |= {name: (replace(rows, logits=rows.drawn[rate]), tried[home][1]) for name, rate in rates.items()}
    left = rows.left_out
    logs = {name: rows.logits.new_empty(rows.logits.shape, dtype=torch.float64) for name in tried}
    for rest, out in left.splits(len(rows.labels)):
        for name, (measured, sloped) in tried.items():
            fit, others = fitted(measured.at(rest), sloped=sloped), measured.at(out)
            logs[name][out] = fit.log_probabilities(others.logits.double(), others.novelty)
    scores = {name: -losses(value, rows.labels) for name, value in logs.items()}
    name = leading(scores, home, left, [each for each in tried if each != ALONE or not guarded])
    listed = tuple(left.candidate(each, score - scores[ALONE]) for each, score in scores.items())
    fits = {each: fitted(tried[each][0], sloped=tried[each][1]) for each in (name, ALONE)}
    return Chosen(name, fits[name], rates.get(name), listed, logs[name], logs[ALONE], fits[ALONE].temperature)
