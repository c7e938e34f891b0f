"""Predict several outputs together: ellipsoids, and bands that contain all outputs of a row at once.

With the calibrated standard deviations s of a row and its standardised errors `z = (target - mean) / s`, the errors
have the correlation

    R(x) = a · I + (1 - a) · (b · C + (1 - b) · P(x)),

C is the correlation of the standardised errors of labelled rows, the same for all rows, and P(x) that of the outputs to
first order over shared masks: with mask gradients phi_k of each output, `P_kl = phi_k · phi_l / (|phi_k| |phi_l|)`.
Each has a diagonal of 1, so the variance of every output stays as it was calibrated. One half of the labelled rows is
used to choose a and b by likelihood, with C from other rows of this half. On the n rows of the other half

    region: z' R^-1 z <= q,      bands: |z_k| <= r for all k,

where q and r are the `ceil((n + 1) level)`-th smallest value: a new exchangeable row then lies inside with probability
`level` at least, whether R is right or not.

References: Johnstone and Cox (2021), conformal ellipsoids; Messoudi, Destercke and Rousseau (2022), with a covariance
for each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import CrossValidation
from latedrop.calibration.record import Calibration
from latedrop.calibration.targets import Log
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.levels import checked_level
from latedrop.prediction.prediction import Prediction
from latedrop.quantiles import conformal_score

__all__ = ["Joint", "JointPrediction", "Region", "check_outputs", "correlation_of", "fit_joint"]

_MOST_OUTPUTS = 64
_FEWEST_ROWS = 20
_MOST_ROWS = 1000  # that choose the weights
_ALONE = (0.01, 0.03, 0.1, 0.3)  # shares of independent errors
_COMMON = (0.0, 0.25, 0.5, 0.75, 1.0)
_FOLDS = 5


@dataclass(frozen=True)
class Region:
    """Hold an ellipsoid for each of N rows that contains the whole target `(K,)` with a given probability.

    Attributes:
        level: that probability.
        mean: `(N, K)`, the centres.
        root: `(N, K, K)`, lower triangular: the points are `mean + root @ u` with `|u| <= 1`.
    """

    level: float
    mean: Tensor
    root: Tensor

    def contains(self, target: Tensor) -> Tensor:
        """Return True for each row whose target `(N, K)` lies inside, `(N,)`."""
        target = torch.as_tensor(target)
        if target.shape != self.mean.shape:
            raise DataError(
                f"expected targets of shape {tuple(self.mean.shape)}, one vector for each row; found "
                f"{tuple(target.shape)}. Pass them in the order of the outputs."
            )
        off = (target.to(self.mean) - self.mean)[..., None]
        inside: Tensor = torch.linalg.solve_triangular(self.root, off, upper=False)[..., 0].square().sum(1) <= 1
        return inside

    @property
    def log_volume(self) -> Tensor:
        """Return the log volume `(N,)`, in the product of the units of the outputs."""
        outputs = self.mean.shape[1]
        ball = outputs / 2 * math.log(math.pi) - math.lgamma(outputs / 2 + 1)
        return ball + self.root.diagonal(dim1=1, dim2=2).log().sum(1)

    def outline(self, first: int = 0, second: int = 1, points: int = 100) -> Tensor:
        """Return the outline `(N, points, 2)` of each ellipsoid projected on two outputs, for drawing."""
        outputs = self.mean.shape[1]
        if first == second or not all(-outputs <= k < outputs for k in (first, second)):
            raise ArgumentError(
                f"expected two different outputs of {outputs}, counted from 0; found {first} and {second}."
            )
        pair = self.root[:, [first, second]]
        edge = torch.linalg.cholesky(pair @ pair.mT)
        angle = torch.linspace(0, 2 * math.pi, points, dtype=edge.dtype, device=edge.device)
        circle = torch.stack([angle.cos(), angle.sin()])
        points_around: Tensor = self.mean[:, None, [first, second]] + (edge @ circle).mT
        return points_around


@dataclass(frozen=True)
class Joint:
    """Hold the correlation model of the errors of several outputs."""

    alone: float  # the weight a of independent errors
    common: Tensor  # `(K, K)`, the correlation C of the errors of all rows
    share: float  # the weight b of C beside that of each row
    distances: tuple[float, ...] = ()  # `(n,)`, sorted values of `z' R^-1 z`
    largest: tuple[float, ...] = ()  # `(n,)`, sorted values of the largest `|z_k|`

    def correlation(self, by_row: Tensor) -> Tensor:
        """Return the correlation R from P, both `(N, K, K)`."""
        common = self.common.to(by_row)
        mixed = self.share * common + (1 - self.share) * by_row
        return self.alone * torch.eye(len(common)).to(by_row) + (1 - self.alone) * mixed


@dataclass(frozen=True, kw_only=True, repr=False)
class JointPrediction(Prediction):
    """Hold predictions of several outputs with the correlation of their errors.

    Attributes:
        by_row: `(N, K, K)`, the correlation of the outputs to first order over shared masks.
        joint: the correlation model, with the distances of labelled rows.
    """

    by_row: Tensor
    joint: Joint

    @property
    def correlation(self) -> Tensor:
        """Return the correlation `(N, K, K)` of the errors of each row."""
        return self.joint.correlation(self.by_row)

    @property
    def covariance(self) -> Tensor:
        """Return the covariance `(N, K, K)` of the errors of each row; its diagonal is `variance`."""
        std = self.std.double()
        return std[:, :, None] * self.correlation * std[:, None, :]

    def region(self, level: float = 0.9) -> Region:
        """Return ellipsoids that contain all outputs of a row together with probability `level`."""
        radius = _score(self.joint.distances, level) ** 0.5
        root = radius * self.std.double()[..., None] * torch.linalg.cholesky(self.correlation)
        return Region(checked_level(level), self.mean.double(), root)

    def bands(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends `(N, K)` of intervals that contain all outputs of a row at once with probability `level`."""
        width = _score(self.joint.largest, level) * self.std
        return self.mean - width, self.mean + width


