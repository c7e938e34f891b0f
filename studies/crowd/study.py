"""The crowd counting study: `python -m studies crowd`. Injected dropout in people counters: pixels, counts, rejection.

Trained counters and annotated frames in, one JSON for each set out. A unit is a set: measured without draws (plain
output, constant variance, linearization), at each rate (draws, and a propagated variance beside them), and with each
network that was trained with dropout; then what rejecting uncertain regions is worth at the rate that is chosen.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import DataError, FileError
from latedrop.files import digest_of
from latedrop.metrics.levels import central_quantile
from latedrop.terminal import need
from latedrop_crowd.layouts import CrowdSet, open_as_trained
from latedrop_crowd.mcnn import Trained, load_weights, shipped
from latedrop_crowd.regions import Maps, near_cells, to_cells
from latedrop_crowd.scenes import make_scenes
from studies.crowd import stages
from studies.crowd.measures import COVERAGES, KINDS, agreement, levels
from studies.crowd.pages import pages
from studies.crowd.rejection import measure_rejection
from studies.crowd.stages import FREE_COST, PARTS, Drawn, Settings, Setup, Tick, sampled
from studies.driver import Study, Unit, check_at_least, chosen_names, read_sets

Record: TypeAlias = dict[str, Any]

SCHEMA = 1
SETS = {"mall": "mall", "ucsd": "ucsd", "pets": "pets2009", "own": "own", "scenes": None}
"""The sets, and the folder of each inside the data folder."""
TARGETS = ("pixel", "count")
_LEVEL = 0.9
QUICK = Settings(draws=4, rates=(0.001, 0.01, 0.1), frames=6)
_SCENES = (80, 120)  # validation and test frames


def measure(
    item: CrowdSet,
    weights: Mapping[str, Path],
    settings: Settings,
    device: torch.device,
    tick: Tick,
) -> Record:
    """Measure a set. The first weights are those of the network without dropout."""
    trained, *others = (load_weights(path, device) for path in weights.values())
    setup = stages.load(item, trained, settings)
    # cuDNN looks for the fastest convolution of each shape, of which there are few.
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32):
        free = stages.first_order(setup, tick)
        drawn = [stages.rate_stage(setup, rate, tick) for rate in settings.rates]
        dropped = {stem: stages.embedded(setup, one, tick) for stem, one in zip(list(weights)[1:], others, strict=True)}
        record = _assembled(setup, free, drawn, dropped)
        rejection, arrays = reject(setup, record, tick)
    stream = BytesIO()
    np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    return record | {
        "rejection": rejection,
        "frames": {part: len(frames) for part, frames in setup.parts.items()},
        "size": list(item.shape(item.test[0])),
        "cells": {"grid": list(setup.grid), "inside": int(setup.inside.sum())},
        "enlarge": item.enlarge,
        "tf32_convolutions": device.type == "cuda" and torch.backends.cudnn.allow_tf32,
        "seconds": {},
        "files": {"scenes.npz": stream.getvalue()} if item.name == "scenes" else {},
    }


def reject(setup: Setup, record: Mapping[str, Any], tick: Tick) -> tuple[Record, dict[str, npt.NDArray[Any]]]:
    """Measure rejection at the rate and scale that a record chose for pixels; return arrays for a picture, too."""
    best = record["chosen"]["pixel"]["scaled"]
    fit = {name: values[best] for name, values in record["injected"]["pixel"]["fit"].items()}
    maps = sampled(setup, setup.trained, record["rates"][best], tick)
    return _rejection(setup, maps, stages.plain_maps(setup), fit), _examples(setup, maps, fit)


def _assembled(setup: Setup, free: Record, drawn: Sequence[Record], others: Mapping[str, Record]) -> Record:
    rates = setup.settings.rates
    injected = {target: _columns([stage[target] for stage in drawn]) for target in TARGETS}
    beside = {"pixel": _columns([s["propagated"] for s in drawn]), "count": _columns(free["linear"]["rates"])}
    beside["pixel"]["agreement"] = _lists([stage["propagated"]["agreement"] for stage in drawn])
    agreements = [_count_agreement(rate, free, stage) for rate, stage in zip(rates, drawn, strict=True)]
    beside["count"]["agreement"] = _lists(agreements)
    chosen = {target: _chosen(injected[target]) for target in TARGETS}
    free_chosen = {target: _chosen(beside[target]) for target in TARGETS}

    def curve(target: str, part: str, kind: str) -> Any:
        place = chosen[target]["unscaled" if kind == "unscaled" else "scaled"]
        return drawn[place][target][part]["curves"][kind]

    return {
        "rates": list(rates),
        "levels": levels(),
        "coverages": list(COVERAGES),
        "sites": free["sites"],
        "injected": injected,
        "sampling_free": beside,
        "chosen": chosen,
        "sampling_free_chosen": free_chosen,
        "curves": {
            target: {part: {kind: curve(target, part, kind) for kind in KINDS} for part in PARTS} for target in TARGETS
        },
        "constant": free["constant"],
        "size_control": free["size_control"],
        "per_site": free["linear"]["per_site"],
        "conformal": {"constant": free["conformal"], "injected": drawn[chosen["count"]["scaled"]]["conformal"]},
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
    return torch.sqrt(drawn.variance.clamp_min(fit["least"]) * fit["relaxed_scale"])


def _full(setup: Setup, values: Tensor) -> npt.NDArray[np.float32]:
    """Cells of the region of interest `(N, cells)` as maps `(N, h, w)`, zero elsewhere."""
    full = values.new_zeros(len(values), setup.inside.numel())
    full[:, setup.inside] = values
    return np.asarray(full.reshape(-1, *setup.grid).float().cpu())


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
    add("--every", type=int, default=1, help="take each k-th validation and test frame")


def _settings(options: Namespace) -> Settings:
    check_at_least(options, draws=2, every=1)
    quick = QUICK if options.quick else Settings()
    draws = quick.draws if options.draws is None else options.draws
    return replace(quick, draws=draws, every=options.every, seed=options.seed)


def _units(options: Namespace) -> list[Unit]:
    need("crowd", "scipy", "safetensors")
    settings, units = _settings(options), []
    for name in chosen_names("scenes" if options.quick and options.sets is None else options.sets, SETS):
        try:
            weights, where = _weights(name, options.weights), _folder(name, options.data)
        except FileError as error:
            print(f"{name}: skipped, {' '.join(str(error).split())}", file=sys.stderr)
            continue
        networks = {stem: load_weights(path, torch.device("cpu")) for stem, path in weights.items()}
        item = _open(name, where, networks[name], settings)
        about = {stem: {"sha256": digest_of(weights[stem]), "about": dict(net.about)} for stem, net in networks.items()}
        key = {"set": name, "settings": asdict(settings) | {"rates": list(settings.rates)}, "networks": about}
        passes = FREE_COST + len(settings.rates) * (settings.draws + FREE_COST) + len(weights) * settings.draws
        frames = sum(len(settings.chosen(item, part)) for part in PARTS)
        call = partial(measure, item, weights, settings)
        units.append(Unit(f"{name}.json", key, passes * frames, call))
    return units


def _folder(name: str, data: Path | None) -> Path | None:
    """The folder of a set; None for scenes, which need none."""
    inner = SETS[name]
    if inner is None:
        return None
    if data is None or not (data / inner).is_dir():
        raise FileError(f"no folder {inner} in --data {data or '(not given)'}")
    return data / inner


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


def _weights(name: str, folder: Path | None) -> dict[str, Path]:
    """The networks that a set is measured with: one that has not seen its validation frames, and those with dropout."""
    if folder is None:
        folder = shipped(name).parent if SETS[name] is None else Path(__file__).parent / "weights"
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise FileError(f"expected weights at {path}; there is no such file.")
    return {name: path} | {path.stem: path for path in sorted(folder.glob(f"{name}-embedded-*.safetensors"))}


STUDY = Study(
    "crowd",
    "Injected dropout in people counters on Mall, UCSD, PETS2009 and scenes: counts, maps, rejection.",
    "folder that holds mall, ucsd and pets2009; scenes need none",
    "scenes only, few frames, rates and draws",
    SCHEMA,
    _options,
    _units,
    partial(read_sets, SETS, SCHEMA),
    pages,
)
