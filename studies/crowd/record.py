"""All stages of one set, run or read, put together as the record that goes to JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from math import isclose
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.crowd.mcnn import Trained
from latedrop.crowd.regions import Maps, measure_rejection, near_cells, to_cells
from latedrop.metrics.levels import central_quantile
from studies.crowd.measured_set import (
    FREE_COST,
    PARTS,
    Drawn,
    Study,
    Tick,
    embedded,
    first_order,
    plain_maps,
    rate_stage,
    sampled,
    timed,
    tuned,
)
from studies.crowd.measures import COVERAGES, KINDS, agreement, levels
from studies.crowd.parts import Parts

__all__ = ["TARGETS", "measure", "packed", "reject", "same_draws", "work"]

Record: TypeAlias = dict[str, Any]

TARGETS = ("pixel", "count")
_LEVEL = 0.9
_ROUNDING = 2e-3  # of a count error: a GPU may choose other convolutions in another run


def work(study: Study, networks: int) -> int:
    """How much `measure` reports to its `tick`; `networks` counts the embedded ones."""
    settings = study.settings
    rates = len(settings.rates) * (settings.draws + FREE_COST)
    return study.total * (FREE_COST + rates + networks * settings.draws)


def measure(
    study: Study, others: Mapping[str, tuple[Trained, str]], parts: Parts, tick: Tick
) -> tuple[Record, dict[str, npt.NDArray[Any]]]:
    """Everything the study knows of a set, and the arrays that pictures need.

    Args:
        study: frames, network and settings.
        others: embedded networks and the SHA-256 of their files, by name.
        parts: finished stages.
        tick: told how many passes were made.
    """
    run = _Runs(study, parts, tick, study.inside.device)
    with tuned():
        free = run.stage("first_order", lambda: first_order(study, tick), FREE_COST)
        drawn = [run.rate(rate) for rate in study.settings.rates]
        trained_so = {
            name: run.stage(name, _embedded(study, network, tick), study.settings.draws, network=sha)
            for name, (network, sha) in others.items()
        }
        record = _assembled(study, free, drawn, trained_so)
        rejection, parts.seconds["rejection"], arrays = reject(study, record, run.maps)
    return record | {"rejection": rejection}, arrays


def reject(
    study: Study, record: Mapping[str, Any], draw: Callable[[float], Mapping[str, Drawn]]
) -> tuple[Record, float, dict[str, npt.NDArray[Any]]]:
    """What rejection is worth at the rate and scale that a record chose for pixels; its seconds; arrays for pictures.

    Args:
        study: frames, network and settings.
        record: its `chosen`, `rates` and `injected` are read.
        draw: the maps of both parts at a rate.
    """
    best = record["chosen"]["pixel"]["scaled"]
    fit = {name: values[best] for name, values in record["injected"]["pixel"]["fit"].items()}
    maps = draw(record["rates"][best])
    rejection, seconds = timed(lambda: _rejection(study, maps, plain_maps(study), fit), study.inside.device)
    return rejection, seconds, _examples(study, maps, fit)


def same_draws(rejection: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether the maps of a rejection have the count errors that the record has at their rate, up to rounding.

    Masks may differ by device and version; then the scale was fitted to other draws of the same distribution.
    """
    best, errors = record["chosen"]["pixel"]["scaled"], record["injected"]["count"]["test"]
    return all(isclose(rejection["draws"][name], errors[name][best], rel_tol=_ROUNDING) for name in ("mae", "rmse"))


class _Runs:
    """Runs stages, or finds them; keeps the maps of the rate that looks best so far."""

    def __init__(self, study: Study, parts: Parts, tick: Tick, device: torch.device) -> None:
        self.study, self.parts, self.tick, self.device = study, parts, tick, device
        self._best: tuple[float, float, dict[str, Drawn]] | None = None

    def stage(self, name: str, run: Callable[[], Record], cost: int, **more: Any) -> Record:
        before = self.parts.find(name, **more)
        if before is not None:
            self.tick(cost * self.study.total)
            return before
        return self.parts.keep(name, lambda: timed(run, self.device), **more)

    def rate(self, rate: float) -> Record:
        def run() -> Record:
            stage, maps = rate_stage(self.study, rate, self.tick)
            score = stage["pixel"]["validation"]["nll_scaled"]
            if self._best is None or score < self._best[0]:
                self._best = score, rate, maps
            return stage

        return self.stage(f"rate_{rate:g}", run, self.study.settings.draws + FREE_COST)

    def maps(self, rate: float) -> dict[str, Drawn]:
        """The maps at a rate: those at hand, or drawn again where another run measured it."""
        if self._best is not None and self._best[1] == rate:
            return self._best[2]
        study = self.study
        return sampled(study, study.trained, rate, study.settings, lambda passes: None)


