"""The stages of one set of the crowd study: inject at a rate, measure pixels and counts, give plain data for JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop import Sites, find_sites, linearize, propagate, sample
from latedrop.errors import DataError
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import Trained
from studies.crowd.measures import Predicted, agreement, conformal, control, judge_both, size_control
from studies.driver import rounded
from studies.site_rates import fit_sites

Stage: TypeAlias = dict[str, Any]
Tick: TypeAlias = Callable[[float], object]

RATES = (0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01, 0.02, 0.05, 0.1)
"""The paper's ten, and three larger ones."""
PARTS = ("validation", "test")
FREE_COST = 4
"""Of one sampling-free pass with its backward pass or its variances, in passes: for the time left."""
_WORTH_COMPILING = 20_000  # passes
_BATCH = 8  # frames that run at once


@dataclass(frozen=True)
class Settings:
    """Name all that a result depends on, besides frames and weights.

    Attributes:
        draws: thinned networks for each rate.
        rates: dropout rates, in rising order.
        every: take every so many validation and test frames.
        frames: at most so many of each part after that; None: all.
        seed: of the masks.
    """

    draws: int = 50
    rates: tuple[float, ...] = RATES
    every: int = 1
    frames: int | None = None
    seed: int = 0

    def chosen(self, item: CrowdSet, part: str) -> list[int]:
        """The frames of a part that are measured."""
        return list(getattr(item, part))[:: self.every][: self.frames]


@dataclass(frozen=True)
class Frames:
    """The frames of one part, on the device.

    Attributes:
        images: `(N, C, H, W)`, bytes: what the network was trained on, also where frames are enlarged.
        density: the target in the cells of the region of interest, `(N, cells)`.
        count: people in the region of interest, `(N,)`.
        points: heads of each frame in the region of interest, `(P, 2)` in pixels.
        places: of the frames in their set.
    """

    images: Tensor
    density: Tensor
    count: Tensor
    points: tuple[npt.NDArray[np.float64], ...]
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.images)

    def batches(self) -> Iterator[Tensor]:
        """Frames in [0, 1], some at a time."""
        for part in self.images.split(_BATCH):
            yield part.float() / 255


@dataclass(frozen=True)
class Setup:
    """Everything that the stages of one set share.

    Attributes:
        parts: frames by part.
        trained: the network that was trained without dropout, with the set's region of interest.
        inside: cells that count, flat, bool `(h · w,)`.
        grid: `(h, w)`.
        sigma: of the density kernel, in pixels of the frames as the network sees them.
        settings: what the results depend on.
    """

    parts: dict[str, Frames]
    trained: Trained
    inside: Tensor
    grid: tuple[int, int]
    sigma: float
    settings: Settings

    @property
    def total(self) -> int:
        """Frames of both parts."""
        return sum(map(len, self.parts.values()))

    def sites(self, trained: Trained) -> Sites:
        """Where dropout goes: before every convolution but the first of each column."""
        return find_sites(trained.model, next(self.parts["validation"].batches())[:1])


@dataclass(frozen=True)
class Drawn:
    """Moments of one part: of the cells of the region of interest `(N, cells)`, and of the count `(N,)`."""

    mean: Tensor
    variance: Tensor
    count: Tensor
    count_variance: Tensor

    def pixels(self, frames: Frames) -> Predicted:
        """All cells of all frames, flat."""
        return Predicted(self.mean.flatten(), self.variance.flatten(), frames.density.flatten(), len(frames))

    def counts(self, frames: Frames) -> Predicted:
        """One entry for each frame."""
        return Predicted(self.count, self.count_variance, frames.count, len(frames))


