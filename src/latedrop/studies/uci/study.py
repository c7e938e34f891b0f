"""The UCI study: `latedrop study uci`, or, without the command-line extra, `python -m latedrop.studies.uci`.

Settings in, one JSON for each set out, written as soon as the set is done: a run that was stopped goes on where it
was. Pages and figures are made from the JSON files alone.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from latedrop.devices import chosen_device, device_name, versions
from latedrop.errors import ArgumentError, FileError, LatedropError
from latedrop.files import check_apart, write_aside
from latedrop.records import understood
from latedrop.studies.command import bar, check_at_least, check_same, dumped, read_result, run_command, study_parser
from latedrop.studies.uci import data
from latedrop.studies.uci.data import UciSet, chosen_sets
from latedrop.studies.uci.measured_set import Settings, measure, work
from latedrop.studies.uci.own_table import own_set
from latedrop.terminal import folder

__all__ = ["SCHEMA", "STOPPED", "Request", "main", "read", "run", "study"]

SCHEMA = 2
STOPPED = "latedrop: stopped; finished sets are kept, and the same command goes on from there."
_QUICK = Settings(splits=3, deep_draws=20, epochs=0.1)
_QUICK_SETS = "yacht,boston-housing"


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        out: folder of the results.
        data: folder of the text files; None: what installed packages ship.
        sets: names with commas between; None: all.
        csv: a table of one's own, in the place of the sets.
        target: its column that is predicted.
        splits: maximum number of splits per data set.
        draws: masks for the paper's sampled variance; None: exact.
        seed: of weights, order and masks.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        quick: two small sets, three splits, few epochs.
        fresh: compute again what is there.
        progress: show bars.
    """

    out: Path
    data: Path | None = None
    sets: str | None = None
    csv: Path | None = None
    target: str | None = None
    splits: int | None = None
    draws: int | None = None
    seed: int = 0
    device: str = "auto"
    quick: bool = False
    fresh: bool = False
    progress: bool = True

    def settings(self) -> Settings:
        """What the results depend on."""
        check_at_least(self, splits=1, draws=2)
        quick = _QUICK if self.quick else Settings()
        splits = quick.splits if self.splits is None else self.splits
        return Settings(splits, self.draws, quick.deep_draws, quick.epochs, self.seed)


