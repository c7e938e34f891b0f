r"""How good a prediction and its uncertainty are: pure functions of `(mean, variance, target)`.

With `e = target - mean`, `v = variance`, `std = sqrt(v)` and `z_a` the normal quantile of `(1 + a) / 2`,
nearly all is built from the Gaussian likelihood and from how often a target lies in its central interval:

$$
\mathrm{NLL} = \mathrm{mean}\left( \frac{e^2}{2 v} + \frac{\log v}{2} \right) + \frac{\log 2 \pi}{2},
\qquad
\pi(a) = \mathrm{mean}\left( |e| \le z_a \cdot \mathrm{std} \right).
$$

Every metric takes the same arguments:

- `mean`: predictions, a tensor, numpy array or number of shape `(N,)`, `(N, K)` or `(N, K, ...)`.
- `variance`: their variances, shaped as `mean`. `rmse`, `mae` and `ideal_nll` do not look at it, and take None.
- `target`: true values, shaped as `mean`. Nothing is broadcast, except that a target `(N,)` goes with a mean `(N, 1)`.
- `per_output`: reduce over all axes but axis 1, to shape `(K,)` (`(1,)` for inputs `(N,)`), not to a scalar.
- `weights`: `(N,)`, not below 0: what each row counts, 2 as much as two such rows. Not of rankings.
- `level`: probability content `a` of a central interval. `levels`: how many, evenly spaced inside (0, 1) at
  `k / (levels + 1)`; or the levels themselves.

Results are float32, or float64 where an argument is, on the device of `mean`.

References: Gneiting & Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation" (2007). Tran et
al., "Methods for comparing uncertainty quantifications for material property predictions" (2020).

This package imports top-level modules of latedrop, and none of its other packages.
"""

from latedrop.metrics import classes
from latedrop.metrics.entries import align_target
from latedrop.metrics.scores import (
    auroc,
    calibration_curve,
    coverage,
    crps,
    ideal_nll,
    interval_width,
    mae,
    miscalibration_area,
    nll,
    rank_correlation,
    rmse,
)

__all__ = [
    "align_target",
    "auroc",
    "calibration_curve",
    "classes",
    "coverage",
    "crps",
    "ideal_nll",
    "interval_width",
    "mae",
    "miscalibration_area",
    "nll",
    "rank_correlation",
    "rmse",
]
