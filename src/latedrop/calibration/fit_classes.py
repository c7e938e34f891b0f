"""The temperature of every row, and which candidate is worth it.

With `r = log(novelty)`, the novelty being leverage over what 95 % of the reference rows stay below, the temperature is

    log T(x) = a + b · min(r, 0) + max(b, 1) · max(r, 0):

inside their range it may grow with the novelty (`b >= 0`, fitted), beyond it grows in proportion, as the guard of a
regression does. No comparison of candidates drops that, as usual rows hardly show what it is worth. Of draws of thinned
networks the softmax is averaged. `a` and `b` minimise the NLL of the labels; what they cost, `price / n` each, shrinks
them where rows are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import Candidate, CrossValidation, leading
from latedrop.calibration.guard import Guard
from latedrop.network.sites import Sites
from latedrop.records import Limits, record
from latedrop.terms import GradientLeverage, Leverage
from latedrop.terms.features import Features

__all__ = [
    *("ALONE", "Chosen", "ClassFit", "Measured", "chosen", "entropy", "fitted", "information", "log_temperatures"),
    *("losses", "minimised", "prior", "starts"),
]

ALONE = "temperature alone"
_PRICE = 2.0
_FOLDS = 5
_FARTHEST = 60.0  # logs of temperatures: labels that are all right ask for 0, and a step of the search may go anywhere
_LARGEST = 30.0  # likewise, the log of a slope
_FAR = 3.0  # of the log of a temperature: beyond, as cosines need, it costs no more
_USUAL_SPREAD = 2.0  # of the logits of a row


@dataclass(frozen=True)
class Measured:
    """Validation rows, or pixels of validation images, with what tells novel rows.

    Attributes:
        logits: `(N, K)`, or of draws `(T, N, K)`.
        labels: `(N,)`.
        novelty: `(N,)`, leverage over its limit; None where nothing tells it.
        image: `(N,)`, which image each row is a pixel of; None where rows stand for themselves.
        drawn: logits of draws `(T, N, K)` by rate.
        sites: where dropout goes.
        features: which the leverage looks at; None where there are none.
        terms, guard: what tells novel rows, after they learned, and their limits.
        reference_rows: how many there were; 0 where the validation rows stood in.
        binary: whether the model has one logit for two classes.
    """

    logits: Tensor
    labels: Tensor
    novelty: Tensor | None = None
    image: Tensor | None = None
    drawn: Mapping[float, Tensor] = field(default_factory=dict)
    sites: Sites = field(default_factory=Sites)
    features: Features | None = None
    terms: tuple[GradientLeverage | Leverage, ...] = ()
    guard: Guard | None = None
    reference_rows: int = 0
    binary: bool = False

    @property
    def rows(self) -> int:
        """How many validation rows, or images, there are."""
        return len(self.labels) if self.image is None else len(self.image.unique())

    def at(self, rows: Tensor) -> Measured:
        """Some of the rows."""
        novelty = None if self.novelty is None else self.novelty[rows]
        return Measured(self.logits[..., rows, :], self.labels[rows], novelty)

    @property
    def left_out(self) -> CrossValidation:
        """Which rows are left out of a fit together: the pixels of an image are."""
        return CrossValidation(groups=self.image, count=_FOLDS)


@record
@dataclass(frozen=True)
class ClassFit:
    """From logits to probabilities.

    Attributes:
        temperature: of rows at a novelty of 1, or of all rows.
        slope: `b` above; None: one temperature for all rows.
    """

    temperature: Annotated[float, Limits(1e-30, 1e30)]
    slope: Annotated[float, Limits(0, 1e30)] | None = None

    def temperatures(self, novelty: Tensor | None, like: Tensor) -> Tensor:
        """`(N,)`, of rows of a novelty `(N,)`; `like` is `(N, ...)` of the dtype and device to have."""
        slope = None if self.slope is None else like.new_tensor(self.slope)
        return log_temperatures(novelty, like, like.new_tensor(self.temperature).log(), slope).exp()

    def log_probabilities(self, logits: Tensor, novelty: Tensor | None = None) -> Tensor:
        """`(N, K)` of logits `(N, K)`; of draws `(T, N, K)` those of their mean softmax."""
        return _log_softmax(logits, self.temperatures(novelty, logits if logits.dim() == 2 else logits[0]))


def log_temperatures(novelty: Tensor | None, like: Tensor, log_t: Tensor, slope: Tensor | None) -> Tensor:
    """`(N,)`, the equation above; `like` is `(N, ...)`."""
    logs = log_t.expand(len(like))
    if slope is not None and novelty is not None:
        r = novelty.to(like).clamp_min(1e-12).log()
        logs = logs + slope * r.clamp_max(0) + slope.clamp_min(1) * r.clamp_min(0)
    return logs.clamp(-_FARTHEST, _FARTHEST)


def losses(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """`(N,)`, minus the log probability of each label."""
    return -log_probabilities.gather(1, labels[:, None])[:, 0]


def entropy(logs: Tensor) -> Tensor:
    """`(...,)` in nats, of log probabilities `(..., K)`."""
    return 0 - (logs.exp() * logs.clamp_min(-1e30)).sum(-1)  # 0 of a sure row, where a minus alone gives -0.0


def information(logs: Tensor) -> Tensor:
    """Entropy of the mean minus mean entropy, `(N,)`, of log probabilities of draws `(T, N, K)`."""
    mean = logs.logsumexp(0) - math.log(len(logs))
    return (entropy(mean) - entropy(logs).mean(0)).clamp_min(0)


def fitted(rows: Measured, *, sloped: bool | None) -> ClassFit:
    """Fit to some rows.

    Args:
        rows: what to fit to.
        sloped: True: with a slope inside the usual range; False: a slope of 0 there; None: one temperature.
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
    """From which temperatures to search: 1, and that which gives logits of another size than usual the usual one."""
    other = math.log(max(float(logits.double().std(-1).mean()), 1e-30) / _USUAL_SPREAD)
    return [0.0, other] if abs(other) > _FAR else [0.0]


