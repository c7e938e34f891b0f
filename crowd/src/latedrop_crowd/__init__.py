"""Crowd counting: density maps that know where they are unsure.

A head is a Gaussian of mass 1, a crowd the sum of them, and the count the sum of the map.

A public name is imported when it is first asked for, so that `latedrop --help` stays quick. This package uses public
names of latedrop alone: those that docs/reference shows.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latedrop_crowd.calibration import (
        CrowdCalibration,
        calibrate_counter,
        load_calibration,
        read_maps,
        recalibrate_counter,
    )
    from latedrop_crowd.counting import CountedFrame, count_people, write_counts
    from latedrop_crowd.density import density_map
    from latedrop_crowd.frames import open_frames, read_image
    from latedrop_crowd.layouts import CrowdSet, Frame, open_set
    from latedrop_crowd.mcnn import MCNN, Trained, as_counter, load_weights, save_weights, shipped
    from latedrop_crowd.panels import draw_panel, write_panel
    from latedrop_crowd.regions import Maps, Policy, find_regions, fit_policy, near_cells
    from latedrop_crowd.scenes import make_scenes

__version__ = "0.3.0"

_HOMES = {
    "calibration": ("CrowdCalibration", "calibrate_counter", "load_calibration", "read_maps", "recalibrate_counter"),
    "counting": ("CountedFrame", "count_people", "write_counts"),
    "density": ("density_map",),
    "frames": ("open_frames", "read_image"),
    "layouts": ("CrowdSet", "Frame", "open_set"),
    "mcnn": ("MCNN", "Trained", "as_counter", "load_weights", "save_weights", "shipped"),
    "panels": ("draw_panel", "write_panel"),
    "regions": ("Maps", "Policy", "find_regions", "fit_policy", "near_cells"),
    "scenes": ("make_scenes",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "MCNN",
    "CountedFrame",
    "CrowdCalibration",
    "CrowdSet",
    "Frame",
    "Maps",
    "Policy",
    "Trained",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
