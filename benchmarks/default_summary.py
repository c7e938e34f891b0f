"""Tables of `benchmarks.default`, and which of its aims hold, from the JSON alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.default_methods import METHODS

SHIFTS = ("above", "below")
GROUPS = {"in": ("in",), "ten": ("ten",), "shift": SHIFTS}
TITLES = {
    "in": "in distribution",
    "ten": "in distribution, ten validation rows",
    "shift": "shift (above and below a quantile of an input)",
}
MEASURES = ("nll", "gain", "crps", "coverage", "width", "ranking", "rmse", "auroc")


@dataclass(frozen=True)
class Aim:
    """What the default should reach.

    Attributes:
        text: in words.
        method: whose.
        least: the smallest value that is enough.
        value: from the record.
    """

    text: str
    method: str
    least: float
    value: Callable[[dict[str, Any], str], float]


def summary(record: dict[str, Any]) -> str:
    """All tables, then the aims."""
    parts = [table(record, group, measure) for group, measure in _shown()]
    parts += [medians(record, group) for group in GROUPS]
    return "\n\n".join([*parts, aims(record), *refusals(record)])


def by_set(record: dict[str, Any], method: str, group: str, measure: str) -> dict[str, np.ndarray]:
    """The measure of each set, one value for each seed in order; situations of a group are averaged."""
    found = {}
    for name, units in record["units"].items():
        values = []
        for seed in sorted(units, key=int):
            unit = units[seed]
            each = [unit["situations"].get(situation, {}).get(method, {}).get(measure) for situation in GROUPS[group]]
            known = [value for value in each if value is not None]
            if known:
                values.append(float(np.mean(known)))
        if values:
            found[name] = np.array(values)
    return found


def median(record: dict[str, Any], method: str, group: str, measure: str) -> tuple[float, float]:
    """The median over sets of the mean over seeds, and its standard error: from the medians of single seeds."""
    values = by_set(record, method, group, measure)
    if not values:
        return np.nan, np.nan
    seeds = min(map(len, values.values()))
    each = np.median([v[:seeds] for v in values.values()], 0)
    error = each.std(ddof=1) / np.sqrt(seeds) if seeds > 1 else np.nan
    return float(np.median([v.mean() for v in values.values()])), float(error)


def table(record: dict[str, Any], group: str, measure: str) -> str:
    """One row for each set, one column for each method: mean and standard error over seeds."""
    methods = _methods(record)
    values = {method: by_set(record, method, group, measure) for method in methods}
    lines = [
        f"{measure}, {TITLES[group]}",
        "",
        f"| set | {' | '.join(methods)} |",
        "| --- " + "| ---: " * len(methods) + "|",
    ]
    for name in record["units"]:
        cells = [_cell(values[method].get(name)) for method in methods]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def medians(record: dict[str, Any], group: str) -> str:
    """One row for each method: every measure's median over sets and its standard error."""
    shown = [measure for measure in MEASURES if measure != "auroc" or group == "shift"]
    lines = [f"median over sets, {TITLES[group]}", "", f"| method | {' | '.join(shown)} |"]
    lines.append("| --- " + "| ---: " * len(shown) + "|")
    for method in _methods(record):
        cells = ["{:.3f} ± {:.3f}".format(*median(record, method, group, measure)) for measure in shown]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def aims(record: dict[str, Any]) -> str:
    """Each aim with what was measured."""
    lines = ["aims"]
    for aim in AIMS:
        value = aim.value(record, aim.method) if aim.method in _methods(record) else np.nan
        word = "not measured" if np.isnan(value) else "holds" if value >= aim.least else "missed"
        lines.append(f"  {word:13s} {value:7.3f} (at least {aim.least:g})  {aim.method}: {aim.text}")
    return "\n".join(lines)


def aim_table(record: dict[str, Any]) -> str:
    """The same as a table of a page."""
    lines = ["| | aim | at least | measured | |", "| --- | --- | ---: | ---: | --- |"]
    for aim in AIMS:
        value = aim.value(record, aim.method)
        word = "holds" if value >= aim.least else "**missed**"
        lines.append(f"| {aim.method} | {aim.text} | {aim.least:g} | {value:.3f} | {word} |")
    return "\n".join(lines)


def refusals(record: dict[str, Any]) -> list[str]:
    """Where a method refused the data."""
    found = [
        f"  {name}, seed {seed}, {situation}, {method}: {measured['error']}"
        for name, units in record["units"].items()
        for seed, unit in units.items()
        for situation, methods in unit["situations"].items()
        for method, measured in methods.items()
        if "error" in measured
    ]
    return ["\n".join(["refused", *found])] if found else []


def _worst(group: str) -> Callable[[dict[str, Any], str], float]:
    def value(record: dict[str, Any], method: str) -> float:
        return float(min(v.mean() for v in by_set(record, method, group, "gain").values()))

    return value


def _mean(record: dict[str, Any], method: str) -> float:
    return float(np.mean([v.mean() for v in by_set(record, method, "shift", "coverage").values()]))


def _above_ensemble(record: dict[str, Any], method: str) -> float:
    return _mean(record, method) - _mean(record, "ensemble + floor")


def _median(group: str, measure: str) -> Callable[[dict[str, Any], str], float]:
    return lambda record, method: median(record, method, group, measure)[0]


AIMS = (
    Aim("gain over the constant in nats, worst set", "default", -0.02, _worst("in")),
    Aim("the same with ten validation rows", "default", -0.02, _worst("ten")),
    Aim("gain, median over sets", "default", 0.015, _median("in", "gain")),
    Aim("share that 90 % intervals hold under shift, mean over sets", "default", 0.82, _mean),
    Aim("gain, median over sets", "default + reference", 0.04, _median("in", "gain")),
    Aim("gain, worst set", "default + reference", -0.02, _worst("in")),
    Aim("the same with ten validation rows", "default + reference", -0.02, _worst("ten")),
    Aim("share that 90 % intervals hold under shift, mean over sets", "default + reference", 0.86, _mean),
    Aim("that share less the ensemble's", "default + reference", 0.0, _above_ensemble),
    Aim("AUROC of shifted rows, median over sets", "default + reference", 0.88, _median("shift", "auroc")),
)


def _shown() -> list[tuple[str, str]]:
    return [("in", "nll"), ("in", "gain"), ("ten", "gain"), ("shift", "coverage"), ("shift", "auroc")]


def _methods(record: dict[str, Any]) -> list[str]:
    units = [unit for by_seed in record["units"].values() for unit in by_seed.values()]
    return [method for method in METHODS if any(method in unit["methods"] for unit in units)]


def _cell(values: np.ndarray | None) -> str:
    if values is None:
        return "-"
    error = f" ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{values.mean():.3f}{error}"
