"""The training loop by another name: see `latedrop.crowd.training`."""

from latedrop.crowd.layouts import in_order
from latedrop.crowd.training import Checkpoint, Fit, Settings, differences, fit

__all__ = ["Checkpoint", "Fit", "Settings", "differences", "fit", "in_order"]
