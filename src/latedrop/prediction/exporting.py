"""A calibrated model as one ONNX file: what `predict` computes, traced, and what the file says of itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.calibration.targets import Standardized
from latedrop.data.rows import Items, map_rows, row_count, tensors
from latedrop.dropout.compiled import batch_function
from latedrop.errors import ArgumentError
from latedrop.onnx_files.metadata import METADATA, WHOLE, ClassRecord, Metadata, RegressionRecord
from latedrop.onnx_files.tracing import refuse
from latedrop.onnx_files.writing import write_onnx
from latedrop.prediction.prediction import ClassPrediction, Prediction
from latedrop.quantiles import checked_level
from latedrop.stored_tensors import elsewhere

__all__ = ["export"]


def export(
    path: str | os.PathLike[str],
    model: nn.Module,
    calibration: Calibration | ClassCalibration,
    predicted: Callable[[Any], Prediction | ClassPrediction],
    example: Any,
    level: float = 0.9,
) -> Path:
    """Write what `predicted` gives for inputs like `example`, which were placed."""
    level = checked_level(level)
    if isinstance(example, Items):
        refuse("that takes lists of objects (collate=)")
    apart = [site.name for site in calibration.sites if site.batch_axis is None or site.moved or site.coupled]
    if apart:
        refuse(f"whose rows affect each other, or have any number of entries, at the sites {apart}")
    if isinstance(calibration, Calibration) and not calibration.shared:
        refuse("whose rows have masks of their own (shared=False), which depend on the place in a batch")
    if isinstance(calibration, ClassCalibration) and calibration.maps:
        refuse("that gives a map of classes for every image")
    terms = calibration.terms.active if isinstance(calibration, Calibration) and calibration.terms is not None else ()
    looked_up = [term.name for term in terms if term.is_lookup]
    if looked_up:
        refuse(f"whose variance looks for the nearest of other rows (terms {looked_up})")
    names = _names(model, example)
    function, _ = batch_function(example, predicted)

    def run(*inputs: Tensor) -> dict[str, Tensor]:
        return _outputs(function(*inputs), level)

    def rows(count: int) -> list[Tensor]:
        index = (torch.arange(count) + count) % row_count(example)  # others each time
        return tensors(map_rows(example, lambda t: t[index.to(t.device)]))

    own = METADATA.to_json(Metadata(_record(calibration, level)))
    metadata = {METADATA.key: own, WHOLE: calibration.to_json(elsewhere({}, "graph"))}
    return write_onnx(path, run, rows, names, metadata)


def _outputs(p: Prediction | ClassPrediction, level: float) -> dict[str, Tensor]:
    """Return what a file gives for rows."""
    if isinstance(p, ClassPrediction):
        named = {**p.to_dict(), "energy": p.energy}
        named = {name: value.float() if value.is_floating_point() else value for name, value in named.items()}
        return {name: value.detach() for name, value in named.items()}
    named, target = p.to_dict(level), p.calibration.target
    if p.novelty is not None:
        named["novelty"] = p.novelty.to(p.mean.dtype)
    if target is not None or p.calibration.intervals is not None:
        location, spread = p.output, p.spread
        if isinstance(target, Standardized):
            location, variance = target.moments(location, spread.double().square())
            spread = variance.sqrt().to(location.dtype)
        named |= {"location": location, "spread": spread}
    return {name: value.detach() for name, value in named.items()}


def _record(calibration: Calibration | ClassCalibration, level: float) -> RegressionRecord | ClassRecord:
    """All that is needed to make intervals or sets of what the graph gives."""
    columns, verdict = tuple((calibration.columns or {}).get("inputs", ())), str(calibration.verdict)
    if isinstance(calibration, ClassCalibration):
        # The random numbers of other scores hang on the last bit of a probability.
        sets = calibration.sets if calibration.sets is not None and calibration.sets.score == "lac" else None
        return ClassRecord(columns, verdict, calibration.names, None if sets is None else sets.scores)
    names, target = calibration.output_names or (), calibration.target
    unit: Literal["log"] | None = None if target is None or isinstance(target, Standardized) else "log"
    return RegressionRecord(columns, verdict, names, level, unit, calibration.intervals, calibration.degrees)


def _names(model: nn.Module, example: Any) -> list[str]:
    """Return names of the inputs: the parameters of `forward`, or the keys of mappings."""
    parameters = [p.name for p in signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if isinstance(example, Tensor):
        names = parameters[:1] or ["input"]
    elif isinstance(example, Mapping):
        names = _keys(example)
    else:
        tops = [*parameters, *(f"input_{i}" for i in range(len(parameters), len(example)))]
        names = [name for top, value in zip(tops, example, strict=False) for name in _keys(value, top)]
    names = [f"{name}_in" if name in _TAKEN else name for name in names]
    if len(set(names)) < len(names):
        raise ArgumentError(f"expected inputs of different names for an ONNX file; found {names}.")
    return names


_TAKEN = (
    *("mean", "std", "low", "high", "novelty", "location", "spread", "label", "probabilities", "energy"),
    *("confidence", "entropy", "mutual_information", "kept"),
)


def _keys(value: Any, top: str = "") -> list[str]:
    if isinstance(value, Tensor):
        return [top]
    if isinstance(value, Mapping):
        pairs: Any = value.items()
    else:
        pairs = enumerate(value) if isinstance(value, (tuple, list)) else ()
    return [name for key, item in pairs for name in _keys(item, f"{top}_{key}" if top else str(key))]