def load(item: CrowdSet, trained: Trained, settings: Settings) -> Setup:
    """Decode the frames once, and put them where the network is.

    Raises:
        DataError: no validation or test frames; frames of several sizes; weights made for another region of interest.
    """
    device = trained.device
    height, width = item.shape(item.test[0] if item.test else 0)
    grid = (height // trained.stride, width // trained.stride)
    region = item.cells(trained.stride)
    cells = torch.ones(grid, dtype=torch.bool) if region is None else region
    if trained.roi is not None and not torch.equal(trained.roi.cpu(), cells):
        raise DataError(
            f"expected weights made for the region of interest of {item.name}, {int(cells.sum())} cells of "
            f"{grid[0]} x {grid[1]}; found {int(trained.roi.sum())} of {' x '.join(map(str, trained.roi.shape))}. "
            "Train on this set, with the same enlargement."
        )
    inside = cells.flatten().to(device)
    parts = {}
    for name in PARTS:
        chosen = settings.chosen(item, name)
        if not chosen:
            raise DataError(f"expected {name} frames in {item.name}; found none. Check the folder, and --every.")
        parts[name] = _frames(item, chosen, trained, inside)
    roi = None if region is None else region.to(device)
    return Setup(parts, replace(trained, roi=roi), inside, grid, item.sigma, settings)


def first_order(setup: Setup, tick: Tick) -> Stage:
    """Without draws: the plain network with a constant variance, and the first-order variance of the count."""
    sites = setup.sites(setup.trained)
    plain, by_site = {}, {}
    for name, frames in setup.parts.items():
        maps, counts, variances = [], [], []
        for images in frames.batches():
            with torch.inference_mode():
                density = setup.trained.model(images)
            maps.append(density.flatten(1)[:, setup.inside])
            result = linearize(setup.trained.model, images, sites, setup.trained.count_of)
            counts.append(result.mean)
            variances.append(result.variance_by_site[:, 0])
            tick(FREE_COST * len(images))
        plain[name] = torch.cat(maps), torch.cat(counts)
        by_site[name] = torch.cat(variances)
    total = {name: values.sum(1) for name, values in by_site.items()}
    record: Stage = {
        "constant": {"pixel": _constant(setup, plain, 0), "count": _constant(setup, plain, 1)},
        "size_control": size_control({name: (plain[name][1], frames.count) for name, frames in setup.parts.items()}),
        "linear": {"rates": [], "first_order": {name: _list(values) for name, values in total.items()}},
        "sites": [site.name for site in sites],
        "plain_count": {name: _list(count) for name, (_, count) in plain.items()},
    }
    for rate in setup.settings.rates:
        odds = rate / (1 - rate)
        validation, test = (
            Predicted(plain[name][1], odds * total[name], frames.count, len(frames))
            for name, frames in setup.parts.items()
        )
        record["linear"]["rates"].append(judge_both(validation, test, intervals=True))
    record["linear"]["per_site"] = _per_site(setup, plain, by_site)
    record["conformal"] = conformal({name: setup.parts[name].count - plain[name][1] for name in PARTS})
    return record


def rate_stage(setup: Setup, rate: float, tick: Tick) -> Stage:
    """Draws at one rate, and a propagated variance of the pixels beside them."""
    frames, maps = setup.parts, sampled(setup, setup.trained, rate, tick)
    record = _judged(setup, maps)
    sites = setup.sites(setup.trained)
    free = {}
    for name, part in frames.items():
        means, variances = [], []
        for images in part.batches():
            moments = propagate(setup.trained.model, images, rate, sites)
            means.append(moments.mean.flatten(1)[:, setup.inside])
            variances.append(moments.variance.flatten(1)[:, setup.inside])
            tick(FREE_COST * len(images))
        mean, variance = torch.cat(means).flatten(), torch.cat(variances).flatten()
        free[name] = Predicted(mean, variance, part.density.flatten(), len(part))
    record["propagated"] = judge_both(free["validation"], free["test"])
    record["propagated"]["agreement"] = agreement(free["test"].variance, maps["test"].variance.flatten())
    errors = {name: frames[name].count - maps[name].count for name in PARTS}
    std = {name: maps[name].count_variance.clamp_min(record["count"]["fit"]["least"]).sqrt() for name in PARTS}
    record["conformal"] = conformal(errors, std)
    return record


def embedded(setup: Setup, trained: Trained, tick: Tick) -> Stage:
    """A network that was trained with dropout, at its own rate; its draws are its predictions."""
    rate = float(trained.about["rate"])
    other = replace(trained, roi=setup.trained.roi)
    record = _judged(setup, sampled(setup, other, rate, tick))
    return record | {"rate": rate}


def plain_maps(setup: Setup) -> dict[str, Tensor]:
    """The network's own maps of every part, without dropout, in the cells of the region of interest, `(N, cells)`."""
    parts = {}
    with torch.inference_mode():
        for name, frames in setup.parts.items():
            maps = [setup.trained.model(images).flatten(1)[:, setup.inside] for images in frames.batches()]
            parts[name] = torch.cat(maps)
    return parts


def sampled(setup: Setup, trained: Trained, rate: float, tick: Tick) -> dict[str, Drawn]:
    """Moments over draws of every frame, by part."""
    settings, sites = setup.settings, setup.sites(trained)
    # Compiling takes seconds, and then serves every batch and rate.
    many = setup.inside.is_cuda and setup.total * settings.draws >= _WORTH_COMPILING
    engine: Literal["compiled", "auto"] = "compiled" if many else "auto"
    options = (settings.draws, settings.seed, sites, trained.both)
    drawn = {}
    for name, frames in setup.parts.items():
        rows: list[tuple[Tensor, ...]] = []
        for images in frames.batches():
            moments = sample(trained.model, images, rate, *options, engine=engine)
            cells = (values[:, :-1][:, setup.inside] for values in (moments.mean, moments.variance))
            rows.append((*cells, moments.mean[:, -1], moments.variance[:, -1]))
            tick(settings.draws * len(images))
        drawn[name] = Drawn(*(torch.cat(column) for column in zip(*rows, strict=True)))
    return drawn


def _judged(setup: Setup, maps: dict[str, Drawn]) -> Stage:
    frames = setup.parts
    series = {name: {"mean": _list(part.count), "variance": _list(part.count_variance)} for name, part in maps.items()}
    return {
        "pixel": judge_both(*(maps[name].pixels(frames[name]) for name in PARTS)),
        "count": judge_both(*(maps[name].counts(frames[name]) for name in PARTS), intervals=True),
        "series": series,
    }


def _constant(setup: Setup, plain: dict[str, tuple[Tensor, Tensor]], index: int) -> Stage:
    """The validation frames' mean squared error as one variance for all: what every method must beat."""

    def predicted(name: str, variance: float) -> Predicted:
        mean = plain[name][index].flatten()
        frames = setup.parts[name]
        target = (frames.density if index == 0 else frames.count).flatten()
        return Predicted(mean, torch.full_like(mean, variance, dtype=torch.float64), target, len(frames))

    variance = float(predicted("validation", 1.0).error.square().mean())
    record: Stage = {"variance": variance}
    return record | {name: control(predicted(name, variance), intervals=index == 1) for name in PARTS}


def _per_site(setup: Setup, plain: dict[str, tuple[Tensor, Tensor]], by_site: dict[str, Tensor]) -> Stage:
    """A rate for each site, and a floor, fitted by NLL on the validation frames."""
    error = (setup.parts["validation"].count - plain["validation"][1]).cpu()
    fitted = fit_sites(error, by_site["validation"].cpu())
    record: Stage = {"odds": fitted.odds.tolist(), "floor": fitted.floor}
    for name in PARTS:
        variance = fitted.variance(by_site[name].double().cpu())
        part = Predicted(plain[name][1].cpu(), variance, setup.parts[name].count.cpu(), len(variance))
        record[name] = control(part, intervals=True)
    return record


def _frames(item: CrowdSet, chosen: Sequence[int], trained: Trained, inside: Tensor) -> Frames:
    def read(index: int) -> tuple[Tensor, Tensor]:
        return item.pixels(index, trained.channels), item.density(index, trained.stride).flatten()

    images: list[Tensor] = []
    densities: list[Tensor] = []
    for index, (image, density) in zip(chosen, in_order(read, chosen), strict=True):
        if images and image.shape != images[0].shape:
            raise DataError(
                f"expected frames of one size in {item.name}, as the first, {tuple(images[0].shape)}; found "
                f"{tuple(image.shape)} in {item.frames[index].name}. Leave it out."
            )
        images.append(image)
        densities.append(density)
    device = inside.device
    return Frames(
        torch.stack(images).to(device),
        torch.stack(densities).to(device)[:, inside],
        item.counts(chosen).to(device),
        tuple(item.heads(index) for index in chosen),
        tuple(chosen),
    )


def _list(values: Tensor) -> list[float]:
    return [rounded(value, 7) for value in values.double().tolist()]
