"""The one driver of all studies: units of work, kept as soon as they are done; then pages.

A study is settings in, JSON out. Its work is cut into units, each with a file of its own and a key, what its result
depends on besides the code. A finished unit is kept; one with another key is refused. A run that was stopped goes on
where it was. A unit depends on nothing but its arguments. Pages and figures are made from the JSON files alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
            added.
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
        read: from the folder of the results, the records by set, without their check.
        pages: from the records and the folder, all pages and figures by file name.
    """

    name: str
    text: str
    data: str
    quick: str
    schema: int
    options: Callable[[argparse.ArgumentParser], object]
    units: Callable[[argparse.Namespace], Sequence[Unit]]
    read: Callable[[Path], dict[str, dict[str, Any]]]
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
    study.options(parser)
    return parser.parse_args([*words, *([] if sys.stderr.isatty() else ["--no-progress"])])


def run(study: Study, options: argparse.Namespace) -> list[Path]:
    """Measure what is not finished, unless only figures are wanted; then write pages and figures. Return all files.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    inputs = {f"--{name}": vars(options).get(name) for name in ("data", "weights")}
    check_apart({"--out": options.out}, inputs)
    for name, place in inputs.items():
        if place is not None and not place.is_dir():
            raise FileError(f"expected a folder at {place}; it is not there. Check {name}.")
    finished = [] if options.figures else _measured(study, options)
    results = study.read(options.out)
    if not results:
        raise FileError(f"expected results of this study in {options.out}; found none. Run the study first.")
    with understood(options.out, "results of this study", "Delete those that are damaged, and run it again."):
        files = study.pages(results, options.out)
    for name, content in files.items():
        write_aside(options.out / name, content)
    return [*finished, *(options.out / name for name in files)]


def _measured(study: Study, options: argparse.Namespace) -> list[Path]:
    """Measure every unit that is not finished; return the files of all units."""
    device = chosen_device(options.device)  # a wrong one is told before the work
    out, units = folder(options.out), study.units(options)
    for place, unit in enumerate(units, 1):
        path = out / unit.file
        if not options.fresh and is_finished(path, study.schema, unit.key):
            print(f"{unit.file}: kept, finished before", file=sys.stderr)
            continue
        label = f"{path.stem} ({place} of {len(units)})" if options.progress else None
        record = _record(unit, study.schema, device, label)
        write_aside(path, dumped(record))
        print(f"{unit.file}: {record['seconds']['total']:.1f} s", file=sys.stderr)
    if not units:
        raise FileError("expected data for one of the sets; found none. See the lines above, and pass --data.")
    return [out / unit.file for unit in units]


def _record(unit: Unit, schema: int, device: torch.device, label: str | None) -> dict[str, Any]:
    """Measure a unit; return its whole record."""
    start = time.perf_counter()
    form = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    with tqdm(total=unit.work, desc=label, disable=label is None, bar_format=form) as bar:
        record = unit.measure(device, bar.update)
    record["seconds"]["total"] = round(time.perf_counter() - start, 2)
    with one_thread():
        machine = {"device": device_name(device), "system": platform.system()}
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


def read_sets(names: Collection[str], schema: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Read the records of those sets that have one, in this order."""
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
