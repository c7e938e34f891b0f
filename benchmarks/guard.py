"""Name what got slower on a CPU: today's ratios to a plain pass beside the committed ones.

    make bench BENCH=guard                     # some three minutes; ends with 1 where something is slower
    python -m benchmarks.guard --write         # commit today's ratios

A ratio is slower where its interval lies above the committed one, twice. The machine that guards should be the one that
wrote them: another processor has other ratios.
"""

import argparse
import sys
import warnings

import torch

from benchmarks.steps import Case
from benchmarks.timing import interval, machine, stored, turns_within, write

NETS, ROWS, WORK = ("MLP", "LSTM"), (1, 64), ("draws", "first order", "default")
ROUNDS, SECONDS = 25, 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store today's ratios instead of comparing them")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    committed = {} if options.write else stored("guard")["ratios"]
    ratios, slower = {}, []
    for name in options.nets:
        case = Case(name)
        for rows in ROWS:
            today = measured(case, name, rows)
            suspects = above(today, committed)
            if suspects:  # a busy moment, perhaps
                today = measured(case, name, rows)
                slower += [unit for unit in above(today, committed) if unit in suspects]
            ratios |= today
    for unit, (low, middle, high) in ratios.items():
        before = "" if unit not in committed else ", committed {:.1f} to {:.1f}".format(*committed[unit][::2])
        print(f"{unit}: {middle:.1f} plain passes ({low:.1f} to {high:.1f}){before}")
    if options.write:
        write("guard", {"machine": machine(torch.device("cpu")), "ratios": ratios})
    print("\n".join(f"slower: {unit}" for unit in slower) or "nothing is slower")
    return 1 if slower else 0


def measured(case: Case, name: str, rows: int) -> dict[str, list[float]]:
    """Return the interval of each ratio to a plain pass, low, middle and high; all work takes turns."""
    runs = {work: case.call(work, rows) for work in ("plain", *WORK)}
    times, _, _ = turns_within(runs, repeats=ROUNDS, seconds=SECONDS, device=case.device)
    pairs = {work: [a / b for a, b in zip(times[work], times["plain"], strict=True)] for work in WORK}
    return {f"{name}, {rows} rows, {work}": interval(values) for work, values in pairs.items()}


def above(ratios: dict[str, list[float]], committed: dict[str, list[float]]) -> list[str]:
    """Return the units whose interval lies above the committed one.

    >>> above({"a": [1.0, 1.1, 1.3], "b": [1.4, 1.5, 1.6]}, {"a": [0.9, 1.0, 1.2], "b": [1.0, 1.1, 1.3]})
    ['b']
    """
    return [unit for unit, (low, _, _) in ratios.items() if unit in committed and low > committed[unit][2]]


if __name__ == "__main__":
    sys.exit(main())
