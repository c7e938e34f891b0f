"""The record of a calibrated counter: what it says about a frame, and how it is kept as JSON.

A frame's strangeness is the largest of three numbers: the leverage of its features beside the reference frames, 1
where the usual ends (see `latedrop.terms`); how far its brightness is from the middle of what was seen; and the square
of how many times larger or smaller it is. Inside of what was seen the last two are 0, so that frames like those of the
validation have the strangeness that is on record of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop import Calibration, Prediction, fingerprint, propagate
from latedrop.errors import DataError, FileError, OutputError
from latedrop.files import read_text
from latedrop.metrics.levels import central_quantile
from latedrop.records import Format, Limits, match, naming, record
from latedrop.stored_tensors import inline
from latedrop.terms import BatchContext, Dropout, Size
from latedrop_crowd.calibration.recalibration import Recalibration, t_quantile
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.regions import Policy

__all__ = ["STRANGE", "Cells", "CrowdCalibration", "FrameBatches", "Reading", "Usual", "load_calibration", "roi_record"]


@dataclass(frozen=True)
class Reading:
    """The count and map of one frame by a calibrated counter."""

    count: Prediction  # of one row, `(1,)`: people inside the region of interest, as the core gives them
    density: npt.NDArray[np.float64]  # `(h, w)`, people per cell, zero outside the region of interest
    # its standard deviation, `(h, w)`; zeros where cells were not calibrated, or were not asked for
    std: npt.NDArray[np.float64]
    mean: float  # the count, recalibrated for its scene where that was done
    variance: float  # of the count, wider where the frame is strange; of a t-distribution the squared scale
    dof: float | None  # degrees of freedom of its t-distribution; None: it is Gaussian
    strangeness: float  # 1 where the usual ends, see above
    reasons: tuple[str, ...]  # what is strange, in words; none below `STRANGE`
    fitted_variance: float  # of the count, before guard and recalibration
    # why the frame cannot be counted, in words; empty where it can. Its numbers then mean nothing
    uncountable: str = ""

    def __post_init__(self) -> None:
        if not (isfinite(self.mean) and self.variance >= 0 and self.fitted_variance >= 0):
            raise OutputError(
                f"expected a finite count and variances of at least 0; found a count of {self.mean:.4g}, a variance of "
                f"{self.variance:.4g} and, before the guard, {self.fitted_variance:.4g}. Calibrate the counter again."
            )

    def check(self, name: str) -> Reading:
        """Raise `OutputError` where the density sums below 0; not of a strange frame, which says so anyway."""
        total = float(self.count.mean)
        if total < _BELOW and self.strangeness <= 1:
            raise OutputError(
                f"expected a density that sums to people; found {total:.3g} in {name}. Check the scaling of frames and "
                "map (input_scale, density_scale), pass relu where the network ends in one, or leave the frame out."
            )
        return self

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the count."""
        heavier = 1.0 if self.dof is None else self.dof / (self.dof - 2)
        return float((self.variance * heavier) ** 0.5)

    def reach(self, level: float) -> float:
        """Return half the width of the interval with probability `level`, in scales."""
        return float(central_quantile(level)) if self.dof is None else t_quantile(level, self.dof)

    def interval(self, level: float) -> tuple[float, float]:
        """The ends between which the true count lies with probability `level`."""
        half = self.variance**0.5 * self.reach(level)
        return self.mean - half, self.mean + half


@record
@dataclass(frozen=True)
class Region:
    """A region of interest, in cells."""

    shape: tuple[Annotated[int, Limits(1)], Annotated[int, Limits(1)]]  # `(h, w)`
    sha256: str  # digest of its mask


