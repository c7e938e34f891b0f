"""Calibrated uncertainty for any trained PyTorch network, by dropout injected at test time."""

from latedrop import metrics
from latedrop.calibrate import Calibration
from latedrop.errors import LatedropError, LatedropWarning
from latedrop.inject import inject
from latedrop.predict import Prediction, Predictor, calibrate, load
from latedrop.sample import Moments, sample
from latedrop.scale import optimal_scale, relaxed_scale
from latedrop.sites import Site, Sites, find_sites

__all__ = [
    "Calibration",
    "LatedropError",
    "LatedropWarning",
    "Moments",
    "Prediction",
    "Predictor",
    "Site",
    "Sites",
    "calibrate",
    "find_sites",
    "inject",
    "load",
    "metrics",
    "optimal_scale",
    "relaxed_scale",
    "sample",
]

__version__ = "0.1.0"
