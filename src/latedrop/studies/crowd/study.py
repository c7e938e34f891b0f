"""The crowd counting study, whole: `latedrop study crowd`, or `python -m latedrop.studies.crowd`.

Trained counters and annotated frames in, one JSON for each set out. Every finished rate is kept on disk, so a run that
was stopped goes on where it was. Pages and figures are made from the JSON files alone.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from latedrop.crowd.layouts import CrowdSet, open_as_trained
from latedrop.crowd.mcnn import Trained, load_weights, shipped
from latedrop.crowd.scenes import make_scenes
from latedrop.devices import chosen_device, device_name, versions
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError
from latedrop.files import check_apart, digest_of, write_aside
from latedrop.json_text import understood
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
from latedrop.studies.crowd.controls import size_control
from latedrop.studies.crowd.measured_set import RATES, Settings, Study, load, plain_counts, sampled, timed, tuned
from latedrop.studies.crowd.parts import SCHEMA, Parts
from latedrop.studies.crowd.record import measure, packed, reject, same_draws, work
from latedrop.studies.spread import Cluster, cluster_options, spread
from latedrop.terminal import folder, need, number_list

__all__ = ["SETS", "STOPPED", "Request", "main", "read", "run", "study"]

SETS = {"mall": "mall", "ucsd": "ucsd", "pets": "pets2009", "own": "own", "scenes": None}
"""The sets, and the folder of each inside the data folder."""
STOPPED = "latedrop: stopped; finished rates are kept, and the same command goes on from there."
_QUICK = Settings(draws=4, rates=(0.001, 0.01, 0.1), frames=6)
_SCENES = (80, 120)  # validation and test frames


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        out: folder of the results.
        data: folder that holds `mall`, `ucsd` and `pets2009`; the scenes need none.
        sets: names separated by commas; None: all.
        weights: folder of `NAME.safetensors`; None: those that come with the package.
        draws: thinned networks for each rate.
        rates: separated by commas; None: the paper's ten, and 0.02, 0.05 and 0.1.
        every: take every so many validation and test frames.
        seed: of the masks.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        batch: frames that run at once.
        chunk: draws that run at once; None: what fits.
        quick: scenes only, few frames, rates and draws.
        fresh: compute again what is there.
        rejection: measure only the rejection again, of sets that are finished.
        controls: measure only the controls again, of sets that are finished: no draws are needed.
        ray: `local`, `auto` or the address of a cluster, whose workers run the sets; None: here, one after the other.
        gpus: that each set takes of such a worker.
        progress: show bars.
    """

    out: Path
    data: Path | None = None
    sets: str | None = None
    weights: Path | None = None
    draws: int | None = None
    rates: str | None = None
    every: int = 1
    seed: int = 0
    device: str = "auto"
    batch: int = 8
    chunk: int | None = None
    quick: bool = False
    fresh: bool = False
    rejection: bool = False
    controls: bool = False
    ray: str | None = None
    gpus: float = 0.0
    progress: bool = True

    @property
    def again(self) -> str:
        """The option by which finished results are measured again in part; empty where all is measured."""
        return "--rejection" if self.rejection else "--controls" if self.controls else ""

    def settings(self) -> Settings:
        """What the results depend on."""
        check_at_least(self, draws=2, every=1, batch=1, chunk=1)
        plain = _QUICK if self.quick else Settings()
        draws = plain.draws if self.draws is None else self.draws
        rates = plain.rates if self.rates is None else _rates(self.rates)
        return replace(plain, draws=draws, rates=rates, every=self.every, seed=self.seed)


