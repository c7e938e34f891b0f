r"""Count people in zones: polygons on the picture, each with a count, an interval and a limit.

The count of a zone is the sum of the density inside it. Its variance `V_z` comes from the calibrated variance `V` of
the whole count and from the first-order variances `v` of the whole sum and `v_z` of the zone's sum. Each takes one
backward pass, so correlations between cells are included:

    V_z = V · v_z / v + sum over cells of d g (1 - g),

The last part is for people on the zone's edge: `d` is the density and `g` the zone's mask, blurred by the kernel of the
heads. The density counts a person who is half inside as 0.5, but a human counts 0 or 1. Between two backward passes
`v_z / v` is scaled by the zone's share of the people.

The colour of a zone shows the probability that its limit is exceeded: red if it is at least `sure`, green if it is at
most `1 - sure`, else amber. A red zone stays red until this probability falls below 0.5. A change must last some
seconds before it is shown, because single frames can be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, isfinite
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop import linearize
from latedrop.errors import ArgumentError, DataError
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.mcnn import Trained

__all__ = [
    "Alarm",
    "Amount",
    "Rule",
    "Shares",
    "Zone",
    "cells_of",
    "checked_points",
    "drawn_points",
    "first_order_shares",
    "probability_above",
]

Point = tuple[float, float]
Points = tuple[Point, ...]
_MOST_CORNERS = 64
_LEAST_AREA = 1e-5  # of the picture
_SOME = 0.5  # people added to numerator and denominator of a share, so that it is above 0 for an empty zone


@dataclass(frozen=True)
class Zone:
    """Describe a zone of one source."""

    id: int  # its number in the store
    source: str  # name of the source it belongs to
    name: str  # for people
    points: Points  # corners as x, y in [0, 1] of the picture; empty for the whole picture
    limit: float | None  # largest allowed number of people; None: count without alarms

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON."""
        points = [list(point) for point in self.points]
        return {"id": self.id, "source": self.source, "name": self.name, "points": points, "limit": self.limit}


@dataclass(frozen=True)
class Amount:
    """Hold a number of people and its uncertainty."""

    mean: float  # people
    variance: float  # people squared; the squared scale if `dof` is given
    dof: float | None = None  # degrees of freedom; None: Gaussian

    def interval(self, reach: float) -> tuple[float, float]:
        """Return the interval of `reach` scales around the mean, cut off at 0."""
        half = reach * self.variance**0.5
        return max(0.0, self.mean - half), max(0.0, self.mean + half)


def checked_points(value: Any) -> Points:
    """Read corners of a polygon from JSON text or pairs of numbers; raise `DataError` if they are invalid."""
    try:
        points = tuple((float(x), float(y)) for x, y in (json.loads(value) if isinstance(value, str) else value))
    except (TypeError, ValueError):
        points = ((float("nan"), 0.0),)
    inside = all(isfinite(x) and isfinite(y) and 0 <= x <= 1 and 0 <= y <= 1 for x, y in points)
    if not inside or not (len(points) == 0 or 3 <= len(points) <= _MOST_CORNERS):
        raise DataError(
            f"expected 3 to {_MOST_CORNERS} corners of a zone, each an x and a y from 0 to 1; found {len(points)} "
            "corners, or other values. Draw the zone again."
        )
    return points


def drawn_points(value: Any) -> Points:
    """Check the corners of a new zone: its outline must have an area and must not cross itself.

    >>> drawn_points([(0, 0), (0, 0), (1, 0), (1, 1), (0, 0)])
    ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
    """
    given = checked_points(value)
    points = tuple(point for number, point in enumerate(given) if point != given[(number + 1) % len(given)])
    ends = (*points[1:], *points[:1])
    edges = list(zip(points, ends, strict=True))
    for number, edge in enumerate(edges):
        for other in edges[number + 2 : len(edges) - (number == 0)]:  # neighbours share a corner
            if _meet(*edge, *other):
                raise DataError(
                    "expected an outline that does not cross or touch itself; found one that does. Click the corners "
                    "one after the other, around the zone."
                )
    area = sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in zip(points, ends, strict=True)) / 2
    if len(points) < 3 or abs(area) < _LEAST_AREA:
        raise DataError(
            f"expected a zone with an area; found {len(set(given))} different corners around {abs(area):.1g} of the "
            "picture. Draw it larger."
        )
    return points


