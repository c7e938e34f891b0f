"""The one driver of all studies: units of work, kept as soon as they are done, here or on a Ray cluster; then pages.

A study is settings in, JSON out. Its work is cut into units, each with a file of its own and a key, what its result
depends on besides the code. A finished unit is kept; one with another key is refused. A run that was stopped goes on
where it was. A unit depends on nothing but its arguments: where it runs changes no number, as long as the machines and
their numbers of threads are alike. Pages and figures are made from the JSON files alone.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from latedrop.devices import chosen_device, device_name, one_thread, versions
from latedrop.errors import ArgumentError, FileError
from latedrop.files import check_apart, understood, write_aside
from latedrop.terminal import folder, one_line, read_json
from studies.pages import Results

STOPPED = "studies: stopped; finished work is kept, and the same command goes on from there."


@dataclass(frozen=True)
class Unit:
    """A piece of work with a file of its own.

    Attributes:
        file: where its record goes, relative to `--out`.
        key: what the record depends on, as JSON has it; it is part of the record.
        work: how much `measure` will report to its tick.
        measure: from a device and a tick, the rest of the record. `seconds` in it is a mapping, to which `total` is
            added; `files`, by name, are written beside it and are no part of it.
    """

    file: str
    key: Mapping[str, Any]
    work: float
    measure: Callable[[torch.device, Callable[[float], object]], dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """Describe a study to the driver.

    Attributes:
        name: of the command.
        text: what it asks, in a line.
        data: what the folder of `--data` holds.
        quick: what `--quick` leaves.
        schema: of its records.
        options: adds those of its own to a parser.
        units: from all options. What cannot be had is named on stderr and left out.
        read: from the folder of the results and all options, the records by set, without their check.
        pages: from the records and the folder, all pages and figures by file name.
    """

    name: str
    text: str
    data: str
    quick: str
    schema: int
    options: Callable[[argparse.ArgumentParser], object]
    units: Callable[[argparse.Namespace], Sequence[Unit]]
    read: Callable[[Path, argparse.Namespace], dict[str, dict[str, Any]]]
    pages: Callable[[Results, Path], Mapping[str, bytes]]


def command(study: Study, words: Sequence[str]) -> int:
    """Run a study from the words of its command line; return the exit code."""
    options = parsed(study, words)
    try:
        with one_line(options.debug, STOPPED):
            print(f"written: {', '.join(map(str, run(study, options)))}")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def parsed(study: Study, words: Sequence[str]) -> argparse.Namespace:
    """Read the options of a study from the words of its command line."""
    program = f"python -m studies {study.name}"
    example = f"Example: {program} --data DIR --out {study.name}"
    parser = argparse.ArgumentParser(program, description=study.text, epilog=example)
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--no-progress", dest="progress", action="store_false", help="no bars")
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--out", type=Path, default=Path(f"{study.name}-study"), help="folder of the results; finished work is kept")
    add("--data", type=Path, help=study.data)
    add("--sets", help="names separated by commas; all by default")
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--quick", action="store_true", help=study.quick)
    add("--fresh", action="store_true", help="compute finished work again")
    add("--figures", action="store_true", help="only write pages and figures, from the JSON files in --out")
    add("--ray", nargs="?", const="local", metavar="ADDRESS",
        help="spread the units over Ray's workers: on this machine, or of a cluster: its address or auto")  # fmt: skip
    add("--gpus", type=float, default=0.0, help="with --ray, GPUs that each unit takes; 0.5 is half of one")
    study.options(parser)
    return parser.parse_args([*words, *([] if sys.stderr.isatty() else ["--no-progress"])])


def run(study: Study, options: argparse.Namespace) -> list[Path]:
    """Measure what is not finished, unless only figures are wanted; then write pages and figures. Return all files.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    inputs = {f"--{name}": vars(options).get(name) for name in ("data", "csv", "weights")}
    check_apart({"--out": options.out}, inputs)
    for name in ("data", "weights"):
        place = inputs[f"--{name}"]
        if place is not None and not place.is_dir():
            raise FileError(f"expected a folder at {place}; it is not there. Check --{name}.")
        if place is not None:
            setattr(options, name, place.absolute())  # a worker finds it, wherever it runs
    finished = [] if options.figures else _measured(study, options)
    results = study.read(options.out, options)
    if not results:
        raise FileError(f"expected results of this study in {options.out}; found none. Run the study first.")
    with understood(options.out, "results of this study", "Delete those that are damaged, and run it again."):
        files = study.pages(results, options.out)
    for name, content in files.items():
        write_aside(options.out / name, content)
    return [*finished, *(options.out / name for name in files)]


