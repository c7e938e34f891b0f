"""One set of the UCI study: train every network, measure every rate and method, give back plain data for JSON.

Two depths, with the same networks and methods: one hidden layer, as in the paper, where the variance is exact; and
three of 50, where it is sampled and the rates of the sites can differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from studies.uci.comparison import (
    Rows,
    best_rates,
    by_rate,
    conformal,
    least_variance,
    plain,
    predictions,
)
from studies.uci.data import UciSet, parts
from studies.uci.measures import Predicted, scores
from studies.uci.networks import Networks, cost, train_all
from studies.uci.processing import Measure, lifted, rate_measures, surface
from studies.uci.stacked import Plan, key

__all__ = ["DEEP", "DEEP_RATES", "PARTS", "RATES", "Settings", "measure", "work"]

RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
PARTS = ("train", "validation", "test")
DEEP = (50, 50, 50)
DEEP_RATES = RATES[::2]

_SCALES = 41
_JUDGED = ("validation", "test")


@dataclass(frozen=True)
class Settings:
    """What a result depends on, besides the data.

    Attributes:
        splits: at most so many of each set; None: all that are published.
        draws: masks for the variance of one hidden layer; None: the exact variance.
        deep_draws: masks for dropout in the deep networks.
        epochs: share of the epochs of the paper.
        seed: of weights, order and masks.
    """

    splits: int | None = None
    draws: int | None = None
    deep_draws: int = 200
    epochs: float = 1.0
    seed: int = 0

    def plan(self, item: UciSet, hidden: tuple[int, ...]) -> Plan:
        """How networks are trained on a set."""
        epochs = max(2, round(item.epochs * self.epochs))
        return Plan(hidden, (0.0,), item.learning_rate, item.batch, epochs)


def work(item: UciSet, settings: Settings) -> float:
    """How much `measure` will report to its `tick`."""
    splits = min(settings.splits or item.splits, item.splits)
    train_rows = round(0.9 * item.rows)
    rows = splits * (train_rows - train_rows // 5)
    each = cost((item.hidden,), RATES) + cost(DEEP, DEEP_RATES)
    return rows * settings.plan(item, ()).epochs * each


def measure(
    item: UciSet,
    table: npt.NDArray[np.float64],
    settings: Settings,
    device: torch.device,
    tick: Callable[[float], None] = lambda done: None,
) -> dict[str, Any]:
    """Everything the study knows of a set."""
    cut = parts(item, table, settings.splits)
    x, y = ({part: torch.tensor(rows, device=device) for part, rows in found.items()} for found in (cut.x, cut.y))
    rows = Rows(x, y, torch.tensor(cut.std, device=device))
    seeds = [key("uci", settings.seed, item.name, split) for split in rows.splits]
    seconds: dict[str, float] = {}
    found = {}
    for name, hidden, rates in (("shallow", (item.hidden,), RATES), ("deep", DEEP, DEEP_RATES)):
        timed = _timed(seconds, name, device)
        plan = settings.plan(item, hidden)
        networks = train_all(x["train"].float(), y["train"].float(), plan, seeds, rates, tick=tick, timed=timed)
        draws = settings.deep_draws if name == "deep" else settings.draws
        kept = _JUDGED if name == "deep" else PARTS
        found[name] = _depth(networks, rows, rates, draws, kept, timed)
    hyper = {"hidden": item.hidden, "learning_rate": item.learning_rate, "batch": item.batch, "epochs": plan.epochs}
    sites = found["shallow"]["concrete"]["rate"]
    found["shallow"]["concrete"]["rate"] = sites[0]
    del found["deep"]["surface"]
    return {
        "hyper_parameters": hyper,
        "rows": {part: len(cut.y[part][0]) for part in PARTS},
        "rates": list(RATES),
        **found["shallow"],
        "deep": {"hidden": list(DEEP), "rates": list(DEEP_RATES), **found["deep"]},
        "seconds": seconds,
    }


def _depth(
    networks: Networks,
    rows: Rows,
    rates: Sequence[float],
    draws: int | None,
    kept: Sequence[str],
    timed: Callable[[str, Callable[[], Any]], Any],
) -> dict[str, Any]:
    """The records of every rate and the measures of every method, of networks of one depth."""
    nets = plain(networks, rows)
    each = least_variance(nets, rows).repeat_interleave(len(rates))
    raw = timed("draw rates", lambda: by_rate(networks, nets, rows, rates, draws, kept))
    records = timed("measure rates", lambda: {kind: rate_measures(found, each) for kind, found in raw.items()})
    dropped = {kind: (raw[kind], records[kind]["validation"]) for kind in raw}
    found = timed("methods", lambda: predictions(networks, nets, rows, draws, dropped=dropped))
    methods = {name: _columns(scores(parts["test"])) for name, parts in found.items()}
    for kind, record in records.items():
        for how, index in best_rates(record["validation"], len(rates)).items():
            methods[f"{kind}, {how}"]["rate_index"] = index.tolist()
    for name, each_split in conformal(nets, rows).items():
        methods[name] = {measure: [_short(row[measure]) for row in each_split] for measure in each_split[0]}
    return {
        **{kind: _lists(record, len(rows.splits)) for kind, record in records.items()},
        "concrete": {
            "rate": [_rounded(site) for site in networks.concrete.rate.T],
            "noise": _rounded(networks.concrete.noise),
        },
        "surface": _surface(raw, rates),
        "methods": methods,
    }


def _surface(raw: Mapping[str, Measure], rates: Sequence[float]) -> dict[str, Any]:
    """The NLL on the validation rows of the first split over rate and scale; scales reach beyond every rate's best."""
    held = {}
    for kind, measure in raw.items():
        part = lifted(measure)["validation"]
        held[kind] = Predicted(*(values[: len(rates)] for values in (part.mean, part.variance, part.target)))
    best = torch.cat([((p.target - p.mean).square() / p.variance).mean(1) for p in held.values()]).log10()
    low, high = float(best.min()) - 0.5, float(best.max()) + 0.5
    scales = torch.logspace(low, high, _SCALES, dtype=torch.float64)
    found = {kind: [_rounded(row) for row in surface(part, scales.to(part.mean))] for kind, part in held.items()}
    return {"rates": list(rates), "scales": _rounded(scales), **found}


def _timed(seconds: dict[str, float], depth: str, device: torch.device) -> Callable[[str, Callable[[], Any]], Any]:
    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[f"{depth}: {name}"] = round(time.perf_counter() - start, 2)
        return result

    return timed


def _columns(found: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: _rounded(values) for name, values in found.items()}


def _lists(record: Mapping[str, Mapping[str, Tensor]], splits: int) -> dict[str, dict[str, list[list[float]]]]:
    """By part and measure, a row for each rate with a number for each split; one ranking, that of the raw variance."""
    return {
        part: {
            name: [_rounded(row) for row in values.view(splits, -1).T]
            for name, values in found.items()
            if not name.startswith("ranking_")
        }
        for part, found in record.items()
    }


def _rounded(values: Tensor) -> list[float]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
