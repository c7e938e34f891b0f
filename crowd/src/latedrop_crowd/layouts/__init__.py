"""Annotated frames of people: Mall, UCSD and PETS2009 as they were released, and frames of your own.

A set is read from its folder: annotations at once, images when they are asked for. What is missing or malformed is
named. Validation frames are the last fifth of each clip of the standard *training* frames, in one run, as neighbouring
frames of a video look alike; test frames are for testing only.
"""

from latedrop_crowd.layouts.annotations import read_counts
from latedrop_crowd.layouts.crowd_set import CrowdSet, Frame
from latedrop_crowd.layouts.opening import SETS, open_as_trained, open_set
from latedrop_crowd.layouts.own import read_roi
from latedrop_crowd.layouts.read_ahead import in_order

__all__ = [
    "SETS",
    "CrowdSet",
    "Frame",
    "in_order",
    "open_as_trained",
    "open_set",
    "read_counts",
    "read_roi",
]