def run(request: Request) -> list[Path]:
    """Run the study; the JSON files that are then in `out`, finished before or now.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    need("crowd", "scipy", "safetensors")
    settings, cluster = request.settings(), Cluster(request.ray, request.gpus)
    if cluster.ray is None:
        chosen_device(request.device)  # a wrong one is told before the work
    wanted = chosen_names("scenes" if request.quick and request.sets is None else request.sets, SETS)
    if request.again:
        wanted = _finished(wanted, request)
    if request.data is not None and not request.data.is_dir():
        raise FileError(f"expected the folder of the data sets at {request.data}; it is not there. Check --data.")
    if request.weights is not None and not request.weights.is_dir():
        raise FileError(f"expected the folder of the weights at {request.weights}; it is not there. Check --weights.")
    folder(request.out)
    jobs = {name: partial(_run_set, name, _reached(request), settings) for name in wanted}
    finished = {}
    for name, (path, said) in spread(jobs, cluster):
        print(f"{name}: {said}", file=sys.stderr)
        if path is not None:
            finished[name] = request.out / path
    if not finished:
        raise FileError(
            f"expected weights, and --data for what is not made here, of one of {', '.join(wanted)}; found none. "
            "See the lines above, and pass --data or --weights."
        )
    return [finished[name] for name in wanted if name in finished]


def _reached(request: Request) -> Request:
    """With folders that a worker finds, wherever it runs, and no bars, which it has nowhere to show."""
    if request.ray is None:
        return request
    found = {name: getattr(request, name) for name in ("out", "data", "weights")}
    return replace(
        request, progress=False, **{name: path.absolute() for name, path in found.items() if path is not None}
    )


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The results in a folder by set, in the order of `SETS`."""
    found = {
        name: read_result(results / f"{name}.json", SCHEMA) for name in SETS if (results / f"{name}.json").exists()
    }
    if not found:
        raise FileError(f"expected results such as mall.json in {results}; found none. Run the study first.")
    return found


def study(request: Request, *, figures_only: bool = False) -> list[Path]:
    """Run, unless only figures are wanted, and then write pages and figures; all files."""
    from latedrop.studies.crowd import pages

    check_apart({"--out": request.out}, {"--data": request.data, "--weights": request.weights})
    several = [name for name, on in (("--figures", figures_only), ("--rejection", request.rejection),
                                     ("--controls", request.controls)) if on]  # fmt: skip
    if len(several) > 1:
        raise ArgumentError(f"expected one of {several[0]} and {several[1]}; found both. Leave one out.")
    finished = [] if figures_only else run(request)
    results = read(request.out)
    with understood(request.out, "results of this study", "Delete those that are damaged, and run it again."):
        return [*finished, *pages.write(results, request.out)]


def main(arguments: Sequence[str] | None = None, program: str = "python -m latedrop.studies.crowd") -> int:
    """The command line without extras; the exit code."""
    parser = study_parser(
        program,
        "Injected dropout in people counters on Mall, UCSD, PETS2009 and scenes: counts, maps, rejection.",
        out="crowd-study",
        data="folder that holds mall, ucsd and pets2009; scenes need none",
        quick="scenes only, few frames, rates and draws",
        example="--data DIR --out crowd-study",
    )
    cluster_options(parser)
    add = parser.add_argument
    add("--weights", type=Path, help="folder of NAME.safetensors; those of the package by default")
    add("--draws", type=int, help=f"thinned networks for each rate; {Settings().draws} by default")
    add("--rates", help=f"numbers separated by commas; {', '.join(f'{rate:g}' for rate in RATES)} by default")
    add("--every", type=int, default=1, help="take each k-th validation and test frame")
    add("--batch", type=int, default=8, help="frames that run at once")
    add("--chunk", type=int, help="draws that run at once; what fits by default")
    add("--rejection", action="store_true", help="measure only the rejection again, of finished sets")
    add("--controls", action="store_true", help="measure only the controls again, of finished sets")
    return run_command(parser, arguments, lambda options, only: study(Request(**options), figures_only=only), STOPPED)


