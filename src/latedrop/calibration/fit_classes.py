"""The temperature of every row, and which candidate is worth it.

With `r = log(novelty)`, the novelty being leverage over what 95 % of the reference rows stay below, the temperature is

    log T(x) = a + b · min(r, 0) + max(b, 1) · max(r, 0):

inside their range it may grow with the novelty (`b >= 0`, fitted), beyond it grows in proportion, as the guard of a
regression does. No comparison of candidates drops that, as usual rows hardly show what it is worth. Dropout adds the
spread of the logits (`softmax`). `a`, `b` and the sites' odds minimise the NLL of the labels; what they cost,
`price / n` each, shrinks them where rows are few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import Candidate, CrossValidation, leading
from latedrop.calibration.softmax import log_mean_softmax
from latedrop.records import Limits, record

__all__ = ["ALONE", "Chosen", "ClassFit", "Measured", "chosen", "fitted", "losses"]

ALONE = "temperature alone"
_PRICE = 2.0
_FOLDS = 5
_STARTS = (-2.0, 1.0)  # of the log of a site's odds
_FARTHEST = 60.0  # logs of temperatures: labels that are all right ask for 0, and a step of the search may go anywhere
_LARGEST = 30.0  # likewise, logs of slopes and odds
_FAR = 3.0  # of the log of a temperature: beyond, as cosines need, it costs no more
_USUAL_SPREAD = 2.0  # of the logits of a row


@dataclass(frozen=True)
class Measured:
    """What a fit looks at of some validation rows.

    Attributes:
        logits: `(N, K)`, or of draws `(T, N, K)`.
        labels: `(N,)`.
        novelty: `(N,)`, leverage over its limit; None where nothing tells it.
        spread: `(N, sites, K, K)`, variances of the logits' differences; None where they were not measured.
        image: `(N,)`, which image each row is a pixel of; None where rows stand for themselves.
    """

    logits: Tensor
    labels: Tensor
    novelty: Tensor | None = None
    spread: Tensor | None = None
    image: Tensor | None = None

    def at(self, rows: Tensor) -> Measured:
        """Some of the rows."""
        rest = (None if part is None else part[rows] for part in (self.novelty, self.spread, self.image))
        return Measured(self.logits[..., rows, :], self.labels[rows], *rest)

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
        odds: one per site; empty: no dropout.
    """

    temperature: Annotated[float, Limits(1e-30, 1e30)]
    slope: Annotated[float, Limits(0, 1e30)] | None = None
    odds: tuple[Annotated[float, Limits(0, 1e60)], ...] = ()

    def temperatures(self, logits: Tensor, novelty: Tensor | None) -> Tensor:
        """`(N,)`."""
        log_t = logits.new_tensor(self.temperature).log()
        slope = None if self.slope is None else logits.new_tensor(self.slope)
        return _log_temperatures(logits, novelty, log_t, slope).exp()

    def log_probabilities(self, logits: Tensor, novelty: Tensor | None, spread: Tensor | None) -> Tensor:
        """`(N, K)`; the arguments are those of `Measured`."""
        log_t = logits.new_tensor(self.temperature).log()
        slope = None if self.slope is None else logits.new_tensor(self.slope)
        odds = logits.new_tensor(self.odds) if self.odds else None
        return _log_probabilities(Measured(logits, logits, novelty, spread), log_t, slope, odds)


def _log_temperatures(logits: Tensor, novelty: Tensor | None, log_t: Tensor, slope: Tensor | None) -> Tensor:
    logs = log_t.expand(logits.shape[-2])
    if slope is None or novelty is None:
        return logs.clamp(-_FARTHEST, _FARTHEST)
    r = novelty.to(logits).clamp_min(1e-12).log()
    logs = logs + slope * r.clamp_max(0) + slope.clamp_min(1) * r.clamp_min(0)
    return logs.clamp(-_FARTHEST, _FARTHEST)


def _log_probabilities(rows: Measured, log_t: Tensor, slope: Tensor | None, odds: Tensor | None) -> Tensor:
    temperature = _log_temperatures(rows.logits, rows.novelty, log_t, slope).exp()
    if rows.logits.dim() == 3:
        each = torch.log_softmax(rows.logits / temperature[:, None], 2)
        return each.logsumexp(0) - math.log(len(each))
    spread = None
    if odds is not None and rows.spread is not None:
        spread = torch.einsum("s,nskj->nkj", odds.expand(rows.spread.shape[1]), rows.spread.to(rows.logits))
    return log_mean_softmax(rows.logits, spread, temperature)


