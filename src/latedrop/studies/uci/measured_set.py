"""One set of the UCI study: train every network, measure every rate and method, give back plain data for JSON.

Three trainings: a stack of (split, rate) networks with one hidden layer, rate 0 for injection and 15 embedded ones;
concrete dropout; and a stack of three hidden layers without dropout, where the rates of the sites can differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.studies.uci.concrete import Concrete, train_concrete
from latedrop.studies.uci.data import Parts, UciSet, parts
from latedrop.studies.uci.measures import Member, Predicted, first_order, mask_numbers, rate_measures, sampled
from latedrop.studies.uci.methods import (
    Network,
    Scores,
    conformal_scores,
    constant,
    laplace,
    learned,
    linear,
    network,
    table_of,
)
from latedrop.studies.uci.stacked import Plan, Stack, key, train

__all__ = ["PARTS", "RATES", "Settings", "measure", "work"]

Measures: TypeAlias = dict[str, dict[str, Tensor]]

RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
PARTS = ("train", "validation", "test")

_DEEP = (50, 50, 50)
_DEEP_RATES = RATES[::2]
# Of one row in one epoch, relative to one network: for the time left.
_COSTS = {"stack": len(RATES) + 1, "concrete": 3, "deep": 4}


@dataclass(frozen=True)
class Settings:
    """What a result depends on, besides the data.

    Attributes:
        splits: at most so many of each set; None: all that are published.
        draws: masks for the variance of one hidden layer; None: the exact variance.
        deep_draws: masks for injected dropout in the deep networks.
        epochs: share of the epochs of the paper.
        seed: of weights, order and masks.
    """

    splits: int | None = None
    draws: int | None = None
    deep_draws: int = 200
    epochs: float = 1.0
    seed: int = 0

    def plan(self, item: UciSet, hidden: tuple[int, ...], rates: tuple[float, ...]) -> Plan:
        """How networks are trained on a set."""
        epochs = max(2, round(item.epochs * self.epochs))
        return Plan(hidden, rates, item.learning_rate, item.batch, epochs)


def work(item: UciSet, settings: Settings) -> int:
    """How much `measure` will report to its `tick`."""
    splits = min(settings.splits or item.splits, item.splits)
    train_rows = round(0.9 * item.rows)
    rows = splits * (train_rows - train_rows // 5)
    return rows * settings.plan(item, (), ()).epochs * sum(_COSTS.values())


def measure(
    item: UciSet,
    table: npt.NDArray[np.float64],
    settings: Settings,
    device: torch.device,
    tick: Callable[[int], None] = lambda rows: None,
) -> dict[str, Any]:
    """Everything the study knows of a set."""
    cut = parts(item, table, settings.splits)
    x, y = (_tensors(part, device, torch.float32)["train"] for part in (cut.x, cut.y))
    seeds = [key("uci", settings.seed, item.name, split) for split in range(len(x))]
    seconds = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[name] = round(time.perf_counter() - start, 2)
        return result

    def counting(name: str) -> Callable[[int], None]:
        return lambda rows: tick(rows * _COSTS[name])

    plan = settings.plan(item, (item.hidden,), (0.0, *RATES))
    stack: Stack = timed("train_stack", lambda: train(x, y, plan, seeds, tick=counting("stack")))
    concrete: Concrete = timed("train_concrete", lambda: train_concrete(x, y, plan, seeds, tick=counting("concrete")))
    deep_plan = settings.plan(item, _DEEP, (0.0,))
    deep: Stack = timed("train_deep", lambda: train(x, y, deep_plan, seeds, tick=counting("deep")))
    data = _Data(cut, device, seeds, settings)
    shallow = timed("measure_rates", lambda: _by_rate(data, stack))
    methods = timed("measure_methods", lambda: _methods(data, stack, concrete, shallow))
    deeper = timed("measure_deep", lambda: _deep_methods(data, deep))
    return {
        "hyper_parameters": {
            "hidden": item.hidden,
            "learning_rate": item.learning_rate,
            "batch": item.batch,
            "epochs": plan.epochs,
        },
        "rows": {part: len(cut.y[part][0]) for part in PARTS},
        "rates": list(RATES),
        **{kind: _lists(found, len(x)) for kind, found in shallow.items()},
        "concrete": {"rate": _rounded(concrete.rate), "noise": _rounded(concrete.noise)},
        "methods": methods,
        "deep": {"hidden": list(_DEEP), "rates": list(_DEEP_RATES), **deeper},
        "seconds": seconds,
    }


class _Data:
    """The parts of every split as float64 tensors, and the unit of each split's target."""

    def __init__(self, cut: Parts, device: torch.device, seeds: list[int], settings: Settings) -> None:
        self.x, self.y = (_tensors(part, device, torch.float64) for part in (cut.x, cut.y))
        self.units = torch.tensor(cut.std, device=device)
        self.seeds, self.settings = seeds, settings

    @property
    def splits(self) -> range:
        return range(len(self.units))

    def network(self, stack: Stack, split: int, rate: int) -> Network:
        member = [(weight.double(), bias.double()) for weight, bias in stack.member(split, rate)]
        return network(
            member, {part: x[split] for part, x in self.x.items()}, {part: y[split] for part, y in self.y.items()}
        )

    def numbers(self, member: Member, split: int, draws: int | None) -> list[Tensor] | None:
        """What masks are cut from; None where nothing is drawn."""
        return None if draws is None else mask_numbers(member, draws, self.seeds[split])

    def predicted(self, part: str, means: list[Tensor], variances: list[Tensor]) -> Predicted:
        """Of lists with an entry for each (split, rate), in the target's own unit."""
        each = len(means) // len(self.units)
        units = self.units.repeat_interleave(each)[:, None]
        target = self.y[part].repeat_interleave(each, 0)
        return Predicted(torch.stack(means) * units, torch.stack(variances) * units**2, target * units)