def _run_set(name: str, request: Request, settings: Settings) -> tuple[str | None, str]:
    """One set, kept, skipped, or measured and written: the name of its file in `out`, and what to say of it."""
    try:
        weights = _weights(name, request.weights)
    except LatedropError as error:
        return None, f"skipped, {' '.join(str(error).split())}"
    files = {
        name: weights,
        **{path.stem: path for path in sorted(weights.parent.glob(f"{name}-embedded-*.safetensors"))},
    }
    hashes = {stem: digest_of(path) for stem, path in files.items()}
    result = request.out / f"{name}.json"
    before = _same(result, settings, hashes) if result.exists() and not request.fresh else None
    if before is not None and not request.again:
        return result.name, "kept, finished before"
    inner = SETS[name]
    where = None if inner is None or request.data is None else request.data / inner
    if inner is not None and (where is None or not where.is_dir()):
        return None, f"skipped, no folder {inner} in --data {request.data or '(not given)'}"
    device = chosen_device(request.device)
    networks = {stem: load_weights(path, device) for stem, path in files.items()}
    item = _open(name, where, networks[name], settings)
    parts = Parts(request.out / "parts" / name, {"settings": _plain(settings), "weights": hashes[name]}, request.fresh)
    start = time.perf_counter()
    arrays: dict[str, Any] = {}
    if before is None:
        record, arrays = _measured(item, networks, hashes, parts, request, settings)
    elif request.controls:
        record = _controlled(item, networks[name], before, settings, request)
    else:
        record, arrays = _rejected(item, networks[name], before, request, settings)
    if arrays:
        write_aside(result.with_suffix(".npz"), packed(arrays))
    write_aside(result, dumped(record))
    parts.clear()
    return result.name, f"{time.perf_counter() - start:.1f} s"


