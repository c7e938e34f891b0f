"""The connected regions of density maps: what tells them apart, which to reject, and which to call faint.

A region is a connected set of cells (8 neighbours) whose density is above a threshold. With `u` the standard deviation
and `d` the density of a cell, its mass is `sum d`, its ratio `sum u / sum d`, and its isolation the distance to the
nearest other region. It is false where no annotated head lies in it or near it. People leave regions of mass 1 and
more; clutter leaves small ones, alone, where the network is unsure. A policy sets to zero those with

    mass  <=  greatest_mass,    ratio  >=  least_ratio,    isolation  >=  least_isolation,

and they leave the count (Ledda, Fumera, Roli 2023, who show two examples). The numbers are chosen on validation
frames, and nothing is rejected unless that helps there. *Faint* regions, isolated ones of low mass, are not rejected
but shown, with the share of them that was false on validation frames. The ratio has no part in either where a counter
is calibrated: beside the mass it tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import ArgumentError, DataError
from latedrop.records import Limits, match, record
from latedrop_crowd.blocks import block_means, standard_error

__all__ = [
    "NEAR",
    "Maps",
    "Policy",
    "RegionTable",
    "Regions",
    "find_regions",
    "fit_policy",
    "fit_table",
    "near_cells",
    "to_cells",
    "usual_threshold",
]

Floats: TypeAlias = npt.NDArray[np.float64]

NEAR = 2.0
"""A region is false if no annotated head lies in it or within this many cells of it: two sigmas of a kernel of one cell
(4 pixels), so that the foot of a person's own bump is no false alarm. `near_cells` has it for wider kernels."""
_EIGHT = np.ones((3, 3), dtype=bool)
_SHARE = 0.1  # of a usual peak: where a region ends


