"""Calibrated uncertainty for any trained PyTorch network, by dropout injected at test time."""

from latedrop import metrics
from latedrop.errors import LatedropError, LatedropWarning
from latedrop.inject import inject
from latedrop.linear import Linearization, linearize
from latedrop.predict import Explanation, Prediction, Predictor, calibrate, load
from latedrop.programs import load_program
from latedrop.propagate import propagate
from latedrop.record import Calibration
from latedrop.sample import Moments, sample
from latedrop.scale import optimal_scale, relaxed_scale
from latedrop.sites import Site, Sites, find_sites

__all__ = [
    "Calibration",
    "Explanation",
    "LatedropError",
    "LatedropWarning",
    "Linearization",
    "Moments",
    "Prediction",
    "Predictor",
    "Site",
    "Sites",
    "calibrate",
    "find_sites",
    "inject",
    "linearize",
    "load",
    "load_program",
    "metrics",
    "optimal_scale",
    "propagate",
    "relaxed_scale",
    "sample",
]

__version__ = "0.1.0"
