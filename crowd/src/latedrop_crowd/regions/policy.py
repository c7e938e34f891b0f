"""A policy: which regions to reject, and how that is chosen on validation frames.

With `u` the standard deviation and `d` the density of a cell, a policy rejects the regions with

    mass = sum d  <=  greatest_mass,    ratio = sum u / sum d  >=  least_ratio,    isolation  >=  least_isolation.

*Faint* regions, isolated ones of low mass, are not rejected but shown, with the share of them that was false on
validation frames. The ratio has no part in either where a counter is calibrated: beside the mass it tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import ArgumentError
from latedrop.records import Limits, match, record
from latedrop_crowd.blocks import block_means, standard_error
from latedrop_crowd.regions.components import NEAR, Regions, usual_threshold
from latedrop_crowd.regions.table import Floats, Maps, RegionTable

__all__ = ["FEATURES", "Policy", "fit_policy", "fit_table"]

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
    mass, isolation = _faint_ends(table)
    seen, false = _faint_elsewhere(table)
    return replace(
        fit_table(table, threshold, objective, features),
        faint_mass=mass,
        faint_isolation=isolation,
        faint_seen=seen,
        faint_false=false,
    )


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