@dataclass(frozen=True)
class Regions:
    """The regions of one map; arrays have a row for each, in the order of their labels.

    Attributes:
        labels: `(h, w)`: 0 outside, then 1, 2, ...
        mass: sum of the density, people.
        ratio: sum of the deviations over the mass.
        isolation: cells to the nearest other region, from edge to edge; the diagonal of the map where there is none.
    """

    labels: npt.NDArray[np.int32]
    mass: Floats
    ratio: Floats
    isolation: Floats

    def __len__(self) -> int:
        return len(self.mass)

    def mask(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Cells `(h, w)` of the chosen regions, `(R,)`."""
        return np.asarray(np.concatenate([[False], chosen])[self.labels])

    def near(self, heads: npt.NDArray[Any], within: float = NEAR) -> npt.NDArray[np.bool_]:
        """Which regions have a head in them or within so many cells, `(R,)`; `heads` `(P, 2)` as x, y in cells."""
        from scipy.spatial.distance import cdist

        heads = np.asarray(heads, dtype=np.float64).reshape(-1, 2)
        cells = np.argwhere(self.labels)
        if not len(heads) or not len(self):
            return np.zeros(len(self), dtype=bool)
        at = np.clip(heads[:, ::-1], 0, np.array(self.labels.shape) - 1)
        close = cells[cdist(cells, at).min(1) <= max(within, np.sqrt(0.5))]
        return np.isin(np.arange(1, len(self) + 1), self.labels[close[:, 0], close[:, 1]])


def to_cells(points: npt.ArrayLike, stride: int = 4) -> Floats:
    """Points `(P, 2)`, x and y in pixels, as cells: the cell in row r and column c has its centre at x = c, y = r.

    >>> to_cells([[1.5, 5.5]])
    array([[0., 1.]])
    """
    return (np.asarray(points, dtype=np.float64).reshape(-1, 2) + 0.5) / stride - 0.5


def near_cells(sigma: float, stride: int = 4) -> float:
    """How far from a head a region is still its own: two sigmas of the density kernel (in pixels), at least `NEAR`.

    >>> near_cells(4.0), near_cells(8.0)
    (2.0, 4.0)
    """
    return max(NEAR, 2 * sigma / stride)


def usual_threshold(mean: npt.NDArray[Any]) -> float:
    """A tenth of the largest density of a frame, the median over frames `(N, h, w)`."""
    peaks = np.asarray(mean).reshape(len(mean), -1).max(1)
    return max(float(_SHARE * np.median(peaks)), float(np.finfo(np.float32).tiny))


def find_regions(
    density: npt.NDArray[Any], std: npt.NDArray[Any] | None = None, *, threshold: float | None = None
) -> Regions:
    """The connected regions of one map above a threshold, with their features.

    Args:
        density: `(h, w)`, people per cell.
        std: its standard deviation, `(h, w)`; without it ratios are 0.
        threshold: people per cell; `usual_threshold` of this map where None.

    >>> import numpy as np
    >>> map = np.zeros((8, 8))
    >>> map[1:3, 1:3], map[6, 6] = 0.25, 0.1
    >>> regions = find_regions(map, threshold=0.05)
    >>> regions.mass.tolist(), regions.isolation.round(2).tolist()
    ([1.0, 0.1], [5.66, 5.66])
    """
    density = np.asarray(density, dtype=np.float64)
    if density.ndim != 2 or (std is not None and np.shape(std) != density.shape):
        raise DataError(
            f"expected one map (h, w), and deviations of the same shape; found {density.shape} and "
            f"{None if std is None else np.shape(std)}. Pass one frame at a time, without its channel axis."
        )
    threshold = usual_threshold(density[None]) if threshold is None else threshold
    if not threshold > 0:
        raise ArgumentError(f"expected a positive threshold, people per cell; found {threshold!r}.")
    from scipy.ndimage import label

    labels, count = label(density > threshold, structure=_EIGHT)

    def total(values: npt.NDArray[Any]) -> Floats:
        sums = np.bincount(labels.ravel(), np.asarray(values, dtype=np.float64).ravel(), count + 1)
        return np.asarray(sums[1:], dtype=np.float64)

    mass = total(density)
    ratio = np.zeros(count) if std is None else total(std) / mass
    return Regions(labels, mass, ratio, _isolation(labels, count))


def _isolation(labels: npt.NDArray[np.int32], count: int) -> Floats:
    """Cells from each region to the nearest other one, edge to edge; the diagonal of the map where it is alone."""
    if count < 2:
        return np.full(count, float(np.hypot(*labels.shape)))
    from scipy.ndimage import binary_erosion
    from scipy.spatial.distance import cdist

    inside = labels > 0
    edge = np.argwhere(inside & ~binary_erosion(inside, border_value=1))  # has the nearest cells of two regions
    owner = labels[edge[:, 0], edge[:, 1]]
    return np.array([cdist(edge[owner == k], edge[owner != k]).min() for k in range(1, count + 1)])


Objective: TypeAlias = Literal["count", "regions"]

_Amount: TypeAlias = Annotated[float, Limits(0)]
FEATURES = ("mass", "ratio", "isolation")
_MOST_MASS = 1.0  # of a rejected region: a person's; whatever is heavier is people, or far from low density
_GRID = 16  # quantiles of each feature that are tried


@record
@dataclass(frozen=True)
class Policy:
    """Which regions to reject, and which to call faint. Plain JSON.

    Attributes:
        threshold: a region's density is above it, people per cell.
        greatest_mass: rejected regions have at most this mass; 0: nothing is rejected.
        least_ratio: and at least this ratio of deviation to density.
        least_isolation: and are at least so many cells from the next region.
        objective: what was minimised on the validation frames: the error of the `count`, or wrongly kept and wrongly
            rejected `regions`.
        faint_mass: faint regions have at most this mass; 0: none is faint.
        faint_isolation: and are at least so many cells from the next region.
        faint_seen: faint regions of validation frames, each by thresholds that were chosen on other frames.
        faint_false: how many of them were false.
    """

    threshold: _Amount
    greatest_mass: _Amount = 0.0
    least_ratio: _Amount = 0.0
    least_isolation: _Amount = 0.0
    objective: Objective = "count"
    faint_mass: _Amount = 0.0
    faint_isolation: _Amount = 0.0
    faint_seen: Annotated[int, Limits(0)] = 0
    faint_false: Annotated[int, Limits(0)] = 0

    def checked(self) -> Policy:
        """Check counts against each other after reading."""
        match(self.faint_false <= self.faint_seen, "faint_false", f"at most {self.faint_seen}", self.faint_false)
        return self

    @property
    def rejects_nothing(self) -> bool:
        """Return True if no region can be rejected."""
        return self.greatest_mass <= 0

    def rejects(self, regions: Regions | RegionTable) -> npt.NDArray[np.bool_]:
        """Mark the regions to reject, `(R,)`."""
        chosen: npt.NDArray[np.bool_] = (
            (regions.mass <= self.greatest_mass)
            & (regions.ratio >= self.least_ratio)
            & (regions.isolation >= self.least_isolation)
        )
        return chosen

    def faint(self, regions: Regions) -> npt.NDArray[np.bool_]:
        """Mark regions that are faint and kept, `(R,)`."""
        chosen: npt.NDArray[np.bool_] = (regions.mass <= self.faint_mass) & (regions.isolation >= self.faint_isolation)
        return chosen & ~self.rejects(regions)

    def __str__(self) -> str:
        faint = "no region is called faint"
        if self.faint_mass > 0:
            faint = (
                f"faint ones have at most {self.faint_mass:.3g} people and are {self.faint_isolation:.3g} cells "
                f"or more from the next; {self.faint_false} of {self.faint_seen} were false"
            )
        if self.rejects_nothing:
            return f"none is rejected, as on the validation frames that would not help; {faint}"
        ratio = f"a ratio of at least {self.least_ratio:.3g}, " if self.least_ratio > 0 else ""
        return (
            f"those of at most {self.greatest_mass:.3g} people, {ratio}at least {self.least_isolation:.3g} cells from "
            f"the next, are rejected; {faint}"
        )


def fit_policy(
    maps: Maps,
    *,
    threshold: float | None = None,
    objective: Objective = "count",
    near: float = NEAR,
    features: Sequence[str] = FEATURES,
) -> Policy:
    """Choose on validation frames what to reject, and what to call faint.

    Every combination of quantiles of the features is tried, except those that reject more true regions than false
    ones. The best is taken if it beats rejecting nothing by more than two standard errors (over blocks of consecutive
    frames), as the best of many looks better than it is; of equals, the one that rejects least.

    Args:
        maps: of validation frames.
        threshold: of regions; `usual_threshold` where None.
        objective: `"count"`: least mean absolute error of the count; `"regions"`: fewest wrong regions, false ones that
            are kept and true ones that are rejected.
        near: how far from a head a region is still its own, in cells.
        features: that rejection may look at, of `mass`, `ratio` and `isolation`; the mass is always one.
    """
    if objective not in ("count", "regions"):
        raise ArgumentError(f"expected objective 'count' or 'regions'; found {objective!r}.")
    threshold = usual_threshold(maps.mean) if threshold is None else threshold
    table = RegionTable.of(maps, threshold, near)
    policy = fit_table(table, threshold, objective, features)
    (mass, isolation), (seen, false) = _faint_ends(table), _faint_elsewhere(table)
    return replace(policy, faint_mass=mass, faint_isolation=isolation, faint_seen=seen, faint_false=false)


def fit_table(table: RegionTable, threshold: float, objective: Objective, features: Sequence[str] = FEATURES) -> Policy:
    """The best policy on some of the features `mass`, `ratio` and `isolation`; see `fit_policy`."""
    nothing = Policy(threshold, objective=objective)
    if not len(table.mass):
        return nothing
    losses = _losses(table, objective)
    base = losses(np.zeros(len(table.mass), dtype=bool))
    best, least, fewest = nothing, base, 0
    ratios = _steps(table.ratio, upwards=False) if "ratio" in features else [0.0]
    isolations = _steps(table.isolation, upwards=False) if "isolation" in features else [0.0]
    masses = [mass for mass in _steps(table.mass, upwards=True) if mass <= _MOST_MASS]
    for mass in masses:
        small = table.mass <= mass
        for ratio in ratios:
            unsure = small & (table.ratio >= ratio)
            for isolation in isolations:
                gone = unsure & (table.isolation >= isolation)
                number = int(gone.sum())
                # Rejecting people to make up for others that are counted twice is no rejection of false positives.
                if 2 * int((gone & table.true_region).sum()) > number:
                    continue
                loss = losses(gone)
                gain = float(least.mean() - loss.mean())
                if gain > 1e-12 or (gain > -1e-12 and 0 < number < fewest):
                    best = Policy(threshold, mass, ratio, isolation, objective)
                    least, fewest = loss, number
    return best if _beats(least, base) else nothing


def _faint_ends(table: RegionTable) -> tuple[float, float]:
    """The mass and isolation below and above which false regions outnumber true ones by most; 0 where they never do."""
    best, lead = (0.0, 0.0), 0
    masses = [mass for mass in _steps(table.mass, upwards=True) if mass <= _MOST_MASS] if len(table.mass) else []
    for mass in masses:
        for isolation in _steps(table.isolation, upwards=False):
            chosen = (table.mass <= mass) & (table.isolation >= isolation)
            ahead = int((chosen & ~table.true_region).sum()) - int((chosen & table.true_region).sum())
            best, lead = ((mass, isolation), ahead) if ahead > lead else (best, lead)
    return best


def _faint_elsewhere(table: RegionTable) -> tuple[int, int]:
    """Faint regions of each half of the frames by the thresholds of the other half, and how many are false."""
    late = table.frame >= len(table.true) / 2
    seen = false = 0
    for half in (late, ~late):
        mass, isolation = _faint_ends(table.only(~half))
        chosen = half & (table.mass <= mass) & (table.isolation >= isolation)
        seen, false = seen + int(chosen.sum()), false + int((chosen & ~table.true_region).sum())
    return seen, false


def _losses(table: RegionTable, objective: Objective) -> Callable[[npt.NDArray[np.bool_]], Floats]:
    """A function from rejected regions to what each frame loses by them."""
    if objective == "count":
        return lambda gone: np.abs(table.errors(gone))
    frames = len(table.true)

    def wrong(gone: npt.NDArray[np.bool_]) -> Floats:
        return np.bincount(table.frame[gone == table.true_region], minlength=frames).astype(np.float64)

    return wrong


def _steps(values: Floats, *, upwards: bool) -> list[float]:
    """Quantiles of a feature that are tried as thresholds, those that reject least first; 0 where it is open."""
    # Dense where few regions are rejected: false ones are few.
    shares = np.geomspace(0.005, 1, _GRID)
    if upwards:
        return [float(v) for v in np.unique(np.quantile(values, shares))]
    return [*(float(v) for v in np.unique(np.quantile(values, 1 - shares[:-1]))[::-1] if v > 0), 0.0]


def _beats(loss: Floats, base: Floats) -> bool:
    """Return True if the mean over frames is lower by more than two standard errors over blocks."""
    gain = base - loss
    blocks = block_means(gain)
    error = standard_error(blocks) if len(blocks) > 1 else 0.0
    return bool(gain.mean() > 2 * error and gain.mean() > 0)


@dataclass(frozen=True)
class Maps:
    """Density maps of consecutive frames with what is known about them.

    Attributes:
        mean: densities `(N, h, w)`, people per cell.
        std: calibrated standard deviation of every cell, `(N, h, w)`.
        heads: of each frame the heads that count, `(P, 2)` as x, y in cells (see `to_cells`); their number is the
            true count.
        roi: cells that count, bool `(h, w)`; None: all.
    """

    mean: npt.NDArray[Any]
    std: npt.NDArray[Any]
    heads: Sequence[npt.NDArray[Any]]
    roi: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        mean, std = np.asarray(self.mean), np.asarray(self.std)
        if mean.ndim != 3 or std.shape != mean.shape or len(self.heads) != len(mean) or not len(mean):
            raise DataError(
                f"expected densities and deviations (N, h, w) and N arrays of heads; found {mean.shape}, {std.shape} "
                f"and {len(self.heads)}. Squeeze the channel axis of the maps."
            )
        if self.roi is not None and np.shape(self.roi) != mean.shape[1:]:
            raise DataError(
                f"expected a region of interest of {mean.shape[1:]} cells, as the maps have; found "
                f"{np.shape(self.roi)}. Use roi_cells."
            )

    def __len__(self) -> int:
        return len(self.mean)

    def frame(self, index: int) -> tuple[Floats, Floats]:
        """Density and deviation of one frame, zero outside the region of interest."""
        mean, std = (np.asarray(values[index], dtype=np.float64) for values in (self.mean, self.std))
        return (mean, std) if self.roi is None else (mean * self.roi, std * self.roi)

    @property
    def predicted(self) -> Floats:
        """The sum of each map, `(N,)`."""
        return np.array([self.frame(i)[0].sum() for i in range(len(self))])

    @property
    def true(self) -> Floats:
        """The number of heads of each frame, `(N,)`."""
        return np.array([len(heads) for heads in self.heads], dtype=np.float64)


@dataclass(frozen=True)
class RegionTable:
    """The regions of many frames in one table, and the counts of the frames."""

    frame: npt.NDArray[np.intp]
    mass: Floats
    ratio: Floats
    isolation: Floats
    true_region: npt.NDArray[np.bool_]
    predicted: Floats
    true: Floats

    @classmethod
    def of(cls, maps: Maps, threshold: float, near: float) -> RegionTable:
        """The regions of all maps above a threshold; those with a head in or near them are true."""
        by_frame, true = [], []
        for index in range(len(maps)):
            regions = find_regions(*maps.frame(index), threshold=threshold)
            by_frame.append(regions)
            true.append(regions.near(maps.heads[index], near))
        mass, ratio, isolation = (
            np.concatenate([getattr(regions, name) for regions in by_frame]) for name in ("mass", "ratio", "isolation")
        )
        frame = np.repeat(np.arange(len(maps)), [len(regions) for regions in by_frame])
        return cls(frame, mass, ratio, isolation, np.concatenate(true), maps.predicted, maps.true)

    def only(self, chosen: npt.NDArray[np.bool_]) -> RegionTable:
        """Some of the regions `(R,)`; the frames stay."""
        columns = ("frame", "mass", "ratio", "isolation", "true_region")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def errors(self, gone: npt.NDArray[np.bool_]) -> Floats:
        """Predicted less true count of every frame without some regions."""
        lost = np.bincount(self.frame[gone], self.mass[gone], len(self.predicted))
        return np.asarray(self.predicted - lost - self.true)
