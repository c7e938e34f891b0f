"""What `benchmarks.instead` compares without other libraries: constants, latedrop, ensembles, single columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import latedrop
from benchmarks.instead_case import Case, Predicted, Rule, output
from latedrop import find_sites
from latedrop.calibration.cross_validation import CrossValidation
from latedrop.calibration.fitted_terms import Block, fit_terms
from latedrop.calibration.scale import fit_floor
from latedrop.metrics.tails import Tail, fit_tail
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import Features, folded
from latedrop.terms.forest import LEAST_ROWS, grow

__all__ = ["COLUMNS", "METHODS", "constant"]

Method = Callable[[Case], Rule]
_SKETCH = 256


def constant(case: Case) -> Rule:
    """The mean squared validation error for every row."""
    level = case.error.square().mean()
    return lambda x: Predicted(mean := output(case.net, x), level.expand_as(mean))


def constant_tail(case: Case) -> Rule:
    """The same with a Student t."""
    level = case.error.square().mean()
    tail = fit_tail(case.error / level.sqrt())
    return lambda x: Predicted(mean := output(case.net, x), level.expand_as(mean), tail)


def _calibrated(case: Case, **options: Any) -> Rule:
    predictor = latedrop.calibrate(case.net, case.pair, progress=False, **options)
    tail = Tail.unit(predictor.calibration.degrees)

    def rule(x: Tensor) -> Predicted:
        found = predictor.predict(x)
        return Predicted(found.mean[:, 0].double(), found.variance[:, 0].double(), tail)

    return rule


def paper(case: Case) -> Rule:
    """Draws at the rate with the best scaled likelihood, times the scale: no floor."""
    return _calibrated(case, method="sample")


def default(case: Case, *, reference: bool = True, **options: Any) -> Rule:
    """What `latedrop.calibrate` does by itself, with training inputs as reference rows or without."""
    return _calibrated(case, reference=case.x_train if reference else None, method=latedrop.Terms(**options))


def ensemble(case: Case, *, tail: bool = False, forest: bool = False) -> Rule:
    """Five networks with their own mean: `scale · variance + floor`, perhaps with a forest; Gaussian or with a t."""

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.stack([output(net, x) for net in case.nets])
        return outputs.mean(0)[:, None], outputs.var(0)[:, None]

    def inputs(x: Tensor, mean: Tensor, raw: Tensor) -> Any:
        looked = torch.from_numpy(case.table(x))
        return torch.cat([looked, mean, raw.clamp_min(1e-30).log()], 1).float().numpy()

    mean, raw = moments(case.x_val)
    error = case.y_val[:, None] - mean
    trees = None
    if forest and len(error) >= LEAST_ROWS:
        size = error.square().mean()
        trees, found = grow(inputs(case.x_val, mean, raw), (error.square() / size).numpy())
        columns = torch.stack([raw, size * torch.from_numpy(found)], 2)
        blocks = [Block([0], 0.5), Block([1], 2 / 3)]
        fit = fit_terms(error, columns, blocks)
        variance = torch.empty_like(error)
        for rest, out in CrossValidation().splits(len(error)):
            part = fit_terms(error[rest], columns[rest], blocks, columns.mean(0))
            variance[out] = part.variance(columns[out])
    else:
        scale, floor = (float(value) for value in fit_floor(mean[:, 0], raw[:, 0], case.y_val))
        variance = scale * raw + floor
    judged = fit_tail(error / variance.sqrt()) if tail else Tail()

    def rule(x: Tensor) -> Predicted:
        mean, raw = moments(x)
        if trees is None:
            return Predicted(mean[:, 0], (scale * raw + floor)[:, 0], judged)
        learned = size * trees.sums(torch.from_numpy(inputs(x, mean, raw)))
        return Predicted(mean[:, 0], fit.variance(torch.stack([raw, learned], 2))[:, 0], judged)

    return rule


def alone(case: Case, kind: str) -> Rule:
    """`max(1, column / q) · (scale · column + floor)` with a Student t, the mean of the one network; see `COLUMNS`.

    q is the 99 % quantile of the column over the validation rows.
    """
    if kind not in case.kept:
        case.kept[kind] = _COLUMNS[kind](case)
    column: Callable[[Tensor], Tensor] = case.kept[kind]
    mean, raw = output(case.net, case.x_val), column(case.x_val)
    scale, floor = (float(value) for value in fit_floor(mean, raw, case.y_val))
    limit = raw.quantile(0.99)

    def variance(raw: Tensor) -> Tensor:
        return (raw / limit).clamp_min(1) * (scale * raw + floor)

    tail = fit_tail((case.y_val - mean) / (scale * raw + floor).sqrt())
    return lambda x: Predicted(output(case.net, x), variance(column(x)), tail)


def _features(case: Case) -> Callable[[Tensor], Tensor]:
    return _leverage(case, Leverage(), lambda rows: rows.features)


def _gradients(case: Case) -> Callable[[Tensor], Tensor]:
    return _leverage(case, GradientLeverage(), lambda rows: rows.gradients)


def _leverage(case: Case, term: Any, look: Callable[[BatchContext], Tensor]) -> Callable[[Tensor], Tensor]:
    network = Network(case.net)
    sites = Sites(find_sites(case.net, case.x_train[:64]))
    known = Features.all(sites)

    def rows(x: Tensor) -> BatchContext:
        return BatchContext(network, x, sites, None, known, gradients=True)

    learned = term.learned_from([look(rows(part)) for part in case.x_train.split(512)], own=False)
    return lambda x: torch.cat([learned.values(rows(part)).reshape(len(part)).double() for part in x.split(512)])


def _all_weights(case: Case) -> Callable[[Tensor], Tensor]:
    """Leverage of the gradient by every weight, in a sketch of 256 numbers."""
    weights = {name: value.detach() for name, value in case.net.named_parameters()}

    def of(row: Tensor) -> Any:
        return grad(lambda values: functional_call(case.net, values, (row[None],))[0, 0])(weights)

    def sketch(x: Tensor) -> Tensor:
        parts = [torch.cat([g.flatten(1) for g in vmap(of)(part).values()], 1) for part in x.split(64)]
        return torch.cat([folded(part, _SKETCH) for part in parts])[:, None]

    class Sketched:
        index = None

        def __init__(self, x: Tensor) -> None:
            self.gradients, self.mean = sketch(x), output(case.net, x)[:, None]

    learned = GradientLeverage().learned_from([sketch(case.x_train)], own=False)
    return lambda x: learned.values(Sketched(x)).reshape(len(x)).double()  # type: ignore[arg-type]


def _members(case: Case) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([output(net, x) for net in case.nets]).var(0)


_COLUMNS: dict[str, Callable[[Case], Callable[[Tensor], Tensor]]] = {
    "leverage of features": _features,
    "leverage of mask gradients": _gradients,
    "leverage of all weights": _all_weights,
    "variance of five networks": _members,
}
COLUMNS: dict[str, Method] = {f"{name} alone": partial(alone, kind=name) for name in _COLUMNS}
"""One column, a floor and a guard on that column, with the mean of the one network."""

METHODS: dict[str, Method] = {
    "constant": constant,
    "constant + t": constant_tail,
    "paper": paper,
    "latedrop": default,
    "latedrop, no reference": partial(default, reference=False),
    "latedrop, no forest": partial(default, terms=["dropout", "leverage", "gradients"]),
    "latedrop, corrected mean": partial(default, mean="corrected"),
    **COLUMNS,
    "ensemble": ensemble,
    "ensemble + t": partial(ensemble, tail=True),
    "ensemble + forest + t": partial(ensemble, tail=True, forest=True),
}
