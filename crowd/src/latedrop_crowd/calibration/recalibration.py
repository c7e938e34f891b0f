r"""Counts for a new scene, from a few labelled frames of it.

With `c` the count and `v` its variance as calibrated before, and `u = v / mean(v)` its size beside those of the n
labelled frames, the true count is taken to be

    y = c + b0 + b1 (c - m) + e,      e ~ Normal(0, s2 · u),

`m` being the mean count of these frames. The prior is the old calibration: `b0` and `b1` around 0, and `s2` around
`mean(v)`, or around the mean squared error of the labelled frames where that is larger, worth a few frames.
Neighbouring frames err alike, so the n frames count as `n_e = n / tau` independent ones,
`tau = 1 + 2 (r_1 + r_2 + ...)` with `r_k` the autocorrelation of the errors, up to the first that is not above 0. The
posterior is that of a linear regression; predictions are Student's t with `nu0 + n_e` degrees of freedom (Gelman et
al., "Bayesian Data Analysis", chapter 14).

The line is one of three candidates; the others have `b1 = 0`, or leave the count as it was. The one whose mean absolute
error on blocks of frames left out of the fit is least is used, the simpler of equals. A line that falls (`1 + b1 < 0`)
is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError
from latedrop.records import Limits, record

__all__ = ["FEWEST", "Recalibration", "effective_frames", "fit_recalibration", "t_quantile"]

FEWEST = 5
"""Labelled frames below which nothing is fitted."""
_PRIOR_FRAMES = 3.0  # what the old variance is worth
_OFFSET, _SLOPE = 5.0, 0.2  # prior deviations: of the offset in old deviations, of the slope as a share
_BLOCKS = 5  # of frames that are left out, one after the other

Floats = npt.NDArray[np.float64]
Form: TypeAlias = Literal["as before", "offset", "line"]
_Number: TypeAlias = Annotated[float, Limits(-1e30, 1e30)]
_Positive: TypeAlias = Annotated[float, Limits(1e-30, 1e30)]
_Amount: TypeAlias = Annotated[float, Limits(0, 1e30)]


@record
@dataclass(frozen=True)
class Recalibration:
    """How counts of a new scene follow from those of the old calibration."""

    center: _Number  # mean count of the labelled frames, before
    offset: _Number  # added to the count at the center
    slope: Annotated[float, Limits(-1, 1e30)]  # added per person that the count is above the center
    variance: _Positive  # `s2`, of a frame whose old variance is `unit`
    unit: _Positive  # mean of the old variances of the labelled frames
    dof: Annotated[float, Limits(2.001, 1e30)]  # degrees of freedom of the t-intervals
    offset_variance: _Amount  # of `offset`, in units of `variance`
    slope_variance: _Amount  # of `slope`, in the same units
    covariance: _Number  # of both
    frames: Annotated[int, Limits(FEWEST)]  # labelled frames
    effective: _Amount  # how many independent ones they are worth
    mae_before: _Amount  # of the labelled frames
    mae_after: _Amount  # of the same frames, each left out of the fit
    form: Form  # how counts are moved: not at all (`"as before"`), by an `"offset"`, or along a `"line"`
    strangeness: _Amount = 1.0  # of the strangest of them, at least 1: what is usual in this scene

    def apply(self, count: float, variance: float) -> tuple[float, float]:
        """Count, and the squared scale of its t-distribution, from those of the old calibration."""
        along = count - self.center
        unsure = self.offset_variance + 2 * along * self.covariance + along**2 * self.slope_variance
        return count + self.offset + self.slope * along, self.variance * (variance / self.unit + max(unsure, 0.0))

    def __str__(self) -> str:
        moved = {
            "as before": f"the count stays as it was (off by {self.mae_before:.2f} on average), as no fit to the other "
            "frames is closer to one left out",
            "offset": f"count {self.offset:+.2f}",
            "line": f"count {self.offset:+.2f} {self.slope:+.3f} · (count - {self.center:.1f})",
        }[self.form]
        better = f"; MAE {self.mae_before:.2f} before, {self.mae_after:.2f} after on frames left out of the fit"
        return (
            f"recalibrated on {self.frames} frames of the scene, worth {self.effective:.1f} independent ones: {moved}, "
            f"std {self.variance**0.5:.2f}, t with {self.dof:.1f} degrees of freedom"
            f"{'' if self.form == 'as before' else better}"
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

    `strangeness` is that of the strangest of them. Too few frames are a `DataError`, or not as many of each.
    """
    c, v, y = (np.asarray(part, dtype=np.float64) for part in (count, variance, truth))
    if not len(c) == len(v) == len(y) or len(c) < FEWEST:
        raise DataError(
            f"expected counts, variances and true counts of the same {FEWEST} frames or more, better 20 spread over "
            f"the new scene; found {len(c)}, {len(v)} and {len(y)}."
        )
    if not (np.isfinite(c).all() and np.isfinite(y).all() and (v > 0).all() and np.isfinite(v).all()):
        raise DataError(
            "expected finite counts, and variances above 0, of all labelled frames; found others. Omit frames that "
            "cannot be counted, or calibrate the counter again."
        )
    form, after = _chosen_form(c, v, y)
    fit = _posterior(c, v, y, form)
    return Recalibration(
        center=fit.center,
        offset=float(fit.beta[0]),
        slope=float(fit.beta[1]),
        variance=fit.variance,
        unit=fit.unit,
        dof=_PRIOR_FRAMES + fit.effective,
        offset_variance=float(fit.covariance[0, 0]),
        slope_variance=float(fit.covariance[1, 1]),
        covariance=float(fit.covariance[0, 1]),
        frames=len(c),
        effective=fit.effective,
        mae_before=float(np.abs(y - c).mean()),
        mae_after=after,
        form=form,
        strangeness=max(1.0, strangeness),
    )