def _meet(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Return True if the segments from `a` to `b` and from `c` to `d` have a common point."""

    def side(p: Point, q: Point, r: Point) -> float:
        return float(np.sign((q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])))

    def between(p: Point, q: Point, r: Point) -> bool:
        return all(min(p[i], q[i]) <= r[i] <= max(p[i], q[i]) for i in range(2))

    sides = side(a, b, c), side(a, b, d), side(c, d, a), side(c, d, b)
    if sides[0] != sides[1] and sides[2] != sides[3]:
        return True
    ends = ((a, b, c), (a, b, d), (c, d, a), (c, d, b))
    return any(s == 0 and between(*end) for s, end in zip(sides, ends, strict=True))


def cells_of(points: Points, shape: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Return the mask `(h, w)` of cells whose centre is inside a polygon (even-odd rule); all cells without corners.

    >>> cells_of(((0, 0), (0.5, 0), (0.5, 1), (0, 1)), (2, 4)).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0]]
    """
    h, w = shape
    if not points:
        return np.ones(shape, dtype=bool)
    y, x = ((np.arange(h) + 0.5) / h)[:, None], ((np.arange(w) + 0.5) / w)[None, :]
    inside = np.zeros(shape, dtype=bool)
    for (x1, y1), (x2, y2) in zip(points, (*points[1:], points[0]), strict=True):
        if y1 != y2:
            inside ^= ((y1 > y) != (y2 > y)) & (x < (x2 - x1) * (y - y1) / (y2 - y1) + x1)
    return inside


def first_order_shares(
    trained: Trained, calibration: CrowdCalibration, image: Tensor, masks: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Compute `v_z / v` of each zone, `(Z,)`, on a frame `(C, H, W)`, from the gradients of the zones' sums.

    Sites are weighted by the coefficients of the calibration, or equally if it has none for dropout.
    """
    chosen = torch.from_numpy(np.concatenate([np.ones_like(masks[:1]), masks])).to(image)

    def sums(density: Tensor) -> Tensor:
        return torch.einsum("nhw,zhw->nz", trained.masked(density)[:, 0], chosen.to(density))

    sites, terms = calibration.count.sites, calibration.count.terms
    by_site = linearize(trained.network, image[None], sites, sums).variance_by_site[0].double()
    odds = [] if terms is None else terms.odds([site.name for site in sites], 0)
    weights = torch.tensor(odds if any(odds) else [1.0] * len(sites), dtype=torch.float64)
    variances = (by_site.cpu() @ weights).numpy()
    return np.clip(variances[1:] / max(float(variances[0]), 1e-30), 0.0, None)


@dataclass(frozen=True)
class Shares:
    """Hold the share of each of Z zones in the variance of the count."""

    masks: npt.NDArray[np.bool_]  # cells of each zone, `(Z, h, w)`
    ratio: npt.NDArray[np.float64]  # `v_z / v` measured on one frame, `(Z,)`
    people: npt.NDArray[np.float64]  # share of the people of that frame in each zone, `(Z,)`
    blurred: npt.NDArray[np.float64]  # masks blurred by the kernel of the heads, `(Z, h, w)`

    @classmethod
    def measured(
        cls,
        trained: Trained,
        calibration: CrowdCalibration,
        image: Tensor,
        density: npt.NDArray[np.float64],
        zones: Sequence[Points],
    ) -> Shares:
        """Measure the shares on one input frame `(C, H, W)` with a known density `(h, w)`."""
        from scipy.ndimage import gaussian_filter

        shape = (density.shape[0], density.shape[1])
        masks = np.stack([cells_of(points, shape) for points in zones])
        whole = np.array([not points for points in zones])
        ratio = np.ones(len(zones))
        if not whole.all():
            ratio[~whole] = first_order_shares(trained, calibration, image, masks[~whole])
        width = float(trained.about.get("sigma") or trained.stride) / trained.stride
        blurred = np.stack([gaussian_filter(mask.astype(np.float64), width, mode="nearest") for mask in masks])
        return cls(masks, ratio, _share(masks, density), blurred)

    def amounts(self, whole: Amount, density: npt.NDArray[np.float64]) -> list[Amount]:
        """Return count and variance of each zone, from those of the whole picture."""
        total, part = float(density.sum()), (self.masks * density).sum((1, 2))
        shift = whole.mean - total  # difference by recalibration, divided among zones by their shares
        now = _share(self.masks, density)
        ratio = self.ratio * now / self.people
        edge = (np.clip(density, 0, None) * self.blurred * (1 - self.blurred)).sum((1, 2))
        return [
            Amount(float(m + shift * s), float(max(whole.variance * r + e, 1e-6)), whole.dof)
            for m, s, r, e in zip(part, now, ratio, edge, strict=True)
        ]


def _share(masks: npt.NDArray[np.bool_], density: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the share of the people in each zone, `(Z,)`, above 0."""
    inside = np.clip((masks * density).sum((1, 2)), 0, None)
    share: npt.NDArray[np.float64] = (inside + _SOME) / (max(float(density.sum()), 0.0) + _SOME)
    return np.minimum(share, 1.0)


def probability_above(amount: Amount, limit: float) -> float:
    """Return the probability of more than `limit` people, with 0.5 added to the limit because counts are integers.

    >>> round(probability_above(Amount(20.5, 4.0), 20), 3)
    0.5
    """
    far = (np.floor(limit) + 0.5 - amount.mean) / max(amount.variance, 1e-12) ** 0.5
    if amount.dof is not None:
        from scipy.stats import t

        return float(t.sf(far, amount.dof))
    return 0.5 * (1 - erf(far / 2**0.5))


Colour = Literal["green", "amber", "red"]
_KEEP = 0.5  # probability of exceeding the limit from which a red zone stays red


@dataclass(frozen=True)
class Rule:
    """Set how certain an alarm has to be, and how long a change has to last."""

    sure: float = 0.9  # probability from which on a zone turns red; below one minus it, green
    hold: float = 2.0  # seconds that a change must last

    def __post_init__(self) -> None:
        if not 0.5 < self.sure < 1:
            raise ArgumentError(f"expected --sure above 0.5 and below 1; found {self.sure}.")
        if not 0 <= self.hold <= 3600:
            raise ArgumentError(f"expected --hold from 0 to 3600 seconds; found {self.hold}.")

    def wanted(self, probability: float, now: Colour | None) -> Colour:
        """Return the colour for a probability, given the colour shown now."""
        if probability >= self.sure or (now == "red" and probability >= _KEEP):
            return "red"
        calm = 1 - self.sure + 1e-9
        # Hysteresis: a green zone stays green up to twice the probability at which it turns green.
        if probability <= calm or (now == "green" and probability <= min(2 * calm, _KEEP)):
            return "green"
        return "amber"


class Alarm:
    """Track the colour of one zone."""

    def __init__(self, rule: Rule, colour: Colour | None = None) -> None:
        self.rule, self.colour = rule, colour
        self.coming: Colour | None = None  # colour of the latest frames that has not lasted long enough to be shown
        self._since = 0.0

    def update(self, probability: float, time: float) -> Colour | None:
        """Take the probability of one frame; return the new colour if it changes, else None."""
        wanted = self.rule.wanted(probability, self.colour)
        if wanted == self.colour:
            self.coming = None
            return None
        if self.colour is not None:
            if wanted != self.coming:
                self.coming, self._since = wanted, time
            if time - self._since < self.rule.hold:
                return None
        self.colour, self.coming = wanted, None
        return wanted