def prior(log_t: Tensor) -> Tensor:
    """Return the cost of a temperature, in units of `price / n`."""
    return log_t.square().clamp_max(_FAR**2) / 2


def minimised(loss: Callable[[Tensor], Tensor], start: Sequence[float]) -> tuple[float, Tensor]:
    """Return the least value of a function of a few numbers, and these, by L-BFGS."""
    parameters = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([parameters], max_iter=60, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimiser.zero_grad()
        value = loss(parameters)
        value.backward()
        return value

    optimiser.step(step)
    return float(step().detach()), parameters.detach()


def _log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log probabilities of rows `(N, K)`, or of the mean over draws `(T, N, K)`; `temperature` is `(N,)`."""
    each = torch.log_softmax(logits / temperature[:, None], -1)
    return each if logits.dim() == 2 else each.logsumexp(0) - math.log(len(each))


@dataclass(frozen=True)
class Chosen:
    """The candidate in use.

    Attributes:
        name: what it is made of.
        fit: to all rows.
        rate: of its draws; None: no dropout.
        candidates: all that were compared, the simplest first.
        left_out: `(N, K)`, log probabilities of the rows, each from a fit to other folds.
        alone: the same by one temperature for all rows.
        temperature: that one, fitted to all rows.
    """

    name: str
    fit: ClassFit
    rate: float | None
    candidates: tuple[Candidate, ...]
    left_out: Tensor
    alone: Tensor
    temperature: float


def chosen(rows: Measured, *, guard: bool) -> Chosen:
    """Compare candidates on rows that were left out of their fits.

    The one in use is the temperature that follows the leverage, unless another with a guard is better by more than a
    standard error and 0.001 nats. One temperature for all rows is in use only where there is no guard.
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