class _Posterior(NamedTuple):
    """The fit to labelled frames: `beta` `(2,)` with its covariance in units of `variance`."""

    center: float
    unit: float
    beta: Floats
    covariance: Floats
    variance: float
    effective: float


def _posterior(c: Floats, v: Floats, y: Floats, form: Form) -> _Posterior:
    """Fit offset and slope, or the first alone, or neither, to labelled frames in their order in time."""
    unit, center, terms = float(v.mean()), float(c.mean()), get_args(Form).index(form)
    x, error = np.stack([np.ones_like(c), c - center], 1), y - c
    # Errors around a line tell how alike neighbours are, whatever is fitted.
    line = np.linalg.lstsq(x, error, rcond=None)[0]
    effective = effective_frames(error - x @ line)
    weight = effective / len(c) / (v / unit)
    prior = np.diag([_OFFSET**-2, unit / _SLOPE**2])
    precision, pull = prior + (x * weight[:, None]).T @ x, (x * weight[:, None]).T @ error
    # Whatever is fitted, a line is not ruled out: its uncertainty stays in the intervals.
    beta, covariance = np.zeros(2), np.linalg.inv(precision)
    beta[:terms] = np.linalg.solve(precision[:terms, :terms], pull[:terms])
    squares = (error - x @ beta) ** 2
    left = float(weight @ squares + beta @ prior @ beta)
    # The old variance is no guess of how large errors are in a scene where they are seen to be larger.
    guess = max(unit, float((squares / v * unit).mean()))
    variance = (_PRIOR_FRAMES * guess + left) / (_PRIOR_FRAMES + effective)
    return _Posterior(center, unit, beta, covariance, variance, effective)


def _chosen_form(c: Floats, v: Floats, y: Floats) -> tuple[Form, float]:
    """The form that comes closest to frames left out of the fit, and its mean absolute error on them."""
    blocks = np.array_split(np.arange(len(c)), min(_BLOCKS, len(c)))
    best: tuple[Form, float] = ("as before", float(np.abs(y - c).mean()))
    for form in get_args(Form)[1:]:
        if _posterior(c, v, y, form).beta[1] < -1:  # fewer people where the counter sees more
            continue
        errors = []
        for block in blocks:
            fit = _posterior(np.delete(c, block), np.delete(v, block), np.delete(y, block), form)
            moved = c[block] + fit.beta[0] + fit.beta[1] * (c[block] - fit.center)
            errors.append(np.abs(y[block] - moved))
        after = float(np.concatenate(errors).mean())
        best = (form, after) if after < best[1] else best
    return best
