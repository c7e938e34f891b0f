"""The crowd counting study: `python -m studies crowd`. Injected dropout in people counters: pixels, counts, rejection.

Trained counters and annotated frames in, one JSON for each set out. The units of the first round are stages of a set,
kept under `parts`: one without draws (plain output, constant variance, linearization), one for each rate (draws, and a
propagated variance beside them), one for each network that was trained with dropout. Those of the second round put the
stages of a set together and measure what rejecting uncertain regions is worth.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, FileError, LatedropError
from latedrop.files import digest_of
from latedrop.metrics.levels import central_quantile
from latedrop.terminal import need, number_list
from latedrop_crowd.layouts import CrowdSet, open_as_trained
from latedrop_crowd.mcnn import Trained, load_weights, shipped
from latedrop_crowd.regions import Maps, near_cells, to_cells
from latedrop_crowd.scenes import make_scenes
from studies.crowd.measures import COVERAGES, KINDS, agreement, levels
from studies.crowd.pages import pages
from studies.crowd.rejection import measure_rejection
from studies.crowd.stages import (
    FREE_COST,
    PARTS,
    RATES,
    Drawn,
    Settings,
    Setup,
    Tick,
    embedded,
    first_order,
    load,
    plain_maps,
    rate_stage,
    sampled,
    tuned,
)
from studies.driver import Study, Unit, check_at_least, chosen_names, is_finished, read_record

Record: TypeAlias = dict[str, Any]

SCHEMA = 1
SETS = {"mall": "mall", "ucsd": "ucsd", "pets": "pets2009", "own": "own", "scenes": None}
"""The sets, and the folder of each inside the data folder."""
TARGETS = ("pixel", "count")
_LEVEL = 0.9
QUICK = Settings(draws=4, rates=(0.001, 0.01, 0.1), frames=6)
_SCENES = (80, 120)  # validation and test frames


@dataclass(frozen=True)
class Job:
    """Hold all that a worker needs to open a set, wherever it runs.

    Attributes:
        name: of the set.
        where: its folder; None: scenes are made.
        weights: of the network without dropout, and of those with it: names and files.
        settings: what the results depend on.
        batch: frames that run at once.
        chunk: draws that run at once; None: what fits.
    """

    name: str
    where: Path | None
    weights: tuple[tuple[str, Path], ...]
    settings: Settings
    batch: int
    chunk: int | None


@lru_cache(maxsize=1)
def opened(job: Job, device: torch.device) -> tuple[CrowdSet, dict[str, Trained], Setup]:
    """Decode the frames of a set, and load its networks, once for all stages that run in one process."""
    networks = {stem: load_weights(path, device) for stem, path in job.weights}
    item = _open(job.name, job.where, networks[job.name], job.settings)
    return item, networks, load(item, networks[job.name], job.settings, batch=job.batch, chunk=job.chunk)


def stage(job: Job, name: str, rate: float | None, device: torch.device, tick: Tick) -> Record:
    """Measure one stage of a set: without draws, at a rate, or of a network that was trained with dropout."""
    _, networks, setup = opened(job, device)
    with tuned():
        if name in networks:
            record = embedded(setup, networks[name], tick)
        else:
            record = first_order(setup, tick) if rate is None else rate_stage(setup, rate, tick)
    return {"stage": record, "seconds": {}}


def assembled(job: Job, stages: Mapping[str, Path], device: torch.device, tick: Tick) -> Record:
    """Put the stages of a set together, and measure what rejection is worth at the rate that they choose."""
    item, networks, setup = opened(job, device)
    records = {name: read_record(path, SCHEMA) for name, path in stages.items()}
    drawn = [records[f"rate_{rate:g}"]["stage"] for rate in job.settings.rates]
    others = {stem: records[stem]["stage"] for stem in networks if stem != job.name}
    record = _assembled(setup, records["first_order"]["stage"], drawn, others)
    with tuned():
        rejection, arrays = reject(setup, record, lambda rate: sampled(setup, setup.trained, rate, tick))
    stream = BytesIO()
    np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    return record | {
        "rejection": rejection,
        "frames": {part: len(frames) for part, frames in setup.parts.items()},
        "size": list(item.shape(item.test[0])),
        "cells": {"grid": list(setup.grid), "inside": int(setup.inside.sum())},
        "enlarge": item.enlarge,
        "tf32_convolutions": device.type == "cuda" and torch.backends.cudnn.allow_tf32,
        "seconds": {name: each["seconds"]["total"] for name, each in records.items()},
        "files": {f"{job.name}.npz": stream.getvalue()},
    }


def reject(
    setup: Setup, record: Mapping[str, Any], draw: Callable[[float], Mapping[str, Drawn]]
) -> tuple[Record, dict[str, npt.NDArray[Any]]]:
    """Measure rejection at the rate and scale that a record chose for pixels; return arrays for pictures, too.

    Args:
        setup: frames, network and settings.
        record: its `chosen`, `rates` and `injected` are read.
        draw: the maps of both parts at a rate.
    """
    best = record["chosen"]["pixel"]["scaled"]
    fit = {name: values[best] for name, values in record["injected"]["pixel"]["fit"].items()}
    maps = draw(record["rates"][best])
    return _rejection(setup, maps, plain_maps(setup), fit), _examples(setup, maps, fit)


def _assembled(setup: Setup, free: Record, drawn: Sequence[Record], others: Mapping[str, Record]) -> Record:
    rates = setup.settings.rates
    injected = {target: _columns([stage[target] for stage in drawn]) for target in TARGETS}
    beside = {"pixel": _columns([s["propagated"] for s in drawn]), "count": _columns(free["linear"]["rates"])}
    beside["pixel"]["agreement"] = _lists([stage["propagated"]["agreement"] for stage in drawn])
    beside["count"]["agreement"] = _lists(
        [_count_agreement(rate, free, stage) for rate, stage in zip(rates, drawn, strict=True)]
    )
    chosen = {target: _chosen(injected[target]) for target in TARGETS}
    free_chosen = {target: _chosen(beside[target]) for target in TARGETS}
    curves = {
        target: {
            part: {
                kind: drawn[chosen[target]["unscaled" if kind == "unscaled" else "scaled"]][target][part]["curves"][
                    kind
                ]
                for kind in KINDS
            }
            for part in PARTS
        }
        for target in TARGETS
    }
    return {
        "rates": list(rates),
        "levels": levels(),
        "coverages": list(COVERAGES),
        "sites": free["sites"],
        "injected": injected,
        "sampling_free": beside,
        "chosen": chosen,
        "sampling_free_chosen": free_chosen,
        "curves": curves,
        "constant": free["constant"],
        "size_control": free["size_control"],
        "per_site": free["linear"]["per_site"],
        "conformal": {
            "constant": free["conformal"],
            "injected": drawn[chosen["count"]["scaled"]]["conformal"],
        },
        "embedded": {name: _without(stage, "series") for name, stage in others.items()},
        "series": _series(setup, drawn[chosen["count"]["scaled"]], free),
    }


def _columns(rows: Sequence[Record]) -> Record:
    """From one record for each rate to lists over the rates."""
    columns: Record = {}
    for part in PARTS:
        measures = [_without(row[part], "curves", "path", "blocks", "entries") for row in rows]
        columns[part] = _lists(measures)
        columns[part]["entries"] = rows[0][part]["entries"]
    columns["fit"] = _lists([row["fit"] for row in rows])
    columns["path"] = _lists([row["test"]["path"] for row in rows])
    columns["blocks"] = _lists([row["test"]["blocks"] for row in rows])
    return columns


def _chosen(columns: Record) -> dict[str, int]:
    """The rate, by its place, of least NLL on the validation frames: of each kind but the relaxed one."""
    validation = columns["validation"]
    return {kind: int(np.argmin(validation[f"nll_{kind}"])) for kind in KINDS if kind != "relaxed"}


def _count_agreement(rate: float, free: Record, stage: Record) -> Record:
    first = torch.tensor(free["linear"]["first_order"]["test"], dtype=torch.float64) * rate / (1 - rate)
    return agreement(first, torch.tensor(stage["series"]["test"]["variance"], dtype=torch.float64))


def _series(setup: Setup, stage: Record, free: Record) -> Record:
    """Counts of the test frames with their interval, at the rate that the validation frames choose."""
    frames, counts, fit = setup.parts["test"], stage["series"]["test"], stage["count"]["fit"]
    mean = np.array(counts["mean"])
    std = np.sqrt(np.maximum(counts["variance"], fit["least"]))
    reach = central_quantile(_LEVEL) * std * np.sqrt(fit["relaxed_scale"])
    return {
        "frame": list(frames.places),
        "truth": [int(count) for count in frames.count.tolist()],
        "plain": _round(free["plain_count"]["test"]),
        "mean": _round(mean),
        "std": _round(std),
        "level": _LEVEL,
        "low": _round(mean - reach),
        "high": _round(mean + reach),
    }


def _rejection(setup: Setup, maps: Mapping[str, Drawn], plain: Mapping[str, Tensor], fit: Record) -> Record:
    """False positives before and after, by `latedrop_crowd.regions`: the network's own map, with relaxed deviations.

    The mean over draws has a bias that the network itself has not; to reject regions against it proves little.
    """
    roi = setup.inside.reshape(setup.grid).cpu().numpy()
    parts = {}
    for name, drawn in maps.items():
        heads = [to_cells(points, setup.trained.stride) for points in setup.parts[name].points]
        mean, std = _full(setup, plain[name]), _full(setup, _std(drawn, fit))
        parts[name] = Maps(mean, std, heads, roi)
    near = near_cells(setup.sigma, setup.trained.stride)
    error = (maps["test"].count - setup.parts["test"].count).double().cpu().numpy()
    draws = {"mae": float(np.abs(error).mean()), "rmse": float((error**2).mean() ** 0.5)}
    result = measure_rejection(parts["validation"], parts["test"], setup.settings.seed, near=near)
    return result | {"map": "plain", "draws": draws}


def _examples(setup: Setup, maps: Mapping[str, Drawn], fit: Record) -> dict[str, npt.NDArray[Any]]:
    """Mean, relaxed deviation and target of two test frames: a usual one and the fullest."""
    frames, drawn = setup.parts["test"], maps["test"]
    order = frames.count.argsort(stable=True)
    chosen = torch.stack([order[len(order) // 2], order[-1]])
    values = {"mean": drawn.mean, "std": _std(drawn, fit), "target": frames.density}
    arrays = {name: _full(setup, value[chosen]).astype(np.float16) for name, value in values.items()}
    return arrays | {"frame": np.array([frames.places[index] for index in chosen.tolist()])}


def _std(drawn: Drawn, fit: Record) -> Tensor:
    std: Tensor = (drawn.variance.clamp_min(fit["least"]) * fit["relaxed_scale"]).sqrt()
    return std


def _full(setup: Setup, values: Tensor) -> npt.NDArray[np.float32]:
    """Cells of the region of interest `(N, cells)` as maps `(N, h, w)`, zero elsewhere."""
    full = values.new_zeros(len(values), setup.inside.numel())
    full[:, setup.inside] = values
    array: npt.NDArray[np.float32] = full.reshape(-1, *setup.grid).float().cpu().numpy()
    return array


def _lists(rows: Sequence[Mapping[str, Any]]) -> Record:
    return {
        name: _lists([row[name] for row in rows]) if isinstance(value, Mapping) else [row[name] for row in rows]
        for name, value in rows[0].items()
    }


def _without(record: Mapping[str, Any], *names: str) -> Record:
    return {name: value for name, value in record.items() if name not in names}


def _round(values: Sequence[float] | npt.NDArray[Any]) -> list[float]:
    return [round(float(value), 4) for value in values]


def _options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--weights", type=Path, help="folder of NAME.safetensors; those of the package by default")
    add("--draws", type=int, help=f"thinned networks for each rate; {Settings().draws} by default")
    add("--rates", help=f"numbers separated by commas; {', '.join(f'{rate:g}' for rate in RATES)} by default")
    add("--every", type=int, default=1, help="take each k-th validation and test frame")
    add("--batch", type=int, default=8, help="frames that run at once")
    add("--chunk", type=int, help="draws that run at once; what fits by default")


def _settings(options: Namespace) -> Settings:
    check_at_least(options, draws=2, every=1, batch=1, chunk=1)
    quick = QUICK if options.quick else Settings()
    draws = quick.draws if options.draws is None else options.draws
    rates = quick.rates if options.rates is None else _rates(options.rates)
    return replace(quick, draws=draws, rates=rates, every=options.every, seed=options.seed)


def _units(options: Namespace) -> Iterator[list[Unit]]:
    need("crowd", "scipy", "safetensors")
    settings, parts = _settings(options), options.out.absolute() / "parts"
    stages, sets = [], []
    for name in chosen_names("scenes" if options.quick and options.sets is None else options.sets, SETS):
        job = _job(name, options, settings)
        if job is None:
            continue
        hashes = {stem: digest_of(path) for stem, path in job.weights}
        networks = {stem: load_weights(path, torch.device("cpu")) for stem, path in job.weights}
        depends = {"set": name, "settings": asdict(settings) | {"rates": list(settings.rates)}}
        about = {stem: {"sha256": hashes[stem], "about": dict(net.about)} for stem, net in networks.items()}
        result = Unit(f"{name}.json", depends | {"networks": about}, 0.0, partial(assembled, job, {}))
        if not options.fresh and is_finished(options.out / result.file, SCHEMA, result.key):
            sets.append(result)
            continue
        item = _open(name, job.where, networks[name], settings)
        total = sum(len(settings.chosen(item, part)) for part in PARTS)
        costs: dict[str, tuple[int, float | None]] = {"first_order": (FREE_COST, None)}
        costs |= {f"rate_{rate:g}": (settings.draws + FREE_COST, rate) for rate in settings.rates}
        costs |= {stem: (settings.draws, None) for stem in networks if stem != name}
        for each, (cost, rate) in costs.items():
            key = depends | {"weights": hashes.get(each, hashes[name])}
            stages.append(Unit(f"parts/{name}/{each}.json", key, cost * total, partial(stage, job, each, rate)))
        paths = {each: parts / name / f"{each}.json" for each in costs}
        sets.append(replace(result, work=settings.draws * total, measure=partial(assembled, job, paths)))
    yield stages
    yield sets
    for unit in sets:  # all are finished now
        for path in (parts / Path(unit.file).stem).glob("*.json"):
            path.unlink()
        for path in (parts / Path(unit.file).stem, parts):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _job(name: str, options: Namespace, settings: Settings) -> Job | None:
    """The set with its files; None, and a line that says why, where some are missing."""
    try:
        weights = _weights(name, options.weights)
    except LatedropError as error:
        print(f"{name}: skipped, {' '.join(str(error).split())}", file=sys.stderr)
        return None
    inner = SETS[name]
    where = None if inner is None or options.data is None else options.data / inner
    if inner is not None and (where is None or not where.is_dir()):
        print(f"{name}: skipped, no folder {inner} in --data {options.data or '(not given)'}", file=sys.stderr)
        return None
    others = sorted(weights.parent.glob(f"{name}-embedded-*.safetensors"))
    files = ((name, weights), *((path.stem, path) for path in others))
    return Job(name, where, files, settings, options.batch, options.chunk)


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
        if SETS.get(name) is None:
            return shipped(name)
        folder = Path(__file__).parent / "weights"
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise FileError(f"expected weights at {path}; there is no such file.")
    return path


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(sorted(set(number_list("--rates", text))))
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise ArgumentError(f"expected --rates between 0 and 1, separated by commas; found {text!r}.")
    return rates


def _read(folder: Path, options: Namespace) -> dict[str, dict[str, Any]]:
    paths = {name: folder / f"{name}.json" for name in SETS}
    return {name: read_record(path, SCHEMA) for name, path in paths.items() if path.exists()}


STUDY = Study(
    "crowd",
    "Injected dropout in people counters on Mall, UCSD, PETS2009 and scenes: counts, maps, rejection.",
    "folder that holds mall, ucsd and pets2009; scenes need none",
    "scenes only, few frames, rates and draws",
    SCHEMA,
    _options,
    _units,
    _read,
    pages,
)
