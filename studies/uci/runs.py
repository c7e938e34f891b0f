"""A study of sets, run one after the other: which are wanted, which are finished, and each written as soon as it is.

All tables are read before any training: what is missing is named and left out, what is damaged ends the run.
"""

from __future__ import annotations

import platform
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from latedrop.devices import chosen_device, device_name, versions
from latedrop.errors import ArgumentError, FileError, LatedropError
from latedrop.files import write_aside
from latedrop.terminal import folder
from studies.command import check_same, dumped, read_result
from studies.spread import Cluster, cluster_options, spread
from studies.uci import data
from studies.uci.data import Table, UciSet, chosen_sets
from studies.uci.own_table import own_set

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["STOPPED", "SetRequest", "own_table_options", "read_sets", "run_sets"]

STOPPED = "latedrop: stopped; finished sets are kept, and the same command goes on from there."
_QUICK_SETS = "yacht,boston-housing"


@dataclass(frozen=True)
class SetRequest:
    """What to run.

    Attributes:
        out: folder of the results.
        data: folder of the text files; None: what installed packages ship.
        sets: names separated by commas; None: all.
        csv: a table of one's own, in the place of the sets.
        target: its column that is predicted.
        seed: of all that is random.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        quick: two small sets, and less of each.
        fresh: compute again what is there.
        ray: `local`, `auto` or the address of a cluster, whose workers run the sets; None: here, one after the other.
        gpus: that each set takes of such a worker.
        progress: show bars.
    """

    out: Path
    data: Path | None = None
    sets: str | None = None
    csv: Path | None = None
    target: str | None = None
    seed: int = 0
    device: str = "auto"
    quick: bool = False
    fresh: bool = False
    ray: str | None = None
    gpus: float = 0.0
    progress: bool = True

    @property
    def bars(self) -> bool:
        """Whether bars are shown; workers have nowhere to."""
        return self.progress and self.ray is None

    @property
    def names(self) -> list[str]:
        """Of all results that `out` may have."""
        return list(data.SETS) if self.csv is None else [self.csv.stem]

    @property
    def read_only(self) -> dict[str, Path | None]:
        """What must not be written to, by option."""
        return {"--data": self.data, "--csv": self.csv}


def own_table_options(parser: ArgumentParser) -> None:
    """Add what asks for a table of one's own, and for a cluster."""
    cluster_options(parser)
    parser.add_argument("--csv", type=Path, help="a table of your own instead: a header and numbers")
    parser.add_argument("--target", help="the column of --csv that is predicted; all others are inputs")


def run_sets(
    request: SetRequest,
    settings: DataclassInstance,
    schema: int,
    measured: Callable[[UciSet, Table, torch.device, str], dict[str, Any]],
    said: Callable[[dict[str, Any]], str] = lambda record: "",
) -> list[Path]:
    """Measure what is wanted and not finished; the JSON files that are then in `out`.

    Args:
        request: what to run.
        settings: what the results depend on; those with others are refused.
        schema: of the records.
        measured: the record of a set, from its table, a device and a label for bars. It has `seconds`.
        said: of a finished record, what to print beside the time.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    cluster, own = Cluster(request.ray, request.gpus), _own(request)
    if cluster.ray is None:
        chosen_device(request.device)  # a wrong one is told before the work
    named = _QUICK_SETS if request.quick and request.sets is None else request.sets
    wanted = [own[0]] if own else chosen_sets(named)
    out = folder(request.out)
    paths = {item.name: out / f"{item.name}.json" for item in wanted}
    kept = (
        [] if request.fresh else [item.name for item in wanted if _finished(paths[item.name], item, settings, schema)]
    )
    missing = [item for item in wanted if item.name not in kept]
    tables = {own[0].name: own[1]} if own else _tables(missing, request.data)
    if not tables and not kept:
        raise FileError(f"expected data for one of {', '.join(paths)}; found none. Pass --data.")
    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for index, item in enumerate(wanted):
        if item.name in kept:
            print(f"{item.name}: kept, finished before", file=sys.stderr)
        elif item.name in tables:
            head = partial(_headed, item, settings, schema)
            label = f"{item.name} ({index + 1} of {len(wanted)})"
            jobs[item.name] = partial(_unit, measured, item, tables[item.name], request.device, label, head)
    for name, record in spread(jobs, cluster):
        write_aside(paths[name], dumped(record))
        print(f"{name}: {said(record)}{record['seconds']['total']:.1f} s", file=sys.stderr)
        kept.append(name)
    return [path for name, path in paths.items() if name in kept]


def _unit(
    measured: Callable[[UciSet, Table, torch.device, str], dict[str, Any]],
    item: UciSet,
    table: Table,
    device: str,
    label: str,
    head: Callable[[torch.device], dict[str, Any]],
) -> dict[str, Any]:
    """The whole record of one set, here or on a worker."""
    chosen, start = chosen_device(device), time.perf_counter()
    record = measured(item, table, chosen, label)
    record["seconds"]["total"] = round(time.perf_counter() - start, 2)
    return head(chosen) | record


def read_sets(results: Path, schema: int, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results in a folder by set, in the order of the names."""
    paths = {name: results / f"{name}.json" for name in names}
    found = {name: read_result(path, schema) for name, path in paths.items() if path.exists()}
    if not found:
        first = next(iter(paths.values())).name
        raise FileError(f"expected results such as {first} in {results}; found none. Run the study first.")
    return found


def _headed(item: UciSet, settings: DataclassInstance, schema: int, device: torch.device) -> dict[str, Any]:
    return {
        "schema": schema,
        "set": item.name,
        "table_sha256": item.table_digest,
        "settings": asdict(settings),
        "machine": {"device": device_name(device), "system": platform.system()},
        "versions": versions(),
    }


def _tables(wanted: Sequence[UciSet], folder: Path | None) -> dict[str, Table]:
    if folder is not None and not folder.is_dir():
        raise FileError(f"expected the folder of the UCI text files at {folder}; it is not there. Check --data.")
    tables: dict[str, Table] = {}
    for item in wanted:
        if folder is not None and not (folder / f"{item.name}.txt").exists():
            print(f"{item.name}: skipped, no {item.name}.txt in {folder}", file=sys.stderr)
            continue
        try:
            tables[item.name] = data.load(item, folder)
        except LatedropError as error:
            if folder is not None:
                raise
            print(f"{item.name}: skipped, {' '.join(str(error).split())}", file=sys.stderr)
    return tables


def _own(request: SetRequest) -> tuple[UciSet, Table] | None:
    if request.csv is None and request.target is None:
        return None
    if request.csv is None or request.target is None:
        raise ArgumentError("expected --csv FILE and --target COLUMN together; found one of them.")
    if request.data is not None or request.sets is not None:
        raise ArgumentError("expected --csv alone; found --data or --sets too, which name published sets.")
    return own_set(request.csv, request.target)


def _finished(path: Path, item: UciSet, settings: DataclassInstance, schema: int) -> bool:
    if not path.exists():
        return False
    record = read_result(path, schema)
    check_same(path, "settings", asdict(settings), record.get("settings"))
    check_same(path, "table", item.table_digest, record.get("table_sha256"))
    return True
