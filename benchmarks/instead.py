"""One network with its validation rows, beside what one would use instead.

    python -m benchmarks.instead                   # all sets; measures what the JSON lacks
    python -m benchmarks.instead --half chosen     # the sets on which choices were made; --half apart, --half others

A unit is one set and one seed: five networks are trained for each situation (`instead_sets`), every method
(`instead_methods`) is fitted to some validation rows and judged on test rows, in standardised units of the target. A
finished unit is written at once, and a run that was stopped continues. `benchmarks/NOTES.md` says who looked at what.
"""

import argparse
import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import instead_sets
from benchmarks.instead_methods import BELOW_60_ROWS, METHODS, PACKAGES, PEERS, Rule, at_least, measures, suits
from benchmarks.instead_sets import APART, CHOSEN_ON, MEMBERS, MOST_ROWS, OTHERS, STEPS
from benchmarks.nets import HIDDEN
from benchmarks.peers import versions_of
from benchmarks.timing import first_line, machine, markdown_table, stored, write

HALVES = {"chosen": CHOSEN_ON, "apart": APART, "others": tuple(OTHERS)}
ALL = {**METHODS, **PEERS}


def unit(name: str, seed: int, situations: dict[str, Any]) -> dict[str, Any]:
    """Measure every method that is not in `situations` yet: `{situation: {size: {method: measures}}}`."""
    torch.set_num_threads(1)
    rules, case = {}, None
    for situation in instead_sets.situations(name, seed):
        if situation.case is not case:  # images and texts have one for all situations
            case, rules = situation.case, {}
        part = situations.setdefault(situation.name, {}).setdefault(situation.size, {})
        for method in ALL:
            if method not in part and suits(method, case):
                part[method] = _measured(method, situation, rules)
    return situations


def _measured(method: str, situation: instead_sets.Situation, rules: dict[str, tuple[Rule, float]]) -> dict[str, Any]:
    begin, case = time.perf_counter(), situation.case
    try:
        if method not in rules:
            rules[method] = ALL[method](case), time.perf_counter() - begin
        rule, seconds = rules[method]
        begin = time.perf_counter()
        predicted = at_least(rule(situation.test[0]), case)
        seconds = round(seconds + time.perf_counter() - begin, 3)
        inside = None if situation.inside is None else at_least(rule(situation.inside), case)
        return {**measures(predicted, situation.test[1], inside), "seconds": seconds}
    except Exception as error:  # of any library: the others are measured all the same
        return {"error": first_line(error)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.instead", description="One network beside five.")
    parser.add_argument("--half", choices=HALVES, nargs="+", default=list(HALVES))
    parser.add_argument("--seeds", type=int, default=4, help="splits and networks for each set")
    parser.add_argument("--only", help="the name of one set")
    options = parser.parse_args(arguments)
    settings = {"hidden": HIDDEN, "members": MEMBERS, "steps": STEPS, "most_rows": MOST_ROWS, "halves": HALVES}
    about = {"machine": {**machine(torch.device("cpu")), **versions_of(PACKAGES)}, "settings": settings, "units": {}}
    record = stored("instead") or about
    names = [name for half in options.half for name in HALVES[half]]
    units = [(name, seed) for seed in range(options.seeds) for name in names if options.only in (None, name)]
    for name, seed in tqdm(units, unit="unit"):
        measured = record["units"].setdefault(name, {}).get(str(seed), {})
        if not (measured and set(METHODS) - set(BELOW_60_ROWS) <= set(measured["in"]["all"])):  # finished before
            record["units"][name][str(seed)] = _rounded(unit(name, seed, measured))
            write("instead", record)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def by_set(record: dict[str, Any], names: Sequence[str], shifted: bool, size: str, method: str) -> dict[str, Any]:
    """Return the mean figures of every set that has any; ratios and gains to those of a constant."""
    sets = {}
    for name in names:
        rows = []
        for seed in record["units"].get(name, {}).values():
            for situation, sizes in seed.items():
                part = sizes.get(size, {})
                mine = part.get(method) or part.get(BELOW_60_ROWS.get(method, method), {})
                if (situation != "in") is not shifted or "score" not in mine:
                    continue
                base = part["constant"]
                row = {key: mine[key] / base[key] for key in ("crps", "score", "width")}
                row |= {"gain": base["nll"] - mine["nll"], "ranking": np.nan_to_num(mine["ranking"])}
                row |= {"auroc": mine.get("auroc", math.nan), "seconds": mine["seconds"]}
                row |= {f"held {place}": share for place, share in enumerate(mine["coverage"])}
                rows.append(row)
        if rows:
            sets[name] = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    return sets


def figures(record: dict[str, Any], names: Sequence[str], shifted: bool, size: str, method: str) -> Any:
    """Return medians over sets as attributes, each set by the mean of its units; None where no set has figures."""
    per_set = by_set(record, names, shifted, size, method)
    if not per_set:
        return None
    middle = {key: float(np.median([row[key] for row in per_set.values()])) for key in next(iter(per_set.values()))}
    worst = min(per_set, key=lambda name: per_set[name]["gain"])
    middle |= {"coverage": [middle.pop(f"held {place}") for place in range(5)], "worst": per_set[worst]["gain"]}
    return SimpleNamespace(**middle, sets=len(per_set), worst_set=worst)


def table(record: dict[str, Any], half: str, size: str) -> str:
    """Return a row for each method that was measured, with so many validation rows or, with all, under `shift`."""
    shifted, rows = size == "shift", []
    for method in ALL:
        row = figures(record, HALVES[half], shifted, "all" if shifted else size, method)
        if row is not None:
            cells = [_number(row.gain, 3), "" if math.isnan(row.worst) else f"{row.worst:.3f} ({row.worst_set})"]
            cells += [_number(row.crps, 3), _number(row.score, 3)]
            cells += [f"{100 * share:.0f}" for share in row.coverage[:4]] + [f"{100 * row.coverage[4]:.1f}"]
            cells += [_number(row.width, 2), f"{row.ranking:.2f}", *([_number(row.auroc, 2)] if shifted else [])]
            rows.append([method, *cells, _number(row.seconds, 2)])
    heads = ["method", "gain", "worst set", "CRPS", "score", "50 %", "80 %", "90 %", "95 %", "99 %", "width", "ranking"]
    return markdown_table([*heads, *(["AUROC"] if shifted else []), "seconds"], rows)


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else "endless" if math.isinf(value) else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