def _measured(study: Study, options: argparse.Namespace) -> list[Path]:
    """Measure every unit that is not finished; return the files of all units."""
    if not 0 <= options.gpus <= 64:
        raise ArgumentError(f"expected --gpus from 0 to 64 for each unit; found {options.gpus}.")
    if options.gpus and options.ray is None:
        raise ArgumentError("expected --gpus with --ray; found it alone. Here --device says what a study runs on.")
    if options.ray is None:
        chosen_device(options.device)  # a wrong one is told before the work
    out, units, jobs = folder(options.out), study.units(options), {}
    for place, unit in enumerate(units, 1):
        path = out / unit.file
        if not options.fresh and is_finished(path, study.schema, unit.key):
            print(f"{unit.file}: kept, finished before", file=sys.stderr)
        else:
            label = f"{path.stem} ({place} of {len(units)})" if options.progress and options.ray is None else None
            jobs[unit.file] = partial(_record, unit, study.schema, options.device, label)
    for name, record in _spread(jobs, options):
        for beside, content in record.pop("files", {}).items():
            write_aside(out / beside, content)
        write_aside(out / name, dumped(record))
        print(f"{name}: {record['seconds']['total']:.1f} s", file=sys.stderr)
    if not units:
        raise FileError("expected data for one of the sets; found none. See the lines above, and pass --data.")
    return [out / unit.file for unit in units]


def _record(unit: Unit, schema: int, device: str, label: str | None) -> dict[str, Any]:
    """Measure a unit, here or on a worker; return its whole record."""
    chosen, start = chosen_device(device), time.perf_counter()
    form = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    with tqdm(total=unit.work, desc=label, disable=label is None, bar_format=form) as bar:
        record = unit.measure(chosen, bar.update)
    record["seconds"]["total"] = round(time.perf_counter() - start, 2)
    with one_thread():
        machine = {"device": device_name(chosen), "system": platform.system()}
    return {"schema": schema, **unit.key, "machine": machine, "versions": versions()} | record


def is_finished(path: Path, schema: int, key: Mapping[str, Any]) -> bool:
    """Return whether a unit's record is there.

    Raises:
        FileError: it is damaged, or was made with another key.
    """
    if not path.exists():
        return False
    record = read_record(path, schema)
    for name, expected in key.items():
        if record.get(name) != expected:
            raise FileError(
                f"expected results with {name} {expected} in {path}; found {record.get(name)}. "
                "Pass another --out, or --fresh to compute them again."
            )
    return True


def read_record(path: Path, schema: int) -> dict[str, Any]:
    """Read the record of a unit."""
    return read_json(path, "a result of this study", schema, "Delete it, or compute it again with --fresh.")


def read_sets(
    names: Collection[str], schema: int, folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Read the records of those sets that have one, in this order; or that of a table of one's own."""
    csv = vars(options).get("csv")
    names = names if csv is None else [csv.stem]
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: read_record(path, schema) for name, path in paths.items() if path.exists()}


def dumped(record: Mapping[str, Any]) -> bytes:
    """Write compact JSON; NaN and inf are refused."""
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()


def chosen_names(names: str | None, known: Collection[str]) -> list[str]:
    """Return the names of a comma-separated list, each once; all that are known where None.

    >>> chosen_names("yacht, energy,yacht", ["energy", "yacht", "wine"])
    ['yacht', 'energy']
    """
    if names is None:
        return list(known)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ArgumentError(f"expected --sets of {', '.join(known)}; found {', '.join(unknown) or 'none'}.")
    return list(dict.fromkeys(wanted))


def check_at_least(options: argparse.Namespace, **least: int) -> None:
    """Raise where an option that is given is below what makes sense."""
    for name, limit in least.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise ArgumentError(f"expected --{name} of at least {limit}; found {value}.")


def rounded(value: float, digits: int = 6) -> float:
    """Round to so many significant digits."""
    return float(f"{value:.{digits}g}")


def _spread(
    jobs: Mapping[str, Callable[[], dict[str, Any]]], options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and results, each when it is there; on a cluster that is in no order."""
    if options.ray is None or not jobs:
        for name, job in jobs.items():
            yield name, job()
        return
    from latedrop.adapters.ray import cause, connected

    with connected(options.ray) as ray:
        there = ray.cluster_resources().get("GPU", 0)
        if there < options.gpus:
            raise ArgumentError(
                f"expected a cluster with {options.gpus:g} GPUs or more for each unit; found {there:g} in all. Leave "
                "--gpus out, or start workers that have some."
            )
        resources = {"num_cpus": 1, **({"num_gpus": options.gpus} if options.gpus else {})}
        work: Any = ray.remote(**resources, max_retries=3)(lambda job: job())
        waiting = {work.remote(job): name for name, job in jobs.items()}
        try:
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                yield waiting.pop(done), ray.get(done)
        except ray.exceptions.RayError as error:
            raise cause(error) from error
        finally:
            for left in waiting:
                ray.cancel(left, force=True)
