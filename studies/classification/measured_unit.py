"""One repeat of one set: train its networks, measure every method on every part, give plain data for JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latedrop.devices import one_thread
from studies.classification.data import Images, ImageSet, Source, parts
from studies.classification.measures import MEASURES, scores, told_apart
from studies.classification.methods import Networks, found
from studies.classification.networks import trained
from studies.classification.shifts import as_shape, shifted
from studies.uci.stacked import key

__all__ = ["EMBEDDED", "ENSEMBLE", "Settings", "measure", "work"]

ENSEMBLE = 5
EMBEDDED = (0.1, 0.3)
"""Rates of embedded dropout; the validation rows choose."""
_NOISE = "uniform noise"


@dataclass(frozen=True)
class Settings:
    """What a result depends on, besides the data.

    Attributes:
        epochs: share of the epochs.
        shifted: test rows under every shift.
        strange: rows of each other set.
        draws: thinned networks, for what is drawn.
        seed: of rows, weights, order and masks.
    """

    epochs: float = 1.0
    shifted: int = 300
    strange: int = 500
    draws: int = 20
    seed: int = 0

    def epochs_of(self, item: ImageSet) -> int:
        """At least one."""
        return max(1, round(self.epochs * item.epochs))


def work(item: ImageSet, settings: Settings) -> int:
    """How often `measure` calls its `tick`."""
    return (ENSEMBLE + len(EMBEDDED)) * settings.epochs_of(item) + 1


def measure(
    item: ImageSet,
    images: Mapping[Source, Images],
    repeat: int,
    settings: Settings,
    device: torch.device,
    tick: Callable[[], object] = int,
) -> dict[str, Any]:
    """Everything the study knows of a repeat; `images` has the set's own source, and those of strange rows."""
    held = parts(item, images[item.source], repeat, settings.seed)
    seed = key("classification", settings.seed, item.name, repeat)
    few = held.x["test"][: settings.shifted]
    strange = _strange(item, images, few, repeat, settings, seed)
    x = {"validation": held.x["validation"], "test": held.x["test"], **shifted(few, seed % 2**31), **strange}
    x = {name: rows.to(device) for name, rows in x.items()}
    train, labels = held.x["train"].to(device), held.y["train"].to(device)
    start = time.perf_counter()
    with one_thread():
        networks = _trained(item, train, labels, seed, settings, tick)
        middle = time.perf_counter()
        got = found(networks, x, held.y["validation"], train, settings.draws)
    tick()
    known = {name: held.y["test"][: len(rows)] for name, rows in x.items() if name not in ("validation", *strange)}
    others = [name for name in x if name not in ("validation", "test")]
    return {
        "rows": {name: len(rows) for name, rows in held.y.items()},
        "epochs": settings.epochs_of(item),
        "notes": {name: _short(value) if isinstance(value, float) else value for name, value in got.notes.items()},
        "labelled": list(known),
        "methods": {name: _columns(logs, known) for name, logs in got.logs.items()},
        "others": others,
        "scores": {name: _told(values, others) for name, values in got.scores.items()},
        "seconds": {"train": round(middle - start, 2), "measure": round(time.perf_counter() - middle, 2)},
    }


def _trained(
    item: ImageSet, x: Tensor, y: Tensor, seed: int, settings: Settings, tick: Callable[[], object]
) -> Networks:
    epochs = settings.epochs_of(item)
    plain = [trained(item, x, y, key(seed, member), epochs, tick=tick) for member in range(ENSEMBLE)]
    embedded = {rate: trained(item, x, y, key(seed, "embedded"), epochs, rate, tick) for rate in EMBEDDED}
    return Networks(plain, embedded)


def _strange(
    item: ImageSet, images: Mapping[Source, Images], like: Tensor, repeat: int, settings: Settings, seed: int
) -> dict[str, Tensor]:
    """Rows of the other sources, and noise, in the shape of the set's own."""
    found: dict[str, Tensor] = {}
    for source, other in images.items():
        if source != item.source:
            pool = other.x["train" if source == "digits" else "test"]
            start = repeat * settings.strange % max(1, len(pool) - settings.strange)
            rows = pool[start : start + settings.strange].float() / 255
            found[source] = as_shape(rows, like.shape[1:])
    generator = torch.Generator().manual_seed(seed)
    return {**found, _NOISE: torch.rand(settings.strange, *like.shape[1:], generator=generator)}


def _columns(logs: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """A measure on every part that has labels."""
    rows = [scores(logs[part], y) for part, y in labels.items()]
    return {name: [_short(row[name]) for row in rows] for name in MEASURES}


def _told(values: Mapping[str, Tensor], others: list[str]) -> dict[str, list[float]]:
    pairs = [told_apart(values[name].double(), values["test"].double()) for name in others]
    return {"auroc": [_short(first) for first, _ in pairs], "fpr95": [_short(second) for _, second in pairs]}


def _short(value: float) -> float:
    return float(f"{value:.6g}")  # of differences between methods the last digits count
