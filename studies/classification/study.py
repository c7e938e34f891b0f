"""Run the classification study, `python -m studies classification`: score probabilities of classes.

A unit is one repeat of one set, with its own rows and networks. Repeat 1 of all sets runs before repeat 2.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latedrop.devices import one_thread
from latedrop.errors import ArgumentError
from studies.classification.data import REPEATS, SETS, SOURCES, Images, ImageSet, Source, as_shape, load, parts, shifted
from studies.classification.methods import MEASURES, Networks, found, scores, told_apart, trained
from studies.classification.pages import pages
from studies.driver import Study, Unit, check_at_least, chosen_names, read_record, rounded
from studies.regression.training import key

SCHEMA = 1
ENSEMBLE = 5
EMBEDDED = (0.1, 0.3)
"""Rates of embedded dropout; one is chosen on the validation rows."""
_NOISE = "uniform noise"


@dataclass(frozen=True)
class Settings:
    """Hold all settings that a result depends on, besides the data.

    Attributes:
        epochs: factor on the number of epochs of each set.
        shifted: number of test rows under every shift.
        strange: number of rows from each other set.
        draws: number of thinned networks, for methods that draw.
        seed: seed of rows, weights, order and masks.
    """

    epochs: float = 1.0
    shifted: int = 300
    strange: int = 500
    draws: int = 20
    seed: int = 0

    def epochs_of(self, item: ImageSet) -> int:
        """Return the number of epochs for a set, at least 1."""
        return max(1, round(self.epochs * item.epochs))


QUICK = Settings(epochs=0.2, shifted=100, strange=100, draws=5)


def work(item: ImageSet, settings: Settings) -> int:
    """Return how often `measure` calls its `tick`."""
    return (ENSEMBLE + len(EMBEDDED)) * settings.epochs_of(item) + 1


def measure(
    item: ImageSet,
    data: Path | None,
    repeat: int,
    settings: Settings,
    device: torch.device,
    tick: Callable[[float], object] = lambda done: None,
) -> dict[str, Any]:
    """Train and measure all methods on one repeat; return the record. A worker process reads the images itself."""
    images = read_images(data)
    divided = parts(item, images[item.source], repeat, settings.seed)
    seed = key("classification", settings.seed, item.name, repeat)
    few = divided.x["test"][: settings.shifted]
    strange = _strange(item, images, few, repeat, settings, seed)
    x = {"validation": divided.x["validation"], "test": divided.x["test"], **shifted(few, seed % 2**31), **strange}
    x = {name: rows.to(device) for name, rows in x.items()}
    train, labels = divided.x["train"].to(device), divided.y["train"].to(device)
    start = time.perf_counter()
    with one_thread():
        networks = _trained(item, train, labels, seed, settings, partial(tick, 1))
        middle = time.perf_counter()
        got = found(networks, x, divided.y["validation"], train, settings.draws)
    tick(1)
    known = {name: divided.y["test"][: len(rows)] for name, rows in x.items() if name not in ("validation", *strange)}
    others = [name for name in x if name not in ("validation", "test")]
    return {
        "rows": {name: len(rows) for name, rows in divided.y.items()},
        "epochs": settings.epochs_of(item),
        "notes": {name: rounded(value) if isinstance(value, float) else value for name, value in got.notes.items()},
        "labelled": list(known),
        "methods": {name: _columns(logs, known) for name, logs in got.logs.items()},
        "others": others,
        "scores": {name: _told(values, others) for name, values in got.scores.items()},
        "seconds": {"train": round(middle - start, 2), "measure": round(time.perf_counter() - middle, 2)},
    }


def _trained(
    item: ImageSet, x: Tensor, y: Tensor, seed: int, settings: Settings, tick: Callable[[], object]
) -> Networks:
    """Train the plain networks of the ensemble and one network per embedded rate."""
    epochs = settings.epochs_of(item)
    plain = [trained(item, x, y, key(seed, member), epochs, tick=tick) for member in range(ENSEMBLE)]
    embedded = {rate: trained(item, x, y, key(seed, "embedded"), epochs, rate, tick) for rate in EMBEDDED}
    return Networks(plain, embedded)


def _strange(
    item: ImageSet, images: Mapping[Source, Images], like: Tensor, repeat: int, settings: Settings, seed: int
) -> dict[str, Tensor]:
    """Return rows of the other sources, and uniform noise, in the shape of this set."""
    others: dict[str, Tensor] = {}
    for source, other in images.items():
        if source != item.source:
            pool = other.x["train" if source == "digits" else "test"]
            start = repeat * settings.strange % max(1, len(pool) - settings.strange)
            rows = pool[start : start + settings.strange].float() / 255
            others[source] = as_shape(rows, like.shape[1:])
    generator = torch.Generator().manual_seed(seed)
    return {**others, _NOISE: torch.rand(settings.strange, *like.shape[1:], generator=generator)}


def _columns(logs: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return each measure on every part that has labels."""
    rows = [scores(logs[part], y) for part, y in labels.items()]
    return {name: [rounded(row[name]) for row in rows] for name in MEASURES}


