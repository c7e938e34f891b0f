"""Which regions of a density map to reject, and what that is worth.

People leave regions of mass 1 and more; clutter leaves small ones, alone, where the network is unsure. With `u` the
standard deviation and `d` the density of a cell, a policy rejects the regions with

    mass = sum d  <=  greatest_mass,    ratio = sum u / sum d  >=  least_ratio,    isolation  >=  least_isolation,

which are set to zero and leave the count (Ledda, Fumera, Roli 2023, who show two examples). The three numbers are
chosen on validation frames, and nothing is rejected unless that helps there. `measure_rejection` says what it is worth
on test frames, against controls that know nothing of the uncertainty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.crowd.components import NEAR, Regions, find_regions, near_cells, to_cells, usual_threshold
from latedrop.errors import ArgumentError, DataError

__all__ = [
    "NEAR",
    "Maps",
    "Policy",
    "Regions",
    "apply_policy",
    "find_regions",
    "fit_policy",
    "measure_rejection",
    "near_cells",
    "to_cells",
    "usual_threshold",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Objective: TypeAlias = Literal["count", "regions"]

_TENTH = 0.1  # of the regions are in doubt; of a person: what is lighter is not asked about
_MOST_MASS = 1.0  # of a rejected region: a person's; whatever is heavier is people, or far from low density
_GRID = 16  # quantiles of each feature that are tried
_BLOCK = 25  # consecutive frames that are resampled together


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

    threshold: float
    greatest_mass: float = 0.0
    least_ratio: float = 0.0
    least_isolation: float = 0.0
    doubt: float = float("inf")
    objective: Objective = "count"

    @property
    def rejects_nothing(self) -> bool:
        """Whether no region can be rejected."""
        return self.greatest_mass <= 0

    def rejects(self, regions: Regions | _Table) -> npt.NDArray[np.bool_]:
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a doubt that no region reaches is None."""
        record = asdict(self)
        return record | {"doubt": None if np.isinf(self.doubt) else self.doubt}

    @classmethod
    def from_dict(cls, record: Any) -> Policy:
        """Read what `to_dict` made."""
        if not isinstance(record, dict) or set(record) != {field.name for field in fields(cls)}:
            raise DataError(
                f"expected a rejection policy with {', '.join(field.name for field in fields(cls))}; found "
                f"{json.dumps(record, default=str)[:80]}. Calibrate again."
            )
        return cls(**{**record, "doubt": float("inf") if record["doubt"] is None else record["doubt"]})

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
    table = _Table.of(maps, threshold, near)
    return _fitted(table, threshold, objective, ("mass", "ratio", "isolation"))


def measure_rejection(
    validation: Maps,
    test: Maps,
    seed: int = 0,
    *,
    threshold: float | None = None,
    near: float = NEAR,
    repeats: int = 200,
    resamples: int = 2000,
) -> dict[str, Any]:
    """What rejection is worth: thresholds from validation frames, numbers from test frames. Plain data.

    The controls: `random` rejects as many test regions, drawn at random (mean and deviation over `repeats`);
    `lowest_mass` rejects as many, those of least mass; `low_density` is a policy on the mass alone, tuned on the
    validation frames in the same way; `shift` takes the mean error of the validation frames off every count, and looks
    at no region. `separation` is how well a feature, or a linear score of several that is fitted to the validation
    regions, ranks false test regions before true ones: the uncertainty adds what `all` has over `without_ratio`.
    Differences of the mean absolute error come with 95 % intervals from resampled blocks of consecutive
    frames, as neighbours are alike.
    """
    threshold = usual_threshold(validation.mean) if threshold is None else threshold
    fitted, table = _Table.of(validation, threshold, near), _Table.of(test, threshold, near)
    policy = _fitted(fitted, threshold, "count", ("mass", "ratio", "isolation"))
    low = _fitted(fitted, threshold, "count", ("mass",))
    by_regions = _fitted(fitted, threshold, "regions", ("mass", "ratio", "isolation"))
    low_by_regions = _fitted(fitted, threshold, "regions", ("mass",))
    rng = np.random.default_rng(seed)
    gone = policy.rejects(table)
    nothing = np.zeros(len(table.mass), dtype=bool)
    shifted = table.errors(nothing) - fitted.errors(np.zeros(len(fitted.mass), dtype=bool)).mean()
    errors = {
        "before": table.errors(nothing),
        "after": table.errors(gone),
        "low_density": table.errors(low.rejects(table)),
        "shift": shifted,
    }
    differences = {
        f"{a}_minus_{b}": _difference(errors[a], errors[b], rng, resamples)
        for a, b in (("after", "before"), ("low_density", "before"), ("after", "low_density"), ("after", "shift"))
    }
    random = _at_random(table, int(gone.sum()), rng, repeats)
    result: dict[str, Any] = {
        "frames": {"validation": len(validation), "test": len(test)},
        "threshold": threshold,
        "near_cells": near,
        "policy": policy.to_dict(),
        "rejects_nothing": policy.rejects_nothing,
        "regions": {"all": len(table.mass), "false": int((~table.true_region).sum())},
        "before": table.score(nothing),
        "after": table.score(gone),
        "controls": {
            "random": random,
            "lowest_mass": table.score(_lowest(table.mass, int(gone.sum()))),
            "low_density": {"policy": low.to_dict(), **table.score(low.rejects(table))},
            "shift": _error_summary(shifted),
        },
        "for_regions": {
            "policy": {"policy": by_regions.to_dict(), **table.score(by_regions.rejects(table))},
            "low_density": {"policy": low_by_regions.to_dict(), **table.score(low_by_regions.rejects(table))},
        },
        "separation": table.separation(fitted),
        "differences": differences,
        "block": _block(len(test)),
        "seed": seed,
    }
    verdict, why = _verdict(policy, differences, random["mae"]["mean"], result["after"]["mae"])
    return result | {"verdict": verdict, "why": why}