def _by_rate(data: _Data, stack: Stack) -> dict[str, Measures]:
    """All measures of injected and embedded dropout, split by split and rate by rate."""
    found: dict[str, Measures] = {}
    for kind in ("injected", "embedded"):
        means: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        variances: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        for split in data.splits:
            members = [stack.member(split, index + 1 if kind == "embedded" else 0) for index in range(len(RATES))]
            numbers = data.numbers(members[0], split, data.settings.draws)
            for index, rate in enumerate(RATES):
                if kind == "embedded" or index == 0:
                    member = [(weight.double(), bias.double()) for weight, bias in members[index]]
                    exact = {part: first_order(member, data.x[part][split]) for part in PARTS}
                for part, (mean, by_site) in exact.items():
                    moments = mean, rate / (1 - rate) * by_site[:, 0]
                    if numbers is not None:
                        moments = sampled(member, data.x[part][split], rate, numbers)
                    means[part].append(moments[0])
                    variances[part].append(moments[1])
        found[kind] = rate_measures({part: data.predicted(part, means[part], variances[part]) for part in PARTS})
    return found


def _methods(
    data: _Data, stack: Stack, concrete: Concrete, by_rate: Mapping[str, Measures]
) -> dict[str, dict[str, list[float]]]:
    """Every method on the test rows, measure by measure and split by split."""
    found: dict[str, list[Scores]] = {}
    for split in data.splits:
        unit, net = float(data.units[split]), data.network(stack, split, 0)
        spread = {part: net.by_site[part][:, 0].clamp_min(1e-12).sqrt() for part in ("validation", "test")}
        own = data.network(concrete.stack, split, 0)
        rate, noise = float(concrete.rate[split]), float(concrete.noise[split])
        rows: dict[str, Scores] = {}
        for kind, measures in by_rate.items():
            rows |= {f"{kind}, {how}": row for how, row in _chosen(measures, split, len(RATES)).items()}
        rows["linear, floor"] = net.scored(linear(net, per_site=False), unit)
        for name, scaled in (("", False), (", scaled", True)):
            rows[f"concrete{name}"] = own.scored(learned(own, rate, noise, scaled=scaled), unit)
            rows[f"laplace{name}"] = net.scored(laplace(net, scaled=scaled), unit)
        rows["constant"] = net.scored(constant(net), unit)
        rows["conformal"] = conformal_scores(net, None, unit)
        rows["conformal, injected"] = conformal_scores(net, spread, unit)
        for name, row in rows.items():
            found.setdefault(name, []).append(row)
    return _columns(found)


def _deep_methods(data: _Data, stack: Stack) -> dict[str, Any]:
    found: dict[str, list[Scores]] = {}
    means: dict[str, list[Tensor]] = {"validation": [], "test": []}
    variances: dict[str, list[Tensor]] = {"validation": [], "test": []}
    for split in data.splits:
        unit, net = float(data.units[split]), data.network(stack, split, 0)
        member = stack.member(split, 0)
        numbers = data.numbers(member, split, data.settings.deep_draws)
        assert numbers is not None
        for part in means:
            x = data.x[part][split].float()
            for rate in _DEEP_RATES:
                mean, variance = sampled(member, x, rate, numbers)
                means[part].append(mean.double())
                variances[part].append(variance.double())
        rows = {
            "linear, floor": net.scored(linear(net, per_site=False), unit),
            "linear per site, floor": net.scored(linear(net, per_site=True), unit),
            "laplace": net.scored(laplace(net), unit),
            "laplace, scaled": net.scored(laplace(net, scaled=True), unit),
            "constant": net.scored(constant(net), unit),
        }
        for name, row in rows.items():
            found.setdefault(name, []).append(row)
    measures = rate_measures({part: data.predicted(part, means[part], variances[part]) for part in means})
    for split in data.splits:
        for how, row in _chosen(measures, split, len(_DEEP_RATES)).items():
            found.setdefault(f"injected, {how}", []).append(row)
    return {"methods": _columns(found)}


def _chosen(measures: Measures, split: int, rates: int) -> dict[str, Scores]:
    """The test measures at the rate that the validation rows choose, raw, scaled and relaxed.

    The first of equally good rates is taken: with exact variances all of them are, once scaled.
    """
    rows = {}
    for how, criterion in (("raw", "unscaled"), ("scaled", "scaled"), ("relaxed", "scaled")):
        kind = "unscaled" if how == "raw" else how
        curve = measures["validation"][f"nll_{criterion}"][split * rates : (split + 1) * rates]
        rate = int((curve <= curve.min() + 1e-9).nonzero()[0])
        test = {name: float(values[split * rates + rate]) for name, values in measures["test"].items()}
        rows[how] = {name: test[f"{name}_{kind}"] for name in ("nll", "ma", "crps", "coverage", "width")}
        rows[how] |= {"rmse": test["rmse"], "rate_index": float(rate)}
    return rows


def _columns(found: Mapping[str, list[Scores]]) -> dict[str, dict[str, list[float]]]:
    return {
        name: {
            measure: _rounded(torch.tensor(values, dtype=torch.float64)) for measure, values in table_of(rows).items()
        }
        for name, rows in found.items()
    }


def _lists(measures: Measures, splits: int) -> dict[str, dict[str, list[list[float]]]]:
    """By part and measure, a row for each rate with a number for each split."""
    return {
        part: {name: [_rounded(row) for row in values.view(splits, -1).T] for name, values in found.items()}
        for part, found in measures.items()
    }


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _tensors(
    arrays: Mapping[str, npt.NDArray[np.float64]], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    return {part: torch.tensor(array, dtype=dtype, device=device) for part, array in arrays.items()}