def _embedded(study: Study, network: Trained, tick: Tick) -> Callable[[], Record]:
    return lambda: embedded(study, network, tick)


def _assembled(study: Study, free: Record, drawn: Sequence[Record], others: Mapping[str, Record]) -> Record:
    rates = study.settings.rates
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
        "series": _series(study, drawn[chosen["count"]["scaled"]], free),
    }


def _columns(rows: Sequence[Record]) -> Record:
    """From one record for each rate to lists over the rates."""
    found: Record = {}
    for part in PARTS:
        measures = [_without(row[part], "curves", "path", "blocks", "entries") for row in rows]
        found[part] = _lists(measures)
        found[part]["entries"] = rows[0][part]["entries"]
    found["fit"] = _lists([row["fit"] for row in rows])
    found["path"] = _lists([row["test"]["path"] for row in rows])
    found["blocks"] = _lists([row["test"]["blocks"] for row in rows])
    return found


def _chosen(columns: Record) -> dict[str, int]:
    """The rate, by its place, of least NLL on the validation frames: of each kind but the relaxed one."""
    held = columns["validation"]
    return {kind: int(np.argmin(held[f"nll_{kind}"])) for kind in KINDS if kind != "relaxed"}


def _count_agreement(rate: float, free: Record, stage: Record) -> Record:
    first = torch.tensor(free["linear"]["first_order"]["test"], dtype=torch.float64) * rate / (1 - rate)
    return agreement(first, torch.tensor(stage["series"]["test"]["variance"], dtype=torch.float64))


def _series(study: Study, stage: Record, free: Record) -> Record:
    """Counts of the test frames with their interval, at the rate that the validation frames choose."""
    frames, counts, fit = study.parts["test"], stage["series"]["test"], stage["count"]["fit"]
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


def _rejection(study: Study, maps: Mapping[str, Drawn], plain: Mapping[str, Tensor], fit: Record) -> Record:
    """False positives before and after, by `latedrop.crowd.regions`: the network's own map, with relaxed deviations.

    The mean over draws has a bias that the network itself has not; to reject regions against it proves little.
    """
    roi = study.inside.reshape(study.grid).cpu().numpy()
    found = {}
    for name, drawn in maps.items():
        heads = [to_cells(points, study.trained.stride) for points in study.parts[name].points]
        mean, std = _full(study, plain[name]), _full(study, _std(drawn, fit))
        found[name] = Maps(mean, std, heads, roi)
    near = near_cells(study.sigma, study.trained.stride)
    error = (maps["test"].count - study.parts["test"].count).double().cpu().numpy()
    draws = {"mae": float(np.abs(error).mean()), "rmse": float((error**2).mean() ** 0.5)}
    result = measure_rejection(found["validation"], found["test"], study.settings.seed, near=near)
    return result | {"map": "plain", "draws": draws}


def _examples(study: Study, maps: Mapping[str, Drawn], fit: Record) -> dict[str, npt.NDArray[Any]]:
    """Mean, relaxed deviation and target of two test frames: a usual one and the fullest."""
    frames, drawn = study.parts["test"], maps["test"]
    order = frames.count.argsort(stable=True)
    chosen = torch.stack([order[len(order) // 2], order[-1]])
    values = {"mean": drawn.mean, "std": _std(drawn, fit), "target": frames.density}
    arrays = {name: _full(study, value[chosen]).astype(np.float16) for name, value in values.items()}
    return arrays | {"frame": np.array([frames.places[index] for index in chosen.tolist()])}


def _std(drawn: Drawn, fit: Record) -> Tensor:
    std: Tensor = (drawn.variance.clamp_min(fit["least"]) * fit["relaxed_scale"]).sqrt()
    return std


def _full(study: Study, values: Tensor) -> npt.NDArray[np.float32]:
    """Cells of the region of interest `(N, cells)` as maps `(N, h, w)`, zero elsewhere."""
    full = values.new_zeros(len(values), study.inside.numel())
    full[:, study.inside] = values
    array: npt.NDArray[np.float32] = full.reshape(-1, *study.grid).float().cpu().numpy()
    return array


def packed(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The arrays as a compressed `.npz`."""
    stream = BytesIO()
    np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def _lists(rows: Sequence[Mapping[str, Any]]) -> Record:
    return {
        name: _lists([row[name] for row in rows]) if isinstance(value, Mapping) else [row[name] for row in rows]
        for name, value in rows[0].items()
    }


def _without(record: Mapping[str, Any], *names: str) -> Record:
    return {name: value for name, value in record.items() if name not in names}


def _round(values: Sequence[float] | npt.NDArray[Any]) -> list[float]:
    return [round(float(value), 4) for value in values]
