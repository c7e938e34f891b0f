"""Which regions of a density map to reject, and what that is worth.

People leave regions of mass 1 and more; clutter leaves small ones, alone, where the network is unsure. A policy sets
small, uncertain, isolated regions to zero, and they leave the count (Ledda, Fumera, Roli 2023, who show two examples).
Its three numbers are chosen on validation frames, and nothing is rejected unless that helps there.
`measure_rejection` says what it is worth on test frames, against controls that know nothing of the uncertainty.
"""

from latedrop_crowd.regions.components import NEAR, Regions, find_regions, near_cells, to_cells, usual_threshold
from latedrop_crowd.regions.policy import Policy, fit_policy
from latedrop_crowd.regions.rejection import measure_rejection
from latedrop_crowd.regions.table import Maps

__all__ = [
    "NEAR",
    "Maps",
    "Policy",
    "Regions",
    "find_regions",
    "fit_policy",
    "measure_rejection",
    "near_cells",
    "to_cells",
    "usual_threshold",
]
