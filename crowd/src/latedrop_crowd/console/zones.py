r"""Zones: polygons on the picture, each with a count, an interval and a limit of its own.

The count of a zone is the sum `m_z` of the density inside. Its variance follows the first order of that very sum: with
`V` the count's calibrated variance and `v`, `v_z` the first-order variances of the whole sum and of the zone's (one
backward pass each, so that what cells have in common is in them),

    V_z = V · v_z / v + sum over cells of d g (1 - g),

the last part being people on the zone's edge: `d` is the density and `g` the zone's mask, blurred as heads are. A
person who is half inside counts as a half, while whoever looks says 0 or 1. Between two such passes `v_z / v` moves
with the zone's share of the people.

A limit is judged by the probability that it is exceeded. A zone turns red when it is sure enough that there are too
many people, green when it is as sure that there are not; what lies between is amber, "cannot tell". Once red it stays
so until that is less likely than not, and a change must last for some seconds: a single frame may be odd.
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
_SOME = 0.5  # people added to both sides of a share, so that an empty zone has one


@dataclass(frozen=True)
class Zone:
    """A zone."""

    id: int  # its number in the store
    source: str  # name of the source it belongs to
    name: str  # for people
    points: Points  # corners as x, y in [0, 1] of the picture; none where the whole picture is meant
    limit: float | None  # people; more than so many are too many. None: it is only counted

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        points = [list(point) for point in self.points]
        return {"id": self.id, "source": self.source, "name": self.name, "points": points, "limit": self.limit}


@dataclass(frozen=True)
class Amount:
    """How many people, with what is not known about it."""

    mean: float  # people
    variance: float  # of a t-distribution the squared scale
    dof: float | None = None  # degrees of freedom; None: Gaussian

    def interval(self, reach: float) -> tuple[float, float]:
        """From `reach` scales below to as many above; people are never fewer than none."""
        half = reach * self.variance**0.5
        return max(0.0, self.mean - half), max(0.0, self.mean + half)


def checked_points(value: Any) -> Points:
    """Corners of a polygon from plain data; `DataError` where they are none."""
    try:
        points = tuple((float(x), float(y)) for x, y in (json.loads(value) if isinstance(value, str) else value))
    except (TypeError, ValueError):
        points = ((float("nan"), 0.0),)
    inside = all(isfinite(x) and isfinite(y) and 0 <= x <= 1 and 0 <= y <= 1 for x, y in points)
    if not inside or not (len(points) == 0 or 3 <= len(points) <= _MOST_CORNERS):
        raise DataError(
            f"expected 3 to {_MOST_CORNERS} corners of a zone, as x and y from 0 to 1 of the picture; found "
            f"{len(points)} or others."
        )
    return points


def drawn_points(value: Any) -> Points:
    """Corners of a new zone: as `checked_points`, and an outline that has an area and does not cross itself.

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
    """Whether two straight lines from `a` to `b` and from `c` to `d` have a point in common."""

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
    """The cells `(h, w)` whose middle lies inside a polygon, by the even-odd rule; all of them without corners.

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
    """`v_z / v` of each zone `(Z,)` on a frame `(C, H, W)`, from the gradients of the zones' own sums.

    Sites count as the calibration weighs them; where dropout has no share in it, all alike.
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
    """The zones' shares of the count's variance."""

    masks: npt.NDArray[np.bool_]  # cells of each zone, bool `(Z, h, w)`
    ratio: npt.NDArray[np.float64]  # `v_z / v` of each, measured on some frame, `(Z,)`
    people: npt.NDArray[np.float64]  # the zones' share of the people in that frame, `(Z,)`
    blurred: npt.NDArray[np.float64]  # the masks as heads are blurred, `(Z, h, w)`

    @classmethod
    def measured(
        cls,
        trained: Trained,
        calibration: CrowdCalibration,
        image: Tensor,
        density: npt.NDArray[np.float64],
        zones: Sequence[Points],
    ) -> Shares:
        """On one frame as the network takes it, whose density is known."""
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
        """Count and variance of each zone, from those of the whole picture."""
        total, part = float(density.sum()), (self.masks * density).sum((1, 2))
        shift = whole.mean - total  # recalibration and labels move the count; each zone gets its share of that
        now = _share(self.masks, density)
        ratio = self.ratio * now / self.people
        edge = (np.clip(density, 0, None) * self.blurred * (1 - self.blurred)).sum((1, 2))
        return [
            Amount(float(m + shift * s), float(max(whole.variance * r + e, 1e-6)), whole.dof)
            for m, s, r, e in zip(part, now, ratio, edge, strict=True)
        ]


def _share(masks: npt.NDArray[np.bool_], density: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip((masks * density).sum((1, 2)), 0, None)
    share: npt.NDArray[np.float64] = (inside + _SOME) / (max(float(density.sum()), 0.0) + _SOME)
    return np.minimum(share, 1.0)


def probability_above(amount: Amount, limit: float) -> float:
    """That there are more than `limit` people; people are whole, so half a person more than it is the edge.

    >>> round(probability_above(Amount(20.5, 4.0), 20), 3)
    0.5
    """
    far = (np.floor(limit) + 0.5 - amount.mean) / max(amount.variance, 1e-12) ** 0.5
    if amount.dof is not None:
        from scipy.stats import t

        return float(t.sf(far, amount.dof))
    return 0.5 * (1 - erf(far / 2**0.5))


Colour = Literal["green", "amber", "red"]
_KEEP = 0.5  # of being too many: above it, red stays red


@dataclass(frozen=True)
class Rule:
    """How sure, and for how long."""

    sure: float = 0.9  # probability from which on a zone turns red; below one minus it, green
    hold: float = 2.0  # seconds that a change must last

    def __post_init__(self) -> None:
        if not 0.5 < self.sure < 1:
            raise ArgumentError(f"expected --sure above 0.5 and below 1; found {self.sure}.")
        if not 0 <= self.hold <= 3600:
            raise ArgumentError(f"expected --hold from 0 to 3600 seconds; found {self.hold}.")

    def wanted(self, probability: float, now: Colour | None) -> Colour:
        """The colour that a probability asks for, given the present one."""
        if probability >= self.sure or (now == "red" and probability >= _KEEP):
            return "red"
        calm = 1 - self.sure + 1e-9
        # From green one leaves later than one comes back to it.
        if probability <= calm or (now == "green" and probability <= min(2 * calm, _KEEP)):
            return "green"
        return "amber"


class Alarm:
    """The state of one zone's limit."""

    def __init__(self, rule: Rule, colour: Colour | None = None) -> None:
        self.rule, self.colour = rule, colour
        self.coming: Colour | None = None  # what frames ask for, where it has not lasted long enough to show
        self._since = 0.0

    def update(self, probability: float, time: float) -> Colour | None:
        """Look at one frame; the new colour where it changes, else None."""
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
