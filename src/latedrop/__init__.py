"""Calibrated uncertainty for any trained PyTorch network, by dropout injected at test time.

A public name is imported when it is first asked for, so that `load_onnx` works where torch is not installed.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latedrop import metrics
    from latedrop.boxes.predictor import BoxCalibration, BoxPrediction, BoxPredictor, calibrate_boxes, load_boxes
    from latedrop.calibration.class_record import ClassCalibration
    from latedrop.calibration.methods import Classification, FirstOrder, Propagation, Sampling, Terms
    from latedrop.calibration.record import Calibration
    from latedrop.calibration.scale import optimal_scale, relaxed_scale
    from latedrop.calibration.targets import Log, Standardized
    from latedrop.data.batches import Batches
    from latedrop.dropout.first_order import Linearization, linearize
    from latedrop.dropout.inject import inject
    from latedrop.dropout.moments import Moments
    from latedrop.dropout.sampling import sample
    from latedrop.errors import LatedropError, LatedropWarning
    from latedrop.multilabel import (
        MultiLabelCalibration,
        MultiLabelPrediction,
        MultiLabelPredictor,
        calibrate_multilabel,
        load_multilabel,
    )
    from latedrop.network.find_sites import find_sites
    from latedrop.network.network import Network
    from latedrop.network.sites import Site, Sites
    from latedrop.onnx_files.predictor import load_onnx
    from latedrop.prediction.adapted import AdaptedPrediction
    from latedrop.prediction.calibrate import calibrate, calibrate_cross_fitted
    from latedrop.prediction.joint import JointPrediction, Region
    from latedrop.prediction.prediction import ClassPrediction, Explanation, Prediction
    from latedrop.prediction.predictor import AdaptedPredictor, ClassPredictor, JointPredictor, Predictor, load
    from latedrop.programs import load_program
    from latedrop.propagation.propagate import propagate
    from latedrop.weights import fingerprint

__all__ = ["calibrate", "calibrate_boxes", "calibrate_cross_fitted", "calibrate_multilabel"]
__all__ += ["load", "load_boxes", "load_multilabel", "load_onnx", "load_program"]
__all__ += ["Batches", "Classification", "FirstOrder", "Log", "Propagation", "Sampling", "Standardized", "Terms"]
__all__ += ["AdaptedPredictor", "BoxPredictor", "ClassPredictor", "JointPredictor", "MultiLabelPredictor", "Predictor"]
__all__ += ["AdaptedPrediction", "BoxPrediction", "ClassPrediction", "JointPrediction", "MultiLabelPrediction"]
__all__ += ["Explanation", "Prediction", "Region"]
__all__ += ["BoxCalibration", "Calibration", "ClassCalibration", "MultiLabelCalibration"]
__all__ += ["Linearization", "Moments", "Network", "Site", "Sites", "find_sites", "inject", "linearize", "propagate"]
__all__ += ["LatedropError", "LatedropWarning", "fingerprint", "metrics", "optimal_scale", "relaxed_scale", "sample"]

__version__ = "0.3.0"

_HOMES = {
    "boxes.predictor": ("BoxCalibration", "BoxPrediction", "BoxPredictor", "calibrate_boxes", "load_boxes"),
    "calibration.class_record": ("ClassCalibration",),
    "calibration.methods": ("Classification", "FirstOrder", "Propagation", "Sampling", "Terms"),
    "prediction.prediction": ("ClassPrediction", "Explanation", "Prediction"),
    "prediction.adapted": ("AdaptedPrediction",),
    "prediction.joint": ("JointPrediction", "Region"),
    "multilabel": (
        "MultiLabelCalibration",
        "MultiLabelPrediction",
        "MultiLabelPredictor",
        "calibrate_multilabel",
        "load_multilabel",
    ),
    "prediction.predictor": ("AdaptedPredictor", "ClassPredictor", "JointPredictor", "Predictor", "load"),
    "prediction.calibrate": ("calibrate", "calibrate_cross_fitted"),
    "data.batches": ("Batches",),
    "calibration.record": ("Calibration",),
    "calibration.scale": ("optimal_scale", "relaxed_scale"),
    "calibration.targets": ("Log", "Standardized"),
    "weights": ("fingerprint",),
    "errors": ("LatedropError", "LatedropWarning"),
    "dropout.first_order": ("Linearization", "linearize"),
    "dropout.moments": ("Moments",),
    "dropout.sampling": ("sample",),
    "network.find_sites": ("find_sites",),
    "dropout.inject": ("inject",),
    "network.network": ("Network",),
    "programs": ("load_program",),
    "network.sites": ("Site", "Sites"),
    "onnx_files.predictor": ("load_onnx",),
    "propagation.propagate": ("propagate",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_ROOMS = ("calibration", "dropout", "errors", "metrics", "network", "prediction", "propagation", "streams", "terms")
"""That could be named after `import latedrop` alone."""

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who wants to hear adds another


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
