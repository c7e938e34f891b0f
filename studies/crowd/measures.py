"""Measures of a variance for millions of pixels, from one sort; and controls that know nothing of dropout.

With `r = |target - mean| / std`, sorted once, every scale `c` of the variance is judged at no further cost:

    pi_c(a) = share of r <= z_a sqrt(c),     NLL(c) = mean(r^2) / (2 c) + mean(log v) / 2 + log(c) / 2,

the latter without `log(2 pi) / 2`, as the paper has it. Scales and floor are fitted on the validation frames by
`latedrop.calibration.scale`; the numbers are those of `latedrop.metrics`.

Errors of counts grow with the count, and so does any variance that dropout gives; what it says beyond that shows beside
the control `variance = a · count + b`, fitted on the validation frames.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from latedrop import optimal_scale, relaxed_scale
from latedrop.calibration.scale import fit_floor, lifted
from latedrop.errors import DataError
from latedrop.metrics import ideal_nll, rank_correlation
from latedrop.metrics.levels import central_quantile, even_levels, fraction_inside
from latedrop_crowd.blocks import block_means
from studies.driver import rounded
from studies.regression.scores import conformal_reach
from studies.site_rates import scored

Measures: TypeAlias = dict[str, Any]

KINDS = ("unscaled", "scaled", "relaxed", "floor")
"""The variance as it is; times the optimal scale; times the relaxed scale; times a scale, plus a floor."""
COVERAGES = (0.5, 0.8, 0.9, 0.95)
_STEPS = 21


@dataclass(frozen=True)
class Predicted:
    """Mean, variance and target, flat, `(n,)` each, frame after frame."""

    mean: Tensor
    variance: Tensor
    target: Tensor
    frames: int = 1

    def lifted(self, least: float) -> "Predicted":
        """With `least` in the place of variances of 0."""
        floor = torch.tensor([least], dtype=torch.float64)
        return replace(self, variance=lifted(self.variance, floor))

    @property
    def error(self) -> Tensor:
        """Target minus mean, in float64."""
        return self.target.double() - self.mean.double()


@dataclass(frozen=True)
class Fit:
    """Hold scales and floor of a variance, fitted to the validation frames.

    Attributes:
        scale: of least NLL.
        relaxed_scale: of a balanced calibration curve.
        floor_scale: of least NLL together with `floor`.
        floor: what is added.
        least: the smallest variance that is not 0; it stands in for those that are.
    """

    scale: float
    relaxed_scale: float
    floor_scale: float
    floor: float
    least: float


class Ratios:
    """Sorted `|error| / std`, and what else any scale of the variance needs."""

    def __init__(self, error: Tensor, variance: Tensor, frames: int = 1) -> None:
        variance = variance.double()
        square = error.square() / variance
        self.squares = square.view(frames, -1).mean(1).cpu()
        self.logs = variance.log().view(frames, -1).mean(1).cpu()
        self.square, self.log = float(self.squares.mean()), float(self.logs.mean())
        self.std = float(variance.sqrt().mean())
        self.ordered = square.sqrt_().sort().values

    def nll(self, scale: float = 1.0) -> float:
        """The NLL of `scale · variance`, without the constant."""
        return (self.square / scale + self.log + math.log(scale)) / 2

    def nll_by_frame(self, scale: float = 1.0) -> Tensor:
        """Return the NLL of each frame, `(frames,)`."""
        return (self.squares / scale + self.logs + math.log(scale)) / 2

    def inside(self, at: Sequence[float], scales: Sequence[float] = (1.0,)) -> Tensor:
        """The share of targets in their central interval, `(scales, levels)`, on the CPU."""
        z = central_quantile(torch.tensor(at, dtype=torch.float64))
        bounds = torch.tensor(scales, dtype=torch.float64).sqrt()[:, None] * z
        return fraction_inside(self.ordered, bounds.to(self.ordered)).cpu()

    def width(self, level: float, scale: float = 1.0) -> float:
        """Mean width of the interval at a level."""
        return 2 * central_quantile(level) * math.sqrt(scale) * self.std


def levels() -> list[float]:
    """The 99 levels of the calibration curves."""
    return [float(level) for level in even_levels(99)]


def fit(validation: Predicted) -> Fit:
    """Scales and floor of the validation frames.

    Raises:
        DataError: no variance is above 0, or no error is.
    """
    positive = validation.variance[validation.variance > 0]
    if not len(positive):
        raise DataError(
            "expected a variance above 0 somewhere on the validation frames; found none: no draw changed the map. "
            "Use a larger rate, more draws, or other weights."
        )
    least = float(positive.min())
    validation = validation.lifted(least)
    rows = validation.mean, validation.variance, validation.target
    floor_scale, floor = fit_floor(*rows)
    return Fit(float(optimal_scale(*rows)), float(relaxed_scale(*rows)), float(floor_scale), float(floor), least)


def judge(part: Predicted, fitted: Fit, *, intervals: bool = False) -> Measures:
    """RMSE, MAE, and of each kind NLL, miscalibration area and curve; the path between the scales; means over blocks.

    Args:
        part: the frames of one part.
        fitted: from the validation frames.
        intervals: also coverage and mean width at `COVERAGES`.
    """
    zeros = int((part.variance <= 0).sum())
    part = part.lifted(fitted.least)
    error = part.error
    scaled = Ratios(error, part.variance, part.frames)
    floored = Ratios(error, part.variance.double() * fitted.floor_scale + fitted.floor, part.frames)
    scales = {"unscaled": 1.0, "scaled": fitted.scale, "relaxed": fitted.relaxed_scale}
    looks = {kind: (scaled, scale) for kind, scale in scales.items()} | {"floor": (floored, 1.0)}
    measures: Measures = {
        "rmse": float(error.square().mean().sqrt()),
        "mae": float(error.abs().mean()),
        "nll_ideal": float(ideal_nll(torch.zeros_like(error), None, error, constant=False)),
        "zero_variances": zeros,
        "entries": len(error),
        "curves": {},
    }
    grid = even_levels(99)
    for kind, (ratios, scale) in looks.items():
        observed = ratios.inside(levels(), [scale])[0]
        measures[f"nll_{kind}"] = ratios.nll(scale)
        measures[f"ma_{kind}"] = float((observed - grid).abs().mean())
        measures["curves"][kind] = [round(value, 5) for value in observed.tolist()]
    if intervals:
        held = {k: ratios.inside(COVERAGES, [scale])[0] for k, (ratios, scale) in looks.items()}
        measures["coverage"] = {k: shares.tolist() for k, shares in held.items()}
        measures["width"] = {k: [ratios.width(a, scale) for a in COVERAGES] for k, (ratios, scale) in looks.items()}
    measures["path"] = _path(scaled, fitted, grid)
    measures["blocks"] = {"mae": blocks(error.abs().view(part.frames, -1).mean(1))}
    measures["blocks"] |= {f"nll_{kind}": blocks(ratios.nll_by_frame(scale)) for kind, (ratios, scale) in looks.items()}
    return measures


def judge_both(validation: Predicted, test: Predicted, *, intervals: bool = False) -> Measures:
    """`fit` on the validation frames, `judge` on both parts; plain data for JSON."""
    fitted = fit(validation)
    parts = {"validation": validation, "test": test}
    measures: Measures = {name: judge(part, fitted, intervals=intervals) for name, part in parts.items()}
    return measures | {"fit": {name: float(value) for name, value in vars(fitted).items()}}


def blocks(by_frame: Tensor) -> list[float]:
    """Means over blocks of consecutive frames; see `latedrop_crowd.blocks`."""
    return [rounded(mean) for mean in block_means(by_frame.double().cpu().numpy()).tolist()]


def agreement(variance: Tensor, other: Tensor) -> Measures:
    """How `variance` goes with `other`: their rank correlation, the ratio of their means, and the median ratio.

    >>> round(agreement(torch.tensor([2.0, 4.0, 8.0]), torch.tensor([1.0, 2.0, 4.0]))["rank_correlation"], 6)
    1.0
    """
    variance, other = variance.double(), other.double()
    both = (variance > 0) & (other > 0)
    ratio = variance[both] / other[both]
    return {
        "rank_correlation": float(rank_correlation(torch.zeros_like(other), variance, other)),
        "ratio_of_means": float(variance.mean() / other.mean()),
        "median_ratio": float(ratio.median()) if len(ratio) else None,
    }


def conformal(error: Mapping[str, Tensor], std: Mapping[str, Tensor] | None = None) -> Measures:
    """Split conformal intervals `mean ± s · std` of counts: coverage and mean width at `COVERAGES`.

    Args:
        error: of both parts, `validation` and `test`, `(n,)` each.
        std: likewise; one for all where None.

    A level that needs more validation frames than there are has None.
    """
    validation, test = error["validation"], error["test"]
    spread = {name: torch.ones_like(values) for name, values in error.items()} if std is None else std
    measures: Measures = {"coverage": [], "width": []}
    for reach in conformal_reach(validation / spread["validation"], list(COVERAGES)):
        radius = reach * spread["test"]
        bounded = math.isfinite(reach)
        measures["coverage"].append(float((test.abs() <= radius).double().mean()) if bounded else None)
        measures["width"].append(float(2 * radius.mean()) if bounded else None)
    return measures


def _path(ratios: Ratios, fitted: Fit, grid: Tensor) -> dict[str, list[float]]:
    """Geometric steps from the optimal to the relaxed scale."""
    step = (fitted.relaxed_scale / fitted.scale) ** (1 / (_STEPS - 1))
    scales = [fitted.scale * step**k for k in range(_STEPS)]
    observed = ratios.inside(levels(), scales)
    return {
        "scale": [rounded(scale) for scale in scales],
        "nll": [rounded(ratios.nll(scale)) for scale in scales],
        "ma": [rounded(value) for value in (observed - grid).abs().mean(1).tolist()],
    }


Counted: TypeAlias = tuple[Tensor, Tensor]
"""Counts of the plain network and true ones, `(N,)` each."""

SIZE = "a · count + b"
"""What the control is called in tables."""


def size_control(parts: Mapping[str, Counted]) -> dict[str, Any]:
    """`a · count + b` as the variance of the count, fitted to the validation frames; measures of every part."""
    count, truth = (part.double().cpu() for part in parts["validation"])
    a, b = _size_fit(truth - count, count.clamp_min(0))
    record: dict[str, Any] = {"a": a, "b": b}
    for name, (mean, target) in parts.items():
        variance = a * mean.double().cpu().clamp_min(0) + b
        record[name] = control(Predicted(mean.cpu(), variance, target.cpu(), len(variance)), intervals=True)
    return record


def _size_fit(error: Tensor, count: Tensor) -> tuple[float, float]:
    """The a and b of most likelihood, as if 5 rows more had the average error, and at a price of 2 / n for a."""
    rows, size, mean = len(error), error.square().mean(), count.mean()
    if not float(mean) > 0:
        return 0.0, float(size)
    unit = torch.stack([count / mean, torch.ones_like(count)], 1)
    shrunk = (rows * error.square() / size + 5) / (rows + 5)
    start, charge = unit.new_tensor([0.0, 1.0]), unit.new_tensor([2 / rows, 0.0])
    a, b = scored(shrunk, unit, start, torch.zeros_like(start), charge).tolist()
    return a * float(size / mean), max(b, 1e-4) * float(size)


def control(part: Predicted, *, intervals: bool) -> dict[str, Any]:
    """The measures of a variance that is taken as it is."""
    measures = judge(part, Fit(1.0, 1.0, 1.0, 0.0, float(torch.finfo(torch.float64).tiny)), intervals=intervals)
    flat = {key: measures[key] for key in ("rmse", "mae", "nll_ideal")}
    flat |= {"nll": measures["nll_unscaled"], "ma": measures["ma_unscaled"]}
    flat["curve"] = measures["curves"]["unscaled"]
    flat["blocks"] = {"mae": measures["blocks"]["mae"], "nll": measures["blocks"]["nll_unscaled"]}
    if intervals:
        flat |= {key: measures[key]["unscaled"] for key in ("coverage", "width")}
    return flat
