"""The classification study: `latedrop study classification`, or `python -m latedrop.studies.classification`.

Settings in, one JSON for each repeat of each set out, written as soon as it is done: a run that was stopped goes on
where it was. The first repeat of all sets comes before the second. Pages and figures are made from the JSON alone.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from latedrop.devices import chosen_device, device_name, one_thread, versions
from latedrop.errors import ArgumentError, FileError
from latedrop.files import check_apart, write_aside
from latedrop.json_text import understood
from latedrop.studies.classification.data import REPEATS, SETS, SOURCES, Images, ImageSet, Source, load
from latedrop.studies.classification.measured_unit import Settings, measure, work
from latedrop.studies.command import (
    bar,
    check_at_least,
    check_same,
    chosen_names,
    dumped,
    read_result,
    run_command,
    study_parser,
)
from latedrop.studies.spread import Cluster, cluster_options, spread
from latedrop.terminal import folder

__all__ = ["SCHEMA", "Request", "main", "read", "run", "study"]

SCHEMA = 1
_STOPPED = "latedrop: stopped; finished repeats are kept, and the same command goes on from there."
_QUICK = Settings(epochs=0.2, shifted=100, strange=100, draws=5)
_QUICK_SETS, _QUICK_REPEATS = "digits-mlp", 2


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        out: folder of the results.
        data: folder with `mnist`, `fashion-mnist` and `cifar-10`, each with its files; None: the digits alone.
        sets: names separated by commas; None: all.
        repeats: of each set; None: all, or two with `quick`.
        seed: of all that is random.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        quick: the digits, two repeats, few epochs.
        fresh: compute again what is there.
        ray: `local`, `auto` or the address of a cluster, whose workers run the repeats; None: here, one by one.
        gpus: that each repeat takes of such a worker.
        progress: show bars.
    """

    out: Path
    data: Path | None = None
    sets: str | None = None
    repeats: int | None = None
    seed: int = 0
    device: str = "auto"
    quick: bool = False
    fresh: bool = False
    ray: str | None = None
    gpus: float = 0.0
    progress: bool = True

    def settings(self) -> Settings:
        """What the results depend on."""
        return replace(_QUICK if self.quick else Settings(), seed=self.seed)

    def wanted(self) -> list[tuple[ImageSet, int]]:
        """Sets and repeats, in the order in which they run."""
        check_at_least(self, repeats=1)
        if (self.repeats or 1) > REPEATS:
            raise ArgumentError(f"expected at most {REPEATS} --repeats, which share no rows; found {self.repeats}.")
        count = self.repeats or (_QUICK_REPEATS if self.quick else REPEATS)
        names = chosen_names(_QUICK_SETS if self.quick and self.sets is None else self.sets, SETS)
        return [(SETS[name], repeat) for repeat in range(count) for name in names]


