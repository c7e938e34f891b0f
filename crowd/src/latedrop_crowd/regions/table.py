"""The regions of many frames in one table: what they are, which of them are false, and what rejecting some does.

A region is false where no annotated head lies in it or near it. How well a feature, or a linear score of several, ranks
false regions before true ones is the area under its ROC curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError
from latedrop_crowd.regions.components import find_regions

__all__ = ["Maps", "RegionTable", "auc", "error_summary"]

Floats: TypeAlias = npt.NDArray[np.float64]


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

    def only(self, chosen: npt.NDArray[np.bool_]) -> RegionTable:
        """Some of the regions `(R,)`; the frames stay."""
        return replace(
            self,
            frame=self.frame[chosen],
            mass=self.mass[chosen],
            ratio=self.ratio[chosen],
            isolation=self.isolation[chosen],
            true_region=self.true_region[chosen],
        )

    def errors(self, gone: npt.NDArray[np.bool_]) -> Floats:
        """Predicted less true count of every frame without some regions."""
        lost = np.bincount(self.frame[gone], self.mass[gone], len(self.predicted))
        error: Floats = self.predicted - lost - self.true
        return error

    def score(self, gone: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Errors of the count, and wrongly kept and wrongly rejected regions."""
        return error_summary(self.errors(gone)) | {
            "rejected": int(gone.sum()),
            "rejected_mass": float(self.mass[gone].sum()),
            "false_kept": int((~self.true_region & ~gone).sum()),
            "true_rejected": int((self.true_region & gone).sum()),
        }

    def separation(self, fitted: RegionTable) -> dict[str, float | None]:
        """Areas under the ROC curve, 0.5 is chance; None where a table has only one kind of region."""
        false = ~self.true_region
        found = {"low_mass": auc(-self.mass, false), "ratio": auc(self.ratio, false)}
        found["isolation"] = auc(self.isolation, false)
        for name, features in (("without_ratio", ("mass", "isolation")), ("all", ("mass", "isolation", "ratio"))):
            weights = _discriminant(fitted.logs(features), ~fitted.true_region)
            found[name] = None if weights is None else auc(self.logs(features) @ weights, false)
        return found

    def logs(self, features: Sequence[str]) -> Floats:
        """Logarithms of some features, `(R, F)`."""
        columns = [np.log(np.maximum(getattr(self, name), 1e-12)) for name in features]
        return np.stack(columns, 1)


def error_summary(errors: Floats) -> dict[str, Any]:
    """MAE, RMSE and mean of errors `(N,)`."""
    return {
        "mae": float(np.abs(errors).mean()),
        "rmse": float(np.sqrt(np.square(errors).mean())),
        "bias": float(errors.mean()),
    }


def auc(score: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
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