def _told(values: Mapping[str, Tensor], others: list[str]) -> dict[str, list[float]]:
    """Return AUROC and FPR at 95 % recall of a score, for test rows against each other part."""
    pairs = [told_apart(values[name].double(), values["test"].double()) for name in others]
    return {"auroc": [rounded(first) for first, _ in pairs], "fpr95": [rounded(second) for _, second in pairs]}


@lru_cache(maxsize=1)
def read_images(data: Path | None) -> dict[Source, Images]:
    """Read the images of all available sources."""
    return {source: images for source in SOURCES if (images := load(source, data)) is not None}


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, help=f"number of repeats of each set; at most and by default {REPEATS}")


def _units(options: Namespace) -> list[Unit]:
    check_at_least(options, repeats=1)
    if (options.repeats or 1) > REPEATS:
        raise ArgumentError(
            f"expected at most {REPEATS} --repeats, which share no rows; found {options.repeats}. Pass fewer."
        )
    settings = replace(QUICK if options.quick else Settings(), seed=options.seed)
    names = chosen_names("digits-mlp" if options.quick and options.sets is None else options.sets, SETS)
    images = read_images(options.data)
    for source in SOURCES:
        if source not in images:
            why = "no matplotlib" if source == "letters" else f"no folder {source} in --data"
            print(f"{source}: skipped, {why}", file=sys.stderr)
    digests = {source: each.digest[:16] for source, each in images.items()}
    units = []
    for repeat in range(options.repeats or (2 if options.quick else REPEATS)):
        for item in (SETS[name] for name in names if SETS[name].source in images):
            depends = {"set": item.name, "repeat": repeat, "data_sha256": digests, "settings": asdict(settings)}
            measured = partial(measure, item, options.data, repeat, settings)
            units.append(Unit(f"{item.name}-{repeat}.json", depends, work(item, settings), measured))
    return units


def _read(folder: Path, options: Namespace) -> dict[str, dict[str, Any]]:
    """Read the results of each set: records in the order of the repeats, and the share of common rows."""
    sets: dict[str, dict[str, Any]] = {}
    for name, item in SETS.items():
        paths = [folder / f"{name}-{repeat}.json" for repeat in range(REPEATS)]
        if units := [read_record(path, SCHEMA) for path in paths if path.exists()]:
            sets[name] = {"units": units, "overlap": item.overlap}
    return sets


STUDY = Study(
    "classification",
    "Score class probabilities on usual and shifted rows, and scores that detect rows of other data sets.",
    "folder with mnist, fashion-mnist and cifar-10; without it, scikit-learn's digits alone",
    "the digits, two repeats, few epochs",
    SCHEMA,
    _options,
    _units,
    _read,
    pages,
)