def run(request: Request) -> list[Path]:
    """Run the study; the JSON files that are then in `out`, finished before or now.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    cluster, settings, wanted = Cluster(request.ray, request.gpus), request.settings(), request.wanted()
    if cluster.ray is None:
        chosen_device(request.device)  # a wrong one is told before the work
    images = _images(request.data)
    out, found = folder(request.out), []
    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for index, (item, repeat) in enumerate(wanted):
        path = out / _file(item.name, repeat)
        if item.source not in images:
            continue
        head = _headed(item, repeat, settings, images)
        if path.exists() and not request.fresh:
            record = read_result(path, SCHEMA)
            for name in ("settings", "data_sha256"):
                check_same(path, name, head[name], record.get(name))
            print(f"{path.stem}: kept, finished before", file=sys.stderr)
        else:
            label = f"{path.stem} ({index + 1} of {len(wanted)})"
            jobs[path.name] = partial(_unit, item, repeat, settings, _reached(request), label, head)
        found.append(path)
    for name, record in spread(jobs, cluster):
        write_aside(out / name, dumped(record))
        print(f"{Path(name).stem}: {record['seconds']['total']:.1f} s", file=sys.stderr)
    if not found:
        names = ", ".join(dict.fromkeys(item.source for item, _ in wanted))
        raise FileError(f"expected folders of {names} in --data; found none. See docs/classification_study.md.")
    return found


def _unit(
    item: ImageSet, repeat: int, settings: Settings, request: Request, label: str, head: dict[str, Any]
) -> dict[str, Any]:
    """The whole record of one repeat, here or on a worker, which reads the images itself."""
    device, start = chosen_device(request.device), time.perf_counter()
    images = {source: found for source, found in _loaded(request.data).items() if found is not None}
    with bar(label, work(item, settings), request.progress and request.ray is None) as shown:
        record = measure(item, images, repeat, settings, device, shown.update)
    record["seconds"]["total"] = round(time.perf_counter() - start, 2)
    with one_thread():
        machine = {"device": device_name(device), "system": platform.system()}
    return head | {"machine": machine} | record


def _reached(request: Request) -> Request:
    """With a folder that a worker finds, wherever it runs."""
    return request if request.data is None else replace(request, data=request.data.absolute())


@lru_cache(maxsize=1)
def _loaded(data: Path | None) -> dict[Source, Images | None]:
    return {source: load(source, data) for source in SOURCES}


def read(results: Path, names: Iterable[str] = tuple(SETS)) -> dict[str, dict[str, Any]]:
    """The results in a folder by set: its records in the order of the repeats, and how much these share."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        paths = [results / _file(name, repeat) for repeat in range(REPEATS)]
        units = [read_result(path, SCHEMA) for path in paths if path.exists()]
        if units:
            found[name] = {"units": units, "overlap": SETS[name].overlap}
    if not found:
        raise FileError(
            f"expected results such as {_file('digits-mlp', 0)} in {results}; found none. Run the study first."
        )
    return found


def main(arguments: Sequence[str] | None = None, program: str = "python -m latedrop.studies.classification") -> int:
    """The command line without extras; the exit code."""
    parser = study_parser(
        program,
        "What probabilities of classes are worth on usual and shifted rows, and which score tells strange ones.",
        out="classification-study",
        data="folder with mnist, fashion-mnist and cifar-10; without it, scikit-learn's digits alone",
        quick="the digits, two repeats, few epochs",
        example="--data DIR --out classification-study",
    )
    cluster_options(parser)
    parser.add_argument("--repeats", type=int, help=f"of each set, at most and by default {REPEATS}")
    return run_command(parser, arguments, lambda options, only: study(Request(**options), figures_only=only), _STOPPED)


def study(request: Request, *, figures_only: bool = False) -> list[Path]:
    """Run, unless only figures are wanted, and then write pages and figures; all files."""
    from latedrop.studies.classification import pages

    check_apart({"--out": request.out}, {"--data": request.data})
    finished = [] if figures_only else run(request)
    results = read(request.out)
    with understood(request.out, "results of this study", "Delete those that are damaged, and run it again."):
        return [*finished, *pages.write(results, request.out)]


def _file(name: str, repeat: int) -> str:
    return f"{name}-{repeat}.json"


def _images(data: Path | None) -> dict[Source, Images]:
    if data is not None and not data.is_dir():
        raise FileError(f"expected the folder of mnist, fashion-mnist and cifar-10 at {data}; it is not there.")
    found = _loaded(None if data is None else data.absolute())
    for source, images in found.items():
        if images is None:
            why = "no matplotlib" if source == "letters" else f"no folder {source} in --data"
            print(f"{source}: skipped, {why}", file=sys.stderr)
    return {source: images for source, images in found.items() if images is not None}


def _headed(item: ImageSet, repeat: int, settings: Settings, images: dict[Source, Images]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "set": item.name,
        "repeat": repeat,
        "data_sha256": {source: found.digest[:16] for source, found in images.items()},
        "settings": asdict(settings),
        "versions": versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
