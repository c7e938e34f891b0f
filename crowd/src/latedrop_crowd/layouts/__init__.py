"""Annotated frames of people: Mall, UCSD, PETS2009, ShanghaiTech as they were released, and frames of your own.

A set is read from its folder: annotations at once, images when they are asked for. What is missing or malformed is
named. Validation frames are the last fifth of each clip of the standard *training* frames, in one run, as neighbouring
frames of a video look alike; test frames are for testing only. Each release has a file of its own, which says what it
is and where it comes from; `own` is a folder of your own.
"""

from latedrop_crowd.layouts.annotations import read_counts
from latedrop_crowd.layouts.crowd_set import CrowdSet, Frame, Part, Sigma
from latedrop_crowd.layouts.opening import SETS, open_as_trained, open_set
from latedrop_crowd.layouts.own import read_roi
from latedrop_crowd.layouts.read_ahead import in_order

__all__ = [
    "SETS",
    "CrowdSet",
    "Frame",
    "Part",
    "Sigma",
    "in_order",
    "open_as_trained",
    "open_set",
    "read_counts",
    "read_roi",
]
