r"""Counts for a new scene, from a few labelled frames of it.

With `c` the count and `v` its variance as calibrated before, and `u = v / mean(v)` its size beside those of the n
labelled frames, the true count is taken to be

    y = c + b0 + b1 (c - m) + e,      e ~ Normal(0, s2 · u),

`m` being the mean count of these frames. The prior is the old calibration: `b0` and `b1` around 0, and `s2` around
`mean(v)`, worth a few frames. Neighbouring frames err alike, so the n frames count as `n_e = n / tau` independent ones,
`tau = 1 + 2 (r_1 + r_2 + ...)` with `r_k` the autocorrelation of the errors, up to the first that is not above 0. The
posterior is that of a linear regression; predictions are Student's t with `nu0 + n_e` degrees of freedom (Gelman et
al., "Bayesian Data Analysis", chapter 14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError
from latedrop.records import Limits, record

__all__ = ["FEWEST", "Recalibration", "effective_frames", "fit_recalibration", "t_quantile"]

FEWEST = 5
"""Labelled frames below which nothing is fitted."""
_PRIOR_FRAMES = 3.0  # what the old variance is worth
_OFFSET, _SLOPE = 5.0, 0.2  # prior deviations: of the offset in old deviations, of the slope as a share

Floats = npt.NDArray[np.float64]
_Number: TypeAlias = Annotated[float, Limits(-1e30, 1e30)]
_Positive: TypeAlias = Annotated[float, Limits(1e-30, 1e30)]
_Amount: TypeAlias = Annotated[float, Limits(0, 1e30)]


@record
@dataclass(frozen=True)
class Recalibration:
    """How counts of a new scene follow from those of the old calibration.

    Attributes:
        center: mean count of the labelled frames, before.
        offset: added to the count at the center.
        slope: added per person that the count is above the center.
        variance: `s2`, of a frame whose old variance is `unit`.
        unit: mean of the old variances of the labelled frames.
        dof: degrees of freedom of the t-intervals.
        offset_variance: of `offset`, in units of `variance`.
        slope_variance: of `slope`, in the same units.
        covariance: of both.
        frames: labelled frames.
        effective: how many independent ones they are worth.
        mae_before: of the labelled frames.
        mae_after: of the same frames.
        strangeness: of the strangest of them, at least 1: what is usual in this scene.
    """

    center: _Number
    offset: _Number
    slope: _Number
    variance: _Positive
    unit: _Positive
    dof: Annotated[float, Limits(2.001, 1e30)]
    offset_variance: _Positive
    slope_variance: _Positive
    covariance: _Number
    frames: Annotated[int, Limits(FEWEST)]
    effective: _Amount
    mae_before: _Amount
    mae_after: _Amount
    strangeness: _Amount = 1.0

    def apply(self, count: float, variance: float) -> tuple[float, float]:
        """Count, and the squared scale of its t-distribution, from those of the old calibration."""
        along = count - self.center
        unsure = self.offset_variance + 2 * along * self.covariance + along**2 * self.slope_variance
        return count + self.offset + self.slope * along, self.variance * (variance / self.unit + max(unsure, 0.0))

    def __str__(self) -> str:
        return (
            f"recalibrated on {self.frames} frames of the scene, worth {self.effective:.1f} independent ones: count "
            f"{self.offset:+.2f} {self.slope:+.3f} · (count - {self.center:.1f}), std {self.variance**0.5:.2f}, t with "
            f"{self.dof:.1f} degrees of freedom; MAE of these frames {self.mae_before:.2f} before, "
            f"{self.mae_after:.2f} after"
        )


def effective_frames(errors: Sequence[float] | Floats) -> float:
    """How many independent frames consecutive errors `(n,)` are worth, from 1 to n.

    >>> effective_frames([1.0, -1.0, 1.0, -1.0])
    4.0
    """
    e = np.asarray(errors, dtype=np.float64)
    e = e - e.mean()
    power = float(e @ e)
    tau = 1.0
    for lag in range(1, len(e)):
        r = float(e[:-lag] @ e[lag:]) / power if power > 0 else 0.0
        if r <= 0:
            break
        tau += 2 * r
    return max(1.0, len(e) / tau)


def t_quantile(level: float, dof: float) -> float:
    """Half the width of the central interval of Student's t that holds `level`, in units of its scale."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, dof))


def fit_recalibration(count: Floats, variance: Floats, truth: Floats, strangeness: float = 1.0) -> Recalibration:
    """Fit to labelled frames in their order in time, all `(n,)`: counts and variances before, and true counts.

    `strangeness` is that of the strangest of them.

    Raises:
        DataError: too few frames, or not as many of each.
    """
    c, v, y = (np.asarray(part, dtype=np.float64) for part in (count, variance, truth))
    if not len(c) == len(v) == len(y) or len(c) < FEWEST:
        raise DataError(
            f"expected counts, variances and true counts of the same {FEWEST} frames or more, better 20 spread over "
            f"the new scene; found {len(c)}, {len(v)} and {len(y)}."
        )
    unit = float(v.mean())
    center = float(c.mean())
    x = np.stack([np.ones_like(c), c - center], 1)
    error = y - c
    # Errors around a line, which the fit takes out, tell how alike neighbours are.
    line = np.linalg.lstsq(x, error, rcond=None)[0]
    effective = min(effective_frames(error - x @ line), float(len(c)))
    weight = effective / len(c) / (v / unit)
    spread = np.array([_OFFSET, _SLOPE / max(unit, 1e-12) ** 0.5])
    prior = np.diag(1 / np.maximum(spread, 1e-6) ** 2)
    precision = prior + (x * weight[:, None]).T @ x
    covariance = np.linalg.inv(precision)
    beta = covariance @ (x * weight[:, None]).T @ error
    left = float(weight @ (error - x @ beta) ** 2 + beta @ prior @ beta)
    dof = _PRIOR_FRAMES + effective
    after = error - x @ beta
    return Recalibration(
        center=center,
        offset=float(beta[0]),
        slope=float(beta[1]),
        variance=(_PRIOR_FRAMES * unit + left) / dof,
        unit=unit,
        dof=dof,
        offset_variance=float(covariance[0, 0]),
        slope_variance=float(covariance[1, 1]),
        covariance=float(covariance[0, 1]),
        frames=len(c),
        effective=effective,
        mae_before=float(np.abs(error).mean()),
        mae_after=float(np.abs(after).mean()),
        strangeness=max(1.0, strangeness),
    )