@dataclass(frozen=True)
class _Table:
    """The regions of many frames in one table, and the counts of the frames."""

    frame: npt.NDArray[np.intp]
    mass: Floats
    ratio: Floats
    isolation: Floats
    true_region: npt.NDArray[np.bool_]
    predicted: Floats
    true: Floats

    @classmethod
    def of(cls, maps: Maps, threshold: float, near: float) -> _Table:
        found, true = [], []
        for index in range(len(maps)):
            regions = find_regions(*maps.frame(index), threshold=threshold)
            found.append(regions)
            true.append(regions.near(maps.heads[index], near))
        mass, ratio, isolation = (
            np.concatenate([getattr(regions, name) for regions in found]) for name in ("mass", "ratio", "isolation")
        )
        frame = np.repeat(np.arange(len(maps)), [len(regions) for regions in found])
        return cls(frame, mass, ratio, isolation, np.concatenate(true), maps.predicted, maps.true)

    def errors(self, gone: npt.NDArray[np.bool_]) -> Floats:
        """Predicted less true count of every frame without some regions."""
        lost = np.bincount(self.frame[gone], self.mass[gone], len(self.predicted))
        error: Floats = self.predicted - lost - self.true
        return error

    def score(self, gone: npt.NDArray[np.bool_]) -> dict[str, Any]:
        return _error_summary(self.errors(gone)) | {
            "rejected": int(gone.sum()),
            "rejected_mass": float(self.mass[gone].sum()),
            "false_kept": int((~self.true_region & ~gone).sum()),
            "true_rejected": int((self.true_region & gone).sum()),
        }

    def separation(self, fitted: _Table) -> dict[str, float | None]:
        """Areas under the ROC curve, 0.5 is chance; None where a table has only one kind of region."""
        false = ~self.true_region
        found = {"low_mass": _auc(-self.mass, false), "ratio": _auc(self.ratio, false)}
        found["isolation"] = _auc(self.isolation, false)
        for name, features in (("without_ratio", ("mass", "isolation")), ("all", ("mass", "isolation", "ratio"))):
            weights = _discriminant(fitted.logs(features), ~fitted.true_region)
            found[name] = None if weights is None else _auc(self.logs(features) @ weights, false)
        return found

    def logs(self, features: Sequence[str]) -> Floats:
        """Logarithms of some features, `(R, F)`."""
        columns = [np.log(np.maximum(getattr(self, name), 1e-12)) for name in features]
        return np.stack(columns, 1)


def _fitted(table: _Table, threshold: float, objective: Objective, features: Sequence[str]) -> Policy:
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