def check_outputs(calibration: Calibration) -> None:
    """Raise `ArgumentError` unless outputs are vectors `(N, K)` in the unit of the targets or a linear one."""
    shape = calibration.output_shape
    if len(shape) != 1 or not 2 <= shape[0] <= _MOST_OUTPUTS:
        raise ArgumentError(
            f"expected 2 to {_MOST_OUTPUTS} outputs for each row to describe them together; found outputs of shape "
            f"{shape}. Pass a readout that gives as many."
        )
    if isinstance(calibration.target, Log):
        raise ArgumentError(
            "expected targets that were not transformed, or Standardized; found Log(), under which an ellipsoid is "
            "none. Calibrate in logarithms: leave target= out and pass log targets."
        )


def fit_joint(p: JointPrediction, target: Tensor, seed: int) -> Joint:
    """Fit `Joint` to labelled rows, in the model's unit."""
    if len(target) < _FEWEST_ROWS:
        raise DataError(
            f"expected at least {_FEWEST_ROWS} rows to see how errors go together; found {len(target)}. Pass more rows "
            "to joint(...)."
        )
    z = (target.double() - p.mean.double()) / p.std.double()
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    half = len(z) // 2
    chosen, rest = order[:half][:_MOST_ROWS], order[half:]
    joint = _weights(z[chosen], p.by_row[chosen], p.calibration.degrees)
    distances = _distances(joint.correlation(p.by_row[rest]), z[rest])[0]
    largest = z[rest].abs().amax(1)
    return replace(
        joint, distances=tuple(distances.sort().values.tolist()), largest=tuple(largest.sort().values.tolist())
    )


def _weights(z: Tensor, by_row: Tensor, degrees: float | None) -> Joint:
    """Choose a and b by the likelihood of rows left out of C; return them with C of all rows."""
    identity = torch.eye(z.shape[1], dtype=z.dtype)
    options = [(1.0, 1.0), *product(_ALONE, _COMMON)]
    losses = dict.fromkeys(options, 0.0)
    for rest, out in CrossValidation(count=_FOLDS).splits(len(z)):
        common = correlation_of(z[rest].mT[None])[0]  # of errors around 0
        for alone, share in options:
            by_option = Joint(alone, identity if alone == 1 else common, share).correlation(by_row[out])
            distance, log_det = _distances(by_option, z[out])
            # Minus the logarithm of the density, Gaussian or Student, up to a constant.
            tail = distance / 2
            if degrees is not None:
                tail = (degrees + z.shape[1]) / 2 * torch.log1p(distance / (degrees - 2))
            losses[alone, share] += float((log_det / 2 + tail).sum())
    alone, share = min(options, key=losses.__getitem__)
    return Joint(alone, correlation_of(z.mT[None])[0], share)


def _distances(correlation: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return `z' R^-1 z` and the log determinant of R, `(N,)` each."""
    root = torch.linalg.cholesky(correlation)
    distance = torch.linalg.solve_triangular(root, z[..., None], upper=False)[..., 0].square().sum(1)
    return distance, 2 * root.diagonal(dim1=1, dim2=2).log().sum(1)


def correlation_of(vectors: Tensor) -> Tensor:
    """Return the cosines `(N, K, K)` between vectors `(N, K, D)`; those with a vector of zeros are 0."""
    vectors = vectors.double()
    unit = vectors / vectors.norm(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    cosines: Tensor = unit @ unit.mT
    cosines.diagonal(dim1=1, dim2=2).fill_(1)
    return cosines


def _score(scores: tuple[float, ...], level: float) -> float:
    level = checked_level(level)
    remedy = "Pass twice as many rows to joint(...), or ask for a lower level."
    return conformal_score(scores, level, 0.0, " in the second half of those of joint(...)", remedy)