def losses(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """`(N,)`, minus the log probability of each label."""
    return -log_probabilities.gather(1, labels[:, None])[:, 0]


def fitted(rows: Measured, *, sloped: bool | None, groups: Sequence[Sequence[int]] = ()) -> ClassFit:
    """Fit to some rows.

    Args:
        rows: what to fit to.
        sloped: True: with a slope inside the usual range; False: a slope of 0 there; None: one temperature.
        groups: sites that share their odds; empty: no dropout.
    """
    starts = [(log_t, start) for log_t in _log_starts(rows.logits) for start in (_STARTS if groups else (0.0,))]
    tried = [_descended(rows, sloped, groups, *start) for start in starts]
    return min(tried, key=lambda found: found[0])[1]


def _log_starts(logits: Tensor) -> list[float]:
    """From which temperatures to search: 1, and that which gives logits of another size than usual the usual one."""
    other = math.log(max(float(logits.double().std(-1).mean()), 1e-30) / _USUAL_SPREAD)
    return [0.0, other] if abs(other) > _FAR else [0.0]


def _cost(log_t: Tensor) -> Tensor:
    return log_t.square().clamp_max(_FAR**2) / 2


def _descended(
    rows: Measured, sloped: bool | None, groups: Sequence[Sequence[int]], log_start: float, start: float
) -> tuple[float, ClassFit]:
    rows = replace(rows, logits=rows.logits.double())
    n, like = len(rows.labels), rows.logits
    sites = 0 if rows.spread is None else rows.spread.shape[1]
    units, member = like.new_ones(sites), like.new_zeros(sites, len(groups))
    for i, group in enumerate(groups):
        assert rows.spread is not None
        units[list(group)] = 1 / rows.spread[:, list(group)].sum(1).mean().clamp_min(1e-30).double()
        member[list(group), i] = 1
    parameters = like.new_tensor([log_start, -1.5, *[start] * len(groups)]).requires_grad_(True)
    optimiser = torch.optim.LBFGS([parameters], max_iter=60, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def parts() -> tuple[Tensor, Tensor | None, Tensor | None]:
        grown = parameters[1:].clamp_max(_LARGEST).exp()
        slope = None if sloped is None else grown[0] if sloped else like.new_zeros(())
        return parameters[0], slope, member @ grown[1:] * units if groups else None

    def loss() -> Tensor:
        optimiser.zero_grad()
        log_t, slope, odds = parts()
        cost = _cost(log_t) + (slope if slope is not None else 0)
        cost = cost + parameters[2:].clamp_max(_LARGEST).exp().sum()
        value = losses(_log_probabilities(rows, log_t, slope, odds), rows.labels).mean() + _PRICE / n * cost
        value.backward()
        return value

    optimiser.step(loss)
    value = float(loss().detach())
    log_t, slope, odds = parts()
    fit = ClassFit(
        float(log_t.detach().clamp(-_FARTHEST, _FARTHEST).exp()),
        None if slope is None else float(slope.detach()),
        () if odds is None else tuple(odds.detach().tolist()),
    )
    return value, fit


@dataclass(frozen=True)
class Chosen:
    """The candidate in use.

    Attributes:
        name: what it is made of.
        fit: to all rows.
        rate: of its draws; None: to first order, or no dropout.
        candidates: all that were compared, the simplest first.
        held: `(N, K)`, log probabilities of the rows, each from a fit to other folds.
        alone: the same by one temperature for all rows.
        temperature: that one, fitted to all rows.
    """

    name: str
    fit: ClassFit
    rate: float | None
    candidates: tuple[Candidate, ...]
    held: Tensor
    alone: Tensor
    temperature: float


@dataclass(frozen=True)
class _Tried:
    rows: Measured
    sloped: bool | None
    groups: tuple[tuple[int, ...], ...] = ()
    rate: float | None = None

    def fitted(self, rows: Measured) -> ClassFit:
        return fitted(rows, sloped=self.sloped, groups=self.groups)


def chosen(rows: Measured, drawn: Mapping[float, Tensor], *, guard: bool) -> Chosen:
    """Compare candidates on rows that were left out of their fits.

    The one in use is the temperature that follows the leverage, unless another with a guard is better by more than a
    standard error and 0.001 nats. One temperature for all rows is in use only where there is no guard. `drawn` has the
    logits of draws `(T, N, K)` by rate.
    """
    tried, home = _candidates(rows, drawn, guard)
    left = rows.left_out
    held = {name: rows.logits.new_empty(rows.logits.shape, dtype=torch.float64) for name in tried}
    for rest, out in left.splits(len(rows.labels)):
        for name, candidate in tried.items():
            fit, apart = candidate.fitted(candidate.rows.at(rest)), candidate.rows.at(out)
            held[name][out] = fit.log_probabilities(apart.logits.double(), apart.novelty, apart.spread)
    scores = {name: -losses(value, rows.labels) for name, value in held.items()}
    name = leading(scores, home, left, _guarded(tried))
    listed = tuple(left.candidate(each, score - scores[ALONE]) for each, score in scores.items())
    fit = tried[name].fitted(tried[name].rows)
    one = tried[ALONE].fitted(tried[ALONE].rows).temperature
    return Chosen(name, fit, tried[name].rate, listed, held[name], held[ALONE], one)


def _candidates(rows: Measured, drawn: Mapping[float, Tensor], guard: bool) -> tuple[dict[str, _Tried], str]:
    """By name, the simplest first; and which is in use unless another is better."""
    plain = replace(rows, spread=None)
    tried, home = {ALONE: _Tried(plain, None)}, ALONE
    if rows.novelty is not None and guard:
        tried |= {"guard": _Tried(plain, False), "leverage": _Tried(plain, True)}
        home = "leverage"
    before, sloped = "" if home == ALONE else f"{home} + ", tried[home].sloped
    if rows.spread is not None:
        sites = tuple(range(rows.spread.shape[1]))
        tried[f"{before}dropout"] = _Tried(rows, sloped, (sites,))
        if len(sites) > 1:
            tried[f"{before}dropout, each site apart"] = _Tried(rows, sloped, tuple((site,) for site in sites))
    for rate, logits in drawn.items():
        tried[f"{before}draws at rate {rate:g}"] = _Tried(replace(plain, logits=logits), sloped, rate=rate)
    return tried, home


def _guarded(tried: Mapping[str, _Tried]) -> list[str]:
    """Candidates with a guard; all of them where none has one."""
    return [name for name, each in tried.items() if each.sloped is not None] or list(tried)