def run(request: Request) -> list[Path]:
    """Run the study; the JSON files that are then in `out`, finished before or now.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    settings, device = request.settings(), chosen_device(request.device)
    own = _own(request)
    named = _QUICK_SETS if request.quick and request.sets is None else request.sets
    wanted = [own[0]] if own else chosen_sets(named)
    out = folder(request.out)
    paths = [out / f"{item.name}.json" for item in wanted]
    done = {
        path for item, path in zip(wanted, paths, strict=True) if not request.fresh and _finished(path, item, settings)
    }
    tables = {own[0].name: own[1]} if own else _tables(wanted, request, done)
    finished = []
    for index, (item, path) in enumerate(zip(wanted, paths, strict=True)):
        if path in done:
            print(f"{item.name}: kept, finished before", file=sys.stderr)
        elif item.name in tables:
            label = f"{item.name} ({index + 1} of {len(wanted)})"
            record = _record(item, tables.pop(item.name), settings, device, label, request.progress)
            write_aside(path, dumped(record))
            print(f"{item.name}: {record['seconds']['total']:.1f} s", file=sys.stderr)
        else:
            continue
        finished.append(path)
    return finished


def read(results: Path, names: Iterable[str] = tuple(data.SETS)) -> dict[str, dict[str, Any]]:
    """The results in a folder by set, in the order of the names."""
    paths = {name: results / f"{name}.json" for name in names}
    found = {name: read_result(path, SCHEMA) for name, path in paths.items() if path.exists()}
    if not found:
        first = next(iter(paths.values())).name
        raise FileError(f"expected results such as {first} in {results}; found none. Run the study first.")
    return found


def main(arguments: Sequence[str] | None = None, program: str = "python -m latedrop.studies.uci") -> int:
    """The command line without extras; the exit code."""
    parser = study_parser(
        program,
        "Injected against embedded dropout on eight UCI sets, and other methods on the same networks.",
        out="uci-study",
        data="folder of the eight text files; without it, installed packages",
        quick="two small sets, three splits, few epochs",
        example="--data DIR --out uci-study",
    )
    parser.add_argument("--csv", type=Path, help="a table of your own instead: a header and numbers")
    parser.add_argument("--target", help="the column of --csv that is predicted; all others are inputs")
    parser.add_argument("--splits", type=int, help="maximum number of splits per data set")
    parser.add_argument("--draws", type=int, help="sample the variance with so many masks; exact by default")
    return run_command(parser, arguments, lambda options, only: study(Request(**options), figures_only=only), STOPPED)


def study(request: Request, *, figures_only: bool = False) -> list[Path]:
    """Run, unless only figures are wanted, and then write pages and figures; all files."""
    from latedrop.studies.uci import pages

    check_apart({"--out": request.out}, {"--data": request.data, "--csv": request.csv})
    finished = [] if figures_only else run(request)
    results = read(request.out, data.SETS if request.csv is None else [request.csv.stem])
    with understood(request.out, "results of this study", "Delete those that are damaged, and run it again."):
        return [*finished, *pages.write(results, request.out)]


def _record(
    item: UciSet, table: Any, settings: Settings, device: torch.device, label: str, progress: bool
) -> dict[str, Any]:
    start = time.perf_counter()
    with bar(label, work(item, settings), progress) as shown:
        result = measure(item, table, settings, device, shown.update)
    result["seconds"]["total"] = round(time.perf_counter() - start, 2)
    return {
        "schema": SCHEMA,
        "set": item.name,
        "table_sha256": item.table_digest,
        "settings": asdict(settings),
        "splits_sha256": data.split_digest(data.permutations(item, settings.splits)),
        "published_splits": data.split_digest(data.permutations(item)) == item.digest,
        "machine": {"device": device_name(device), "system": platform.system()},
        "versions": versions(),
        **result,
    }


def _tables(wanted: Sequence[UciSet], request: Request, done: set[Path]) -> dict[str, Any]:
    """All data, before any training: what is missing is named and left out, what is damaged ends the run."""
    if request.data is not None and not request.data.is_dir():
        raise FileError(f"expected the folder of the UCI text files at {request.data}; it is not there. Check --data.")
    tables: dict[str, Any] = {}
    for item in wanted:
        if request.out / f"{item.name}.json" in done:
            continue
        if request.data is not None and not (request.data / f"{item.name}.txt").exists():
            print(f"{item.name}: skipped, no {item.name}.txt in {request.data}", file=sys.stderr)
            continue
        try:
            tables[item.name] = data.load(item, request.data)
        except LatedropError as error:
            if request.data is not None:
                raise
            print(f"{item.name}: skipped, {' '.join(str(error).split())}", file=sys.stderr)
    if not tables and not done:
        raise FileError(f"expected data for one of {', '.join(item.name for item in wanted)}; found none. Pass --data.")
    return tables


def _own(request: Request) -> tuple[UciSet, data.Table] | None:
    if request.csv is None and request.target is None:
        return None
    if request.csv is None or request.target is None:
        raise ArgumentError("expected --csv FILE and --target COLUMN together; found one of them.")
    if request.data is not None or request.sets is not None:
        raise ArgumentError("expected --csv alone; found --data or --sets too, which name published sets.")
    return own_set(request.csv, request.target)


def _finished(path: Path, item: UciSet, settings: Settings) -> bool:
    if not path.exists():
        return False
    record = read_result(path, SCHEMA)
    check_same(path, "settings", asdict(settings), record.get("settings"))
    check_same(path, "table", item.table_digest, record.get("table_sha256"))
    return True


if __name__ == "__main__":
    sys.exit(main())
