"""What got slower: ratios of today beside those that are committed.

    python -m benchmarks.guard                    # or: make bench BENCH=guard; names what got slower, and ends with 1
    python -m benchmarks.guard --only one_row     # these parts
    python -m benchmarks.guard --units lstm       # units with one of these in their names
    python -m benchmarks.guard --write            # today's ratios are the ones to compare with from now on

Every ratio has an interval (`benchmarks.gpu_round` says which). One is slower where today's interval lies above the
committed one; such units are measured once more, and only what is slower then too is named. Ratios are to plain passes
or loops of the same run, so that another machine may have others: commit those of the machine that guards.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import PARTS
from benchmarks.gpu_round import Turns, one, save
from benchmarks.gpu_setting import Setting
from benchmarks.timing import RESULTS, machine

GUARDED = ("one_row", "first_order", "sampling")
"""Parts that take a minute or two each with small networks."""
SLOW = "mcnn"
"""50 passes of it take a minute on one thread."""
Ratios = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Names what got slower than the committed results.")
    parser.add_argument("--only", nargs="+", choices=GUARDED, default=list(GUARDED), help="these parts only")
    parser.add_argument("--units", nargs="+", default=[""], help="only units with one of these in their names")
    parser.add_argument("--write", action="store_true", help="keep today's ratios instead of comparing")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each unit, about")
    parser.add_argument("--results", type=Path, default=RESULTS / "guard_cpu.json", help="the committed ratios")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    setting = Setting(device, True, 4, Turns(options.rounds, options.seconds, device))
    known = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {"units": {}}
    if not options.write and not known["units"]:
        parser.error(f"expected committed ratios at {options.results}; make them with --write")
    worse: dict[str, tuple[list[float], list[float]]] = {}
    for name, measure in units(setting, options.only, options.units):
        found = ratios(name, one(measure))
        if options.write:
            known["units"].update(found)
            save(options.results, {"machine": machine(device), "units": known["units"]})
        elif slower(known["units"], found):
            worse |= slower(known["units"], ratios(name, one(measure)))
        shown = [f"{key.partition(': ')[2]} {low:.2f}-{high:.2f}" for key, (low, _, high) in found.items()]
        print(f"{name}: {', '.join(shown)}", flush=True)
    for name, (before, now) in worse.items():
        print(f"slower: {name}, {before[0]:.2f} to {before[2]:.2f} before, {now[0]:.2f} to {now[2]:.2f} now")
    return 1 if worse else 0


def units(
    setting: Setting, parts: Sequence[str], named: Sequence[str] = ("",)
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What is measured, by its name; only units with one of `named` in theirs."""
    for part in parts:
        for name, measure in PARTS[part](setting):
            if SLOW not in name and any(text in name for text in named):
                yield f"{part}, {name}", measure


def ratios(name: str, found: Mapping[str, Any]) -> Ratios:
    """The ratios of one unit by unit and candidate, but for that of the base to itself."""
    return {f"{name}: {run}": ends for run, ends in found.get("ratios", {}).items() if run != found["base"]}


def slower(before: Ratios, now: Ratios) -> dict[str, tuple[list[float], list[float]]]:
    """What lies above the interval that it had.

    >>> slower({"a": [1.0, 1.1, 1.2], "b": [1.0, 1.1, 1.2]}, {"a": [1.15, 1.3, 1.4], "b": [1.25, 1.3, 1.4]})
    {'b': ([1.0, 1.1, 1.2], [1.25, 1.3, 1.4])}
    """
    return {name: (before[name], ends) for name, ends in now.items() if name in before and ends[0] > before[name][2]}


def markdown(record: Mapping[str, Any], part: str) -> str:
    """The committed ratios of one part: a row for each unit, with the interval of every candidate."""
    found: dict[str, Ratios] = {}
    for key, ends in record["units"].items():
        unit, _, run = key.removeprefix(f"{part}, ").rpartition(": ")
        if key.startswith(f"{part}, "):
            found.setdefault(unit, {})[run] = ends
    runs = list(dict.fromkeys(run for each in found.values() for run in each))
    lines = ["| network, rows | " + " | ".join(runs) + " |", "| --- |" + " ---: |" * len(runs)]
    for unit, each in found.items():
        cells = [f"{e[1]:.2f} ({e[0]:.2f} to {e[2]:.2f})" if (e := each.get(run)) else "-" for run in runs]
        lines.append(f"| {unit.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