@record
@dataclass(frozen=True)
class CrowdCalibration:
    """All that turns a counter's output into counts with intervals. Frozen, and plain JSON on disk.

    Attributes:
        count: the record of the count.
        pixels: the record of the cells inside the region of interest: one scale for all of them. None where counts
            alone were known: the map then has no deviations.
        policy: which regions to reject; None: it was not fitted.
        fingerprint: of the weights that it belongs to.
        roi: the region of interest; None where the whole frame counts.
        about: set, frames, settings and versions; plain JSON.
        usual: size and brightness of the frames that were seen; None where it is not known.
        recalibration: for a new scene, from some of its frames; None: it was not done.
    """

    count: Calibration
    pixels: Calibration | None
    policy: Policy | None
    fingerprint: str
    roi: Region | None
    about: dict[str, Any]
    usual: Usual | None = None
    recalibration: Recalibration | None = None

    @property
    def has_dropout(self) -> bool:
        """Return True if dropout has a share in the variance of the count."""
        return any(share > 0 and _term(name) == Dropout.name for name, share in self._terms.shares.items())

    @property
    def width(self) -> str:
        """Say what the width of the count's interval follows; a strange frame widens it in any case."""
        terms = {_term(name) for name, share in self._terms.shares.items() if share > 0 and name != "floor"}
        if not terms - {Size.name}:
            what = "follows the count only" if terms else "is the same for every frame"
            return f"{what}: neither dropout nor leverage tells more on frames left out of the fit"
        without = "" if self.has_dropout else "; dropout adds nothing on frames left out of the fit"
        return f"follows {', '.join(sorted(terms))}{without}"

    def read(self, trained: Trained, image: Tensor, *, deviations: bool = True) -> Reading:
        """Count, map and deviations of one frame `(C, H, W)`, of the size that the network takes.

        Without `deviations` those of the map are left out, as zeros: one pass is then enough where dropout has no share
        in the count's variance.
        """
        x, cells = image[None].to(trained.device), Cells(trained)
        terms, maps = self._terms, list[Tensor]()

        def count_of(density: Tensor) -> Tensor:
            maps.append(trained.masked(density).detach())
            return trained.count_of(density)

        rows = BatchContext(trained.network, x, self.count.sites, count_of, terms.features)
        _, variance, strangeness, shares = terms.predicted(rows)
        count = Prediction(rows.mean, variance, self.count, strangeness, shares=shares)
        fitted = Prediction(rows.mean, sum(terms.parts(rows).values(), torch.zeros_like(rows.mean)), self.count)
        mean = cells(maps[-1])
        std = torch.zeros_like(mean)
        if deviations and self.pixels is not None:
            raw = propagate(trained.network, x, self.pixels.rate, self.pixels.sites, cells).variance
            std = self.pixels.variance(raw).sqrt()
        return self.judge(count, float(fitted.variance), image, *(cells.spread(part[0], image) for part in (mean, std)))

    def judge(
        self,
        count: Prediction,
        fitted: float,
        image: Tensor,
        density: npt.NDArray[np.float64],
        std: npt.NDArray[np.float64],
    ) -> Reading:
        """Apply the guard and the recalibration to a count whose variance was fitted to be `fitted`."""
        by_features = 0.0 if count.novelty is None else float(count.novelty)
        other, reasons = (0.0, ()) if self.usual is None else self.usual.strangeness(image)
        scene = self.recalibration
        inside = by_features / (1.0 if scene is None else scene.strangeness)
        strangeness = max(inside, other)
        if inside > STRANGE:
            reasons = (*reasons, f"features unlike those of the frames that were seen, {inside:.3g} times the limit")
        mean, variance = float(count.mean), float(count.variance)
        if strangeness != by_features:  # the guard of the count's record knows the features alone, and no new scene
            factor = max(1.0, strangeness)
            variance = factor * fitted + (factor - 1) * self._constant
        dof = None
        if scene is not None:
            (mean, variance), dof = scene.apply(mean, variance), scene.dof
        uncountable = "" if self.usual is None else self.usual.uncountable(image)
        return Reading(count, density, std, mean, variance, dof, strangeness, reasons, fitted, uncountable)

    @property
    def _terms(self) -> Any:
        """Return the terms of the count; raise `DataError` if it has none."""
        if self.count.terms is None:
            raise DataError("expected a calibration of the count by terms; found another. Run `crowd calibrate` again.")
        return self.count.terms

    @property
    def _constant(self) -> float:
        """Return the constant of the guard: mean squared error of the validation counts times the scale in use."""
        constant = self.count.constant[0] if self.count.constant else self.count.table[0].rmses[0] ** 2
        return constant * self.count.chosen()[0][0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, without the weights."""
        CROWD.write(path, self, inline)

    def to_json(self) -> str:
        """Return readable JSON with a checksum over its content."""
        return CROWD.to_json(self, inline)

    @classmethod
    def from_json(cls, content: str) -> CrowdCalibration:
        """Read the JSON of `to_json`; raise `DataError` if it is damaged, edited or of another kind."""
        if f'"{CROWD.key}"' not in content and '"latedrop"' in content:
            raise DataError(
                "expected the calibration of a people counter, of its count and its map; found that of a single "
                "readout, as Predictor.save writes. Run `crowd calibrate`."
            )
        return CROWD.from_json(content)

    def checked(self) -> CrowdCalibration:
        """Check the readouts after reading."""
        for name, part in (("count", self.count), ("pixels", self.pixels)):
            readout = READOUTS[name] if part is None else part.custom_readout
            match(readout == READOUTS[name], f"{name}.custom_readout", READOUTS[name], readout)
        return self

    def __str__(self) -> str:
        lines = [
            f"{self.count.rows} validation frames of {self.about.get('set', '?')}",
            f"count: {self.count.verdict}",
            *(f"  {line}" for line in self._terms.lines()),
            f"the width of the count's interval {self.width}",
        ]
        if self.pixels is None:
            lines += ["cells: not calibrated, as only counts are known"]
        else:
            last = self.pixels.table[[row.rate for row in self.pixels.table].index(self.pixels.rate)]
            lines.append(
                f"cells: scale {self.pixels.scales[0]:.4g}, floor {self.pixels.floors[0]:.4g}, "
                f"validation RMSE {last.rmses[0]:.4g}, NLL {last.nll_unscaled:.4g} raw, {last.nll_scaled:.4g} scaled"
            )
        lines.append(f"regions: {'no policy' if self.policy is None else self.policy}")
        lines += [] if self.recalibration is None else [str(self.recalibration)]
        return "\n".join(lines)


def load_calibration(path: str | os.PathLike[str], trained: Trained) -> CrowdCalibration:
    """Bring a saved calibration back to its network; `FileError` where it is damaged, or made for another one."""
    content = read_text(path, CROWD.what)
    with naming(path):
        calibration = CrowdCalibration.from_json(content)
    if calibration.fingerprint != fingerprint(trained.model):
        raise FileError(
            f"expected the calibration of these weights in {path}; it was made for others (of the set "
            f"{calibration.about.get('set')}), or with another scaling of frames or map. Run `crowd calibrate` again."
        )
    if calibration.roi != roi_record(trained):
        both = roi_record(trained), calibration.roi
        shapes = ["none" if region is None else " x ".join(map(str, region.shape)) for region in both]
        raise FileError(
            f"expected a calibration for the weights' region of interest ({shapes[0]} cells); {path} was made for "
            f"another ({shapes[1]} cells). Run `crowd calibrate` again."
        )
    return calibration


def _term(column: str) -> str:
    """The term that a share belongs to: shares of dropout are by site, `dropout:SITE`."""
    return column.partition(":")[0]


def roi_record(trained: Trained) -> Region | None:
    """Shape and digest of a network's region of interest."""
    if trained.roi is None:
        return None
    cells = trained.roi.cpu().numpy().astype(np.uint8)
    return Region((cells.shape[0], cells.shape[1]), hashlib.sha256(cells.tobytes()).hexdigest())


CROWD = Format(CrowdCalibration, "crowd", "a crowd calibration", "Run `crowd calibrate` again.", "crowd")


READOUTS = {"count": "Trained.count_of", "pixels": "_Cells"}
"""Names of the readouts in files."""


class Cells:
    """The readout for cells: those inside the region of interest, flat, `(N, M)`; others have no variance to fit."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.__qualname__ = READOUTS["pixels"]
        self.index = None if trained.roi is None else trained.roi.flatten().nonzero().flatten()

    def __call__(self, density: Tensor) -> Tensor:
        """The cells of maps `(N, 1, h, w)`."""
        flat = self.trained.masked(density).flatten(1)
        return flat if self.index is None else flat[:, self.index.to(flat.device)]

    def spread(self, values: Tensor, image: Tensor) -> npt.NDArray[np.float64]:
        """The map `(h, w)` of a frame `(..., H, W)` with these values in the cells that count, and zeros elsewhere."""
        h, w = (side // self.trained.stride for side in image.shape[-2:])
        flat = values.detach().cpu().double()
        if self.index is not None:
            flat = torch.zeros(h * w, dtype=torch.float64).index_copy(0, self.index.cpu(), flat)
        return np.asarray(flat.reshape(h, w))


@dataclass(frozen=True)
class FrameBatches:
    """Frames of a set as batches of one, with their targets `(1, ...)` where there is a function of a frame's index."""

    trained: Trained
    crowd_set: CrowdSet
    indices: Sequence[int]
    target: Callable[[int], Tensor] | None = None

    def image(self, index: int) -> Tensor:
        """Return one frame, `(1, C, H, W)`."""
        return self.crowd_set.image(index, self.trained.channels)[None].to(self.trained.device)

    def images(self) -> Iterator[Tensor]:
        """Yield the frames without their targets."""
        return (self.image(index) for index in self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def row_total(self) -> int:
        """Return the number of frames."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        target = self.target
        return self.images() if target is None else ((self.image(index), target(index)) for index in self.indices)


STRANGE = 2.0
"""From this strangeness on a frame is called strange; the variance grows from 1 on."""
_BELOW = -0.5
"""People: a count below is no rounding of an empty frame, but a network, or a scaling, that does not fit."""
_WIDER = 0.5  # of the range of brightness: what lies outside of it by less is still usual
_LEAST = 0.02
_DARK = 0.25  # of the darkest brightness that is usual (of the distance to white for the brightest): no picture
_FLAT = 0.02  # standard deviation of pixels, in [0, 1], below which there is nothing in a picture
_Pixels: TypeAlias = Annotated[int, Limits(1)]
_Share: TypeAlias = Annotated[float, Limits(0, 1)]


@record
@dataclass(frozen=True)
class Usual:
    """Size and brightness of the frames that were seen."""

    size: tuple[_Pixels, _Pixels] | None  # `(H, W)` in pixels as the network sees them; None where they differ
    darkest: _Share  # mean of the darkest frame that is usual, in [0, 1]
    brightest: _Share  # of the brightest one

    @classmethod
    def of(cls, images: Iterable[Tensor]) -> Usual:
        """Look at frames `(..., H, W)`; their range of brightness is made half as wide again on both sides."""
        sizes, means = set(), []
        for image in images:
            sizes.add((int(image.shape[-2]), int(image.shape[-1])))
            means.append(float(image.float().mean()))
        more = max(_WIDER * (max(means) - min(means)), _LEAST)
        return cls(sizes.pop() if len(sizes) == 1 else None, max(0.0, min(means) - more), min(1.0, max(means) + more))

    def strangeness(self, image: Tensor) -> tuple[float, tuple[str, ...]]:
        """Of size and brightness of a frame `(..., H, W)`: the larger one, 0 where usual, and what is strange."""
        largest, words = 0.0, []
        height, width = image.shape[-2:]
        if self.size is not None and (height, width) != self.size:
            h, w = self.size
            largest = STRANGE * max(height / h, h / height, width / w, w / width) ** 2
            words.append(f"{height} x {width} pixels, not {h} x {w}")
        mean = float(image.float().mean())
        middle, half = (self.darkest + self.brightest) / 2, max((self.brightest - self.darkest) / 2, 1e-6)
        apart = abs(mean - middle) / half
        if apart > 1:
            words.append(f"brightness {mean:.2f}, usually {self.darkest:.2f} to {self.brightest:.2f}")
            largest = max(largest, STRANGE, apart)
        return largest, tuple(words)

    def uncountable(self, image: Tensor) -> str:
        """Why a frame `(..., H, W)` cannot be counted at all, in words; empty where it can."""
        pixels = image.float()
        mean, spread = float(pixels.mean()), float(pixels.std())
        usually = f"brightness {mean:.2f}, usually {self.darkest:.2f} to {self.brightest:.2f}"
        if mean < _DARK * self.darkest:
            return f"too dark: {usually}"
        if 1 - mean < _DARK * (1 - self.brightest):
            return f"too bright: {usually}"
        return f"nothing in the picture: its pixels differ by {spread:.3f}" if spread < _FLAT else ""
