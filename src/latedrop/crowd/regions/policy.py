"""A policy: which regions to reject, and how that is chosen on validation frames.

With `u` the standard deviation and `d` the density of a cell, a policy rejects the regions with

    mass = sum d  <=  greatest_mass,    ratio = sum u / sum d  >=  least_ratio,    isolation  >=  least_isolation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.crowd.blocks import block_means, standard_error
from latedrop.crowd.regions.components import NEAR, Regions, find_regions, usual_threshold
from latedrop.crowd.regions.table import Floats, Maps, RegionTable
from latedrop.errors import ArgumentError
from latedrop.records import Infinite, Limits, record

__all__ = ["FEATURES", "Policy", "apply_policy", "fit_policy", "fit_table"]

Objective: TypeAlias = Literal["count", "regions"]

_Amount: TypeAlias = Annotated[float, Limits(0)]
FEATURES = ("mass", "ratio", "isolation")
_TENTH = 0.1  # of the regions are in doubt; of a person: what is lighter is not asked about
_MOST_MASS = 1.0  # of a rejected region: a person's; whatever is heavier is people, or far from low density
_GRID = 16  # quantiles of each feature that are tried


@record
@dataclass(frozen=True)
class Policy:
    """Which regions to reject, and which to call in doubt. Plain JSON.

    Attributes:
        threshold: a region's density is above it, people per cell.
        greatest_mass: rejected regions have at most this mass; 0: nothing is rejected.
        least_ratio: and at least this ratio of deviation to density.
        least_isolation: and are at least so many cells from the next region.
        doubt: regions of a tenth of a person and more are in doubt from this ratio on: a tenth of those on the
            validation frames are.
        objective: what was minimised on the validation frames: the error of the `count`, or wrongly kept and wrongly
            rejected `regions`.
    """

    threshold: _Amount
    greatest_mass: _Amount = 0.0
    least_ratio: _Amount = 0.0
    least_isolation: _Amount = 0.0
    doubt: Annotated[_Amount, Infinite()] = float("inf")
    objective: Objective = "count"

    @property
    def rejects_nothing(self) -> bool:
        """Whether no region can be rejected."""
        return self.greatest_mass <= 0

    def rejects(self, regions: Regions | RegionTable) -> npt.NDArray[np.bool_]:
        """Which regions go, `(R,)`."""
        chosen: npt.NDArray[np.bool_] = (
            (regions.mass <= self.greatest_mass)
            & (regions.ratio >= self.least_ratio)
            & (regions.isolation >= self.least_isolation)
        )
        return chosen

    def doubts(self, regions: Regions) -> npt.NDArray[np.bool_]:
        """Which regions are in doubt and kept, `(R,)`."""
        chosen: npt.NDArray[np.bool_] = (regions.ratio >= self.doubt) & (regions.mass >= _TENTH)
        return chosen & ~self.rejects(regions)

    def __str__(self) -> str:
        if self.rejects_nothing:
            return "rejects nothing: on the validation frames it would not help"
        return (
            f"rejects regions of at most {self.greatest_mass:.3g} people, a ratio of at least {self.least_ratio:.3g} "
            f"and at least {self.least_isolation:.3g} cells from the next"
        )


def apply_policy(
    density: npt.NDArray[Any], std: npt.NDArray[Any], policy: Policy
) -> tuple[Floats, npt.NDArray[np.bool_], Regions]:
    """The density with rejected regions set to zero `(h, w)`, which regions those are `(R,)`, and all regions."""
    regions = find_regions(density, std, threshold=policy.threshold)
    rejected = policy.rejects(regions)
    kept = np.where(regions.mask(rejected), 0.0, np.asarray(density, dtype=np.float64))
    return kept, rejected, regions


def fit_policy(
    maps: Maps, *, threshold: float | None = None, objective: Objective = "count", near: float = NEAR
) -> Policy:
    """Choose what to reject on validation frames.

    Every combination of quantiles of the three features is tried, except those that reject more true regions than false
    ones. The best is taken if it beats rejecting nothing by more than two standard errors (over blocks of consecutive
    frames), as the best of many looks better than it is; of equals, the one that rejects least.

    Args:
        maps: of validation frames.
        threshold: of regions; `usual_threshold` where None.
        objective: `"count"`: least mean absolute error of the count; `"regions"`: fewest wrong regions, false ones that
            are kept and true ones that are rejected.
        near: how far from a head a region is still its own, in cells.
    """
    if objective not in ("count", "regions"):
        raise ArgumentError(f"expected objective 'count' or 'regions'; found {objective!r}.")
    threshold = usual_threshold(maps.mean) if threshold is None else threshold
    table = RegionTable.of(maps, threshold, near)
    return fit_table(table, threshold, objective)


def fit_table(table: RegionTable, threshold: float, objective: Objective, features: Sequence[str] = FEATURES) -> Policy:
    """The best policy on some of the features `mass`, `ratio` and `isolation`; see `fit_policy`."""
    asked = table.ratio[table.mass >= _TENTH]
    doubt = float(np.quantile(asked, 1 - _TENTH)) if len(asked) else float("inf")
    nothing = Policy(threshold, doubt=doubt, objective=objective)
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
                    best = Policy(threshold, mass, ratio, isolation, doubt, objective)
                    least, fewest = loss, number
    return best if _beats(least, base) else nothing


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
    """Whether the mean over frames is lower by more than two standard errors over blocks."""
    gain = base - loss
    blocks = block_means(gain)
    error = standard_error(blocks) if len(blocks) > 1 else 0.0
    return bool(gain.mean() > 2 * error and gain.mean() > 0)
