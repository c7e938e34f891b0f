"""How many features are enough for the leverage of wide networks? `python -m benchmarks.projection`

The default projects wide features to fewer by a fixed random matrix. Networks with two hidden layers of 2048 units are
trained on the sets of `benchmarks.default`; the default is fitted with each size of the projection, and without one.
The size was chosen on the UCI sets; the others were looked at afterwards. A finished set is written at once.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.default import LEAST, measures, pair
from benchmarks.default_data import PARTS, TRAINED, Rows, cuts, standardised, table
from benchmarks.default_methods import Case, constant, default, default_reference
from benchmarks.default_nets import trained
from benchmarks.timing import RESULTS, machine
from latedrop.errors import FileError
from latedrop.files import write_aside
from latedrop.terms import features

HIDDEN = (2048, 2048)
LEARNING_RATE = 5e-4
STEPS = 600
SIZES = (16, 32, 64, 128, 256, 512, 1024, 0)
"""0: no projection."""
METHODS = {"default": default, "default + reference": default_reference}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.projection", description="How many features are enough?")
    parser.add_argument("--out", type=Path, default=RESULTS / "projection.json")
    parser.add_argument("--sets", nargs="+", default=[*PARTS["uci"], *PARTS["more"]])
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--summary", action="store_true", help="print tables from the JSON; measure nothing")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"machine": machine(torch.device("cpu")), "hidden": HIDDEN, "sizes": SIZES, "sets": {}}
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    wanted = [] if options.summary else [name for name in options.sets if name not in record["sets"]]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(one_set, name, options.steps): name for name in wanted}
        for done in as_completed(running):
            try:
                record["sets"][running[done]] = done.result()
            except FileError as error:
                print(f"skipped {running[done]}: {error}")
                continue
            write_aside(options.out, (json.dumps(record, indent=1) + "\n").encode())
            print(running[done], flush=True)
    print(markdown(record))


def one_set(name: str, steps: int = STEPS) -> dict[str, Any]:
    """`{situation: {method: {size: measures}}}` of one set."""
    torch.set_num_threads(1)
    data, begin = table(name), time.perf_counter()
    rows = cuts(data, 0)
    own = [situation for situation in TRAINED if situation in rows]
    scaled = {situation: standardised(data, rows[situation]) for situation in own}
    jobs = [(pair(scaled[s], rows[s].fit), pair(scaled[s], rows[s].stop)) for s in own]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nets = trained(jobs, 0, steps=steps, hidden=HIDDEN, learning_rate=LEARNING_RATE, device=device)
    found: dict[str, Any] = {s: _judged(net, scaled[s], rows[s]) for s, net in zip(own, nets, strict=True)}
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


def _judged(net: torch.nn.Sequential, data: np.ndarray, rows: Rows) -> dict[str, Any]:
    x_val, y_val = pair(data, rows.validation)
    case = Case([net], pair(data, np.concatenate([rows.fit, rows.stop]))[0], x_val, y_val.double())
    inside, (x, y) = pair(data, rows.inside)[0], pair(data, rows.test)
    shifted = rows.test is not rows.inside
    least = LEAST * float(constant(case)(x_val)[1][0])
    found: dict[str, Any] = {"constant": measures(constant(case), x, y.double(), inside if shifted else None, least)}
    before = features.WIDEST
    try:
        for name, method in METHODS.items():
            for size in SIZES:
                features.WIDEST = size or 10**9
                begin = time.perf_counter()
                score = measures(method(case), x, y.double(), inside if shifted else None, least)
                seconds = time.perf_counter() - begin
                score |= {"gain": found["constant"]["nll"] - score["nll"], "seconds": seconds}
                found.setdefault(name, {})[str(size)] = score
    finally:
        features.WIDEST = before
    return found


def markdown(record: dict[str, Any]) -> str:
    """Medians over the sets: gain in distribution, and what holds under shift."""
    parts = []
    for part, names in PARTS.items():
        sets = [record["sets"][name] for name in names if name in record["sets"]]
        if not sets:
            continue
        title = "UCI sets" if part == "uci" else "other sets"
        lines = [
            f"{title} ({len(sets)})\n",
            "| | features | gain, in distribution | gain, shift | 90 % intervals hold, shift | AUROC | seconds |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for method in METHODS:
            for size in record["sizes"]:
                each = (("in", "gain"), ("shift", "gain"), ("shift", "coverage"), ("shift", "auroc"), ("in", "seconds"))
                values = [float(np.median([_mean(one, method, size, *what) for one in sets])) for what in each]
                shown = " | ".join(f"{value:.3f}" for value in values[:-1])
                lines.append(f"| {method} | {size or 'all'} | {shown} | {values[-1]:.1f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _mean(one: dict[str, Any], method: str, size: int, situation: str, measure: str) -> float:
    places = ("above", "below") if situation == "shift" else ("in",)
    return float(np.mean([one[place][method][str(size)][measure] for place in places if place in one]))


if __name__ == "__main__":
    main()