def _losses(table: _Table, objective: Objective) -> Any:
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
    blocks = _block_means(gain)
    error = float(blocks.std(ddof=1) / np.sqrt(len(blocks))) if len(blocks) > 1 else 0.0
    return bool(gain.mean() > 2 * error and gain.mean() > 0)


def _block(frames: int) -> int:
    """Consecutive frames of a block: 25, fewer where there would be less than ten blocks."""
    return max(1, min(_BLOCK, frames // 10))


def _block_means(values: Floats) -> Floats:
    size = _block(len(values))
    parts = np.array_split(values, max(1, round(len(values) / size)))
    return np.array([part.mean() for part in parts])


def _difference(a: Floats, b: Floats, rng: np.random.Generator, resamples: int) -> dict[str, float]:
    """Difference of the mean absolute errors of the same frames, with a 95 % interval."""
    gap = np.abs(a) - np.abs(b)
    parts = np.array_split(gap, max(1, round(len(gap) / _block(len(gap)))))
    sums, sizes = np.array([part.sum() for part in parts]), np.array([len(part) for part in parts])
    times = rng.multinomial(len(parts), np.full(len(parts), 1 / len(parts)), size=resamples)
    low, high = np.quantile((times @ sums) / (times @ sizes), [0.025, 0.975])
    return {"mae": float(gap.mean()), "low": float(low), "high": float(high)}


def _at_random(table: _Table, number: int, rng: np.random.Generator, repeats: int) -> dict[str, Any]:
    """Scores of rejecting so many regions at random: mean and deviation over repeats."""
    scores = []
    for _ in range(repeats):
        gone = np.zeros(len(table.mass), dtype=bool)
        gone[rng.choice(len(gone), number, replace=False)] = True
        scores.append(table.score(gone))
    return {
        name: {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))}
        for name in scores[0]
        for values in [[score[name] for score in scores]]
    } | {"repeats": repeats}


def _lowest(mass: Floats, number: int) -> npt.NDArray[np.bool_]:
    gone = np.zeros(len(mass), dtype=bool)
    gone[np.argsort(mass, kind="stable")[:number]] = True
    return gone


def _error_summary(errors: Floats) -> dict[str, Any]:
    return {
        "mae": float(np.abs(errors).mean()),
        "rmse": float(np.sqrt(np.square(errors).mean())),
        "bias": float(errors.mean()),
    }


def _auc(score: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve by ranks, ties shared; None where one kind is missing."""
    number = int(positive.sum())
    if not number or number == len(positive):
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - number * (number + 1) / 2) / (number * (len(positive) - number)))


def _discriminant(values: Floats, positive: npt.NDArray[np.bool_]) -> Floats | None:
    """Weights `(F,)` of Fisher's linear discriminant; None where one kind is missing."""
    number = int(positive.sum())
    if not number or number == len(positive):
        return None
    inside = values - np.where(positive[:, None], values[positive].mean(0), values[~positive].mean(0))
    scatter = inside.T @ inside / len(values)
    # A feature that does not vary has no say.
    ridge = 1e-9 * (np.trace(scatter) + 1e-9) * np.eye(len(scatter))
    weights: Floats = np.linalg.solve(scatter + ridge, values[positive].mean(0) - values[~positive].mean(0))
    return weights


def _verdict(
    policy: Policy, differences: dict[str, dict[str, float]], random_mae: float, after_mae: float
) -> tuple[str, str]:
    """One of five words, by rule, and the reason in a sentence."""
    gain, beside = differences["after_minus_before"], differences["after_minus_low_density"]
    said = f"count MAE changes by {gain['mae']:+.3f} (95 % interval {gain['low']:+.3f} to {gain['high']:+.3f})"
    if policy.rejects_nothing:
        return "nothing rejected", "no thresholds help on the validation frames, so nothing is rejected"
    if gain["low"] > 0:
        return "hurts", said
    if gain["high"] >= 0:
        return "no effect", f"{said}: the interval holds 0"
    against = f"against low density alone by {beside['mae']:+.3f} ({beside['low']:+.3f} to {beside['high']:+.3f})"
    if after_mae >= random_mae:
        return "helps as chance does", f"{said}, but regions rejected at random do as well: MAE {random_mae:.3f}"
    if beside["high"] >= 0:
        return "helps without uncertainty", f"{said}, {against}: the uncertainty adds nothing that can be told"
    return "helps", f"{said}, {against}"
