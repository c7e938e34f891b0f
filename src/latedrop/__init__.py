"""Calibrated uncertainty for any trained PyTorch network, by dropout injected at test time."""

import logging

from latedrop import metrics
from latedrop.calibration.classes.prediction import ClassPrediction
from latedrop.calibration.classes.predictor import ClassPredictor
from latedrop.calibration.classes.record import ClassCalibration
from latedrop.calibration.loading import load
from latedrop.calibration.predictor import Explanation, Prediction, Predictor, calibrate
from latedrop.calibration.record import Calibration
from latedrop.calibration.scale import optimal_scale, relaxed_scale
from latedrop.calibration.transforms import Log, Standardized, Transformed
from latedrop.errors import LatedropError, LatedropWarning
from latedrop.masking.inject import inject
from latedrop.model.finding import find_sites
from latedrop.model.programs import load_program
from latedrop.model.sites import Site, Sites
from latedrop.variance.first_order import Linearization, linearize
from latedrop.variance.moments import Moments
from latedrop.variance.propagation import propagate
from latedrop.variance.sampling import sample

__all__ = [
    "Calibration",
    "ClassCalibration",
    "ClassPrediction",
    "ClassPredictor",
    "Explanation",
    "LatedropError",
    "LatedropWarning",
    "Linearization",
    "Log",
    "Moments",
    "Prediction",
    "Predictor",
    "Site",
    "Sites",
    "Standardized",
    "Transformed",
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

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who wants to hear adds another
