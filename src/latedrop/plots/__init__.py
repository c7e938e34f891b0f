"""Pictures of what the metrics say: arrays in, a matplotlib `Axes` out.

Nothing is scored here: the calibration curve `pi(a)`, the metrics and the shares come in ready made, from
`metrics`, `scale` and `linear`. Every function draws on `ax`, or on a new figure if it is None, and returns
the `Axes` for the caller to change, save or show. Series differ in marker and line as well as in colour.

matplotlib is an extra (`pip install latedrop[plots]`), imported only when a new figure is needed.

References: Ledda et al., "Dropout Injection at Test Time for Post Hoc Uncertainty Quantification in Neural
Networks", for the calibration and trade-off plots. Okabe & Ito, "Color Universal Design" (2008), for the
colours.

This package imports top-level modules of latedrop, and none of its other packages.
"""

from latedrop.plots.calibration import calibration_curves, metric_by_rate, tradeoff
from latedrop.plots.canvas import new_figure, png
from latedrop.plots.classes import (
    confusion,
    doubtful_images,
    reliability_diagram,
    risk_coverage,
)
from latedrop.plots.predictions import error_against_std, intervals

__all__ = [
    "calibration_curves",
    "confusion",
    "doubtful_images",
    "error_against_std",
    "intervals",
    "metric_by_rate",
    "new_figure",
    "png",
    "reliability_diagram",
    "risk_coverage",
    "tradeoff",
]
