"""Crowd counting: density maps that know where they are unsure.

A head is a Gaussian of mass 1, a crowd the sum of them, and the count the sum of the map.
"""

from latedrop.crowd.calibration import CrowdCalibration, calibrate_counter, load_calibration, read_maps
from latedrop.crowd.counters import as_counter, mcnn_from_state
from latedrop.crowd.counting import CountedFrame, count_people, write_counts
from latedrop.crowd.density import density_map
from latedrop.crowd.frames import open_frames, read_image
from latedrop.crowd.layouts import CrowdSet, Frame, open_set
from latedrop.crowd.mcnn import MCNN, Trained, load_weights, save_weights, shipped
from latedrop.crowd.panels import draw_panel, write_panel
from latedrop.crowd.recalibrating import recalibrate_counter
from latedrop.crowd.regions import (
    Maps,
    Policy,
    apply_policy,
    find_regions,
    fit_policy,
    measure_rejection,
    near_cells,
)
from latedrop.crowd.scenes import make_scenes

__all__ = [
    "MCNN",
    "CountedFrame",
    "CrowdCalibration",
    "CrowdSet",
    "Frame",
    "Maps",
    "Policy",
    "Trained",
    "apply_policy",
    "as_counter",
    "calibrate_counter",
    "count_people",
    "density_map",
    "draw_panel",
    "find_regions",
    "fit_policy",
    "load_calibration",
    "load_weights",
    "make_scenes",
    "mcnn_from_state",
    "measure_rejection",
    "near_cells",
    "open_frames",
    "open_set",
    "read_image",
    "read_maps",
    "recalibrate_counter",
    "save_weights",
    "shipped",
    "write_counts",
    "write_panel",
]
