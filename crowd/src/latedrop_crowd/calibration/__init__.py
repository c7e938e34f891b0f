"""The calibration of a people counter: one record for its count, one for the cells of its map, and what to reject.

The count is what an operator reads; its variance is that of the sum, not the sum of the cells' variances. So each has
its own record, fitted on the set's validation frames.
"""

from latedrop_crowd.calibration.counter import calibrate_counter, read_maps, recalibrate_counter
from latedrop_crowd.calibration.record import CrowdCalibration, load_calibration

__all__ = ["CrowdCalibration", "calibrate_counter", "load_calibration", "read_maps", "recalibrate_counter"]