def _measured(
    item: CrowdSet,
    networks: Mapping[str, Trained],
    hashes: Mapping[str, str],
    parts: Parts,
    request: Request,
    settings: Settings,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of a set, and the arrays beside it; the stages in `parts` can go once both are written."""
    name, start = item.name, time.perf_counter()
    trained = networks[name]
    device = next(trained.model.parameters()).device
    others = {stem: (network, hashes[stem]) for stem, network in networks.items() if stem != name}
    frames, decoding = timed(lambda: load(item, trained, settings, batch=request.batch, chunk=request.chunk), device)
    with bar(name, work(frames, len(others)), request.progress) as shown:
        record, arrays = measure(frames, others, parts, shown.update)
    about = {
        "schema": SCHEMA,
        "set": name,
        "settings": _plain(settings),
        "networks": {
            stem: {"sha256": hashes[stem], "about": dict(network.about)} for stem, network in networks.items()
        },
        "frames": {part: len(found) for part, found in frames.parts.items()},
        "size": list(item.shape(item.test[0])),
        "cells": {"grid": list(frames.grid), "inside": int(frames.inside.sum())},
        "enlarge": item.enlarge,
        "seconds": {"decoding": decoding, **parts.seconds, "this_run": round(time.perf_counter() - start, 2)},
        "machine": _machine(device),
        "versions": versions(),
    }
    return about | record, arrays


def _rejected(
    item: CrowdSet, trained: Trained, record: Mapping[str, Any], request: Request, settings: Settings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A finished record with the rejection measured again, and new arrays; all else in it stays."""
    frames = load(item, trained, settings, batch=request.batch, chunk=request.chunk)
    _check_frames(frames, record, item.name)
    with bar(item.name, settings.draws * frames.total, request.progress) as shown, tuned():
        rejection, seconds, arrays = reject(
            frames, record, lambda rate: sampled(frames, frames.trained, rate, settings, shown.update)
        )
    here = {"machine": _machine(frames.inside.device), "versions": versions()}
    alike = same_draws(rejection, record)
    if not alike or any(record[name] != found for name, found in here.items()):
        rejection["measured_on"] = here | {"same_draws": alike}
    return {**record, "rejection": rejection, "seconds": record["seconds"] | {"rejection": seconds}}, arrays


def _controlled(
    item: CrowdSet, trained: Trained, record: Mapping[str, Any], settings: Settings, request: Request
) -> dict[str, Any]:
    """A finished record with its controls measured again: the validation frames are counted once without dropout."""
    series = record["series"]
    few = replace(item, test=item.test[:1])  # the test frames' counts are in the record
    frames = load(few, trained, replace(settings, frames=settings.frames), batch=request.batch)
    held = frames.parts["validation"]
    if len(held) != record["frames"]["validation"]:
        raise DataError(
            f"expected the {record['frames']['validation']} validation frames that the result of {item.name} is of; "
            f"found {len(held)}. Check --data."
        )
    test = torch.tensor(series["plain"]), torch.tensor(series["truth"])
    parts = {"validation": (plain_counts(frames, "validation"), held.count), "test": test}
    return {**record, "size_control": size_control(parts)}


def _open(name: str, where: Path | None, trained: Trained, settings: Settings) -> CrowdSet:
    """The set as the network was trained on it."""
    about = trained.about
    if where is None:
        most = None if settings.frames is None else settings.frames * settings.every
        item = make_scenes(0, *(size if most is None else min(most, size) for size in _SCENES))
    else:
        item = open_as_trained(name, where, trained)
    if about.get("set", name) != name:
        raise DataError(
            f"expected weights trained on {name}; they say {about['set']}. Rename the file, or train again."
        )
    if about.get("folds"):
        raise DataError(
            f"expected weights of {name} that have not seen its validation frames; found some that were trained on all "
            "frames, with --folds. Pass the folder of others as --weights, or train without --folds."
        )
    return item if about.get("sigma", item.sigma) == item.sigma else replace(item, sigma=about["sigma"])


def _weights(name: str, folder: Path | None) -> Path:
    """The network that a set is measured with: one that has not seen its validation frames."""
    if folder is None:
        return shipped(name if SETS.get(name) is None else f"study/{name}")
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise FileError(f"expected weights at {path}; there is no such file.")
    return path


def _finished(wanted: Sequence[str], request: Request) -> list[str]:
    """The sets whose rejection can be measured again; those that were named must all be there."""
    if request.fresh:
        raise ArgumentError(f"expected one of --fresh and {request.again}; found both. Leave one out.")
    there = [name for name in wanted if (request.out / f"{name}.json").exists()]
    missing = [name for name in wanted if name not in there]
    if not there or (missing and request.sets is not None):
        raise FileError(
            f"expected finished results in {request.out}, to measure them again in part; found none of "
            f"{', '.join(missing)}. Run the study first."
        )
    return there


def _check_frames(study: Study, record: Mapping[str, Any], name: str) -> None:
    """Raise unless these are the frames that a finished result is of."""
    test = study.parts["test"]
    found = {part: len(frames) for part, frames in study.parts.items()}, list(test.places), test.count.tolist()
    if found != (record["frames"], record["series"]["frame"], record["series"]["truth"]):
        raise DataError(
            f"expected the frames of {name} that its result is of, {record['frames']}; found {found[0]}, or as many "
            "with other people. Check --data."
        )


def _same(path: Path, settings: Settings, networks: Mapping[str, str]) -> dict[str, Any]:
    """A finished result, if it was made with these settings and weights."""
    record = read_result(path, SCHEMA)
    with understood(path, "a result of this study", "Delete it."):
        found = {stem: network["sha256"] for stem, network in record["networks"].items()}
        check_same(path, "settings", _plain(settings), record["settings"])
    check_same(path, "weights", networks, found)
    return record


def _plain(settings: Settings) -> dict[str, Any]:
    """As JSON gives it back."""
    return asdict(settings) | {"rates": list(settings.rates)}


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(sorted(set(number_list("--rates", text))))
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise ArgumentError(f"expected --rates between 0 and 1, separated by commas; found {text!r}.")
    return rates


def _machine(device: torch.device) -> dict[str, Any]:
    tf32 = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return {"device": device_name(device), "system": platform.system(), "tf32_convolutions": tf32}


if __name__ == "__main__":
    sys.exit(main())
