"""Pictures of what the metrics say: arrays in, a matplotlib `Axes` out.

Nothing is scored here: curves and metrics come in ready made, from `latedrop.metrics`. Every function draws on `ax`,
or on a new figure if it is None, and returns the `Axes` for the caller to change, save or show. Series differ in marker
and line as well as in colour.

matplotlib is an extra (`pip install latedrop[plots]`), imported only when a new figure is needed.

Reference: Okabe & Ito, "Color Universal Design" (2008), for the colours.

This package imports top-level modules of latedrop, and none of its other packages.
"""

from latedrop.plots.canvas import new_figure, png
from latedrop.plots.figures import calibration_curves, intervals

__all__ = ["calibration_curves", "intervals", "new_figure", "png"]
