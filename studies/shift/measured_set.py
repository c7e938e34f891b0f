"""One set of the shift study: train the networks of all its cuts, measure every method, give plain data for JSON.

The cuts of a set are to the trainer what the splits of the UCI study are: all their networks are one stack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from latedrop.errors import DataError
from studies.shift.cuts import MOST_ROWS, Parts, Table, at_most, cuts, parts
from studies.shift.measures import shift_scores
from studies.shift.strangeness import leverage, neighbours
from studies.uci.comparison import Rows, least_variance, plain, predictions
from studies.uci.data import UciSet
from studies.uci.measures import Predicted
from studies.uci.networks import Networks, cost, train_all
from studies.uci.processing import processed
from studies.uci.stacked import Plan, key

__all__ = ["HIDDEN", "RATES", "Settings", "measure", "work"]

HIDDEN = (50, 50, 50)
RATES = (0.005, 0.02, 0.05, 0.1, 0.2)
"""Of embedded dropout; the validation rows choose."""
_MOST_STEPS = 20_000
_MEASURING = 0.25  # of the time of training, for the time left


@dataclass(frozen=True)
class Settings:
    """What a result depends on, besides the data.

    Attributes:
        rows: larger tables are reduced to so many.
        inputs: at most so many are cut, from the first on; None: all.
        epochs: share of the epochs.
        draws: masks for what is drawn.
        seed: of rows, weights, order and masks.
    """

    rows: int = MOST_ROWS
    inputs: int | None = None
    epochs: float = 1.0
    draws: int = 200
    seed: int = 0

    def plan(self, item: UciSet, rows: int) -> Plan:
        """How the networks of a cut with so many training rows are trained.

        Learning rate and batch are those of the UCI study, and there are as many steps as there, at most 20 000.
        """
        there = round(0.9 * item.rows)
        steps = min(_MOST_STEPS, item.epochs * math.ceil((there - there // 5) / item.batch))
        epochs = max(2, round(self.epochs * steps / math.ceil(rows / item.batch)))
        return Plan(HIDDEN, (0.0,), item.learning_rate, item.batch, epochs)


def work(item: UciSet, table: Table, settings: Settings) -> float:
    """How much `measure` will report to its `tick`."""
    found, _ = cuts(at_most(table, settings.rows, settings.seed), settings.seed, settings.inputs)
    if not found:
        return 0
    rows = len(found[0].train)
    return (1 + _MEASURING) * len(found) * rows * settings.plan(item, rows).epochs * cost(HIDDEN, RATES)


def measure(
    item: UciSet,
    table: Table,
    settings: Settings,
    device: torch.device,
    tick: Callable[[float], None] = lambda done: None,
) -> dict[str, Any]:
    """Everything the study knows of a set.

    Raises:
        DataError: no input can be cut.
    """
    table = at_most(table, settings.rows, settings.seed)
    found, left_out = cuts(table, settings.seed, settings.inputs)
    if not found:
        raise DataError(
            f"expected an input of {item.name} with at least 15 % of the rows beyond its 70 % or 30 % quantile; "
            "found none. Leave the set out."
        )
    held = parts(table, found)
    x, y = ({name: torch.tensor(rows, device=device) for name, rows in part.items()} for part in (held.x, held.y))
    seeds = [key("shift", settings.seed, item.name, cut.column, cut.direction) for cut in found]
    plan = settings.plan(item, x["train"].shape[1])
    seconds = {}
    start = time.perf_counter()
    networks = train_all(x["train"].float(), y["train"].float(), plan, seeds, RATES, tick=tick)
    seconds["train"] = round(time.perf_counter() - start, 2)
    start = time.perf_counter()
    methods = _scored(networks, Rows(x, y, torch.ones_like(y["train"][:, 0])), held, settings)
    tick(_MEASURING / (1 + _MEASURING) * work(item, table, settings))
    seconds["measure"] = round(time.perf_counter() - start, 2)
    return {
        "hyper_parameters": {
            "hidden": list(HIDDEN),
            "learning_rate": plan.learning_rate,
            "batch": plan.batch,
            "epochs": plan.epochs,
        },
        "rates": list(RATES),
        "rows": {name: rows.shape[1] for name, rows in y.items() if name != "shifted"},
        "cuts": [
            {"input": cut.column, "direction": cut.direction, "edge": cut.edge, "shifted": len(cut.shifted)}
            for cut in found
        ],
        "left_out": [{"input": one.column, "direction": one.direction, "reason": one.reason} for one in left_out],
        "methods": methods,
        "seconds": seconds,
    }


def _scored(networks: Networks, rows: Rows, held: Parts, settings: Settings) -> dict[str, dict[str, list[float]]]:
    """Every method's measures, cut by cut."""
    nets = plain(networks, rows)
    found = predictions(networks, nets, rows, settings.draws)
    for name, distance in (("leverage", leverage), ("neighbours", neighbours)):
        raw = rows.joined([distance(net) for net in nets])
        for how, treated in processed(raw, least_variance(nets, rows), ("scaled", "floor")).items():
            found[f"{name}, {how}"] = treated
    return {name: _columns(method, held.shifted) for name, method in found.items() if "relaxed" not in name}


def _columns(method: Mapping[str, Predicted], shifted: tuple[int, ...]) -> dict[str, list[float]]:
    rows = []
    for cut, count in enumerate(shifted):
        inside, beyond = (
            Predicted(*(values[None, cut, :most] for values in (part.mean, part.variance, part.target)))
            for part, most in ((method["inside"], None), (method["shifted"], count))
        )
        rows.append(shift_scores(beyond, inside))
    return {name: [float(f"{row[name]:.4g}") for row in rows] for name in rows[0]}
