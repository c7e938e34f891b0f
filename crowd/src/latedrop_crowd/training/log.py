"""What a network counts on frames of a set, and the log beside its weights: how they were made, what they reach."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop.devices import device_name, versions
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.files import understood, write_aside
from latedrop.terminal import folder, read_json
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.training.checkpoint import Fit, differences

__all__ = [
    "beside",
    "check_better",
    "described",
    "evaluate_counts",
    "finished",
    "mean_errors",
    "predict_counts",
    "read_log",
    "record_of",
    "summary",
    "write_log",
]

SCHEMA = 1


def predict_counts(
    trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], device: str | torch.device = "cpu"
) -> Tensor:
    """Predicted counts of frames, `(N,)`."""
    model = deepcopy(trained.model).to(device).eval()
    moved = replace(trained, roi=None if trained.roi is None else trained.roi.to(device))
    frames = in_order(lambda index: crowd_set.image(index, trained.channels), indices)
    with torch.inference_mode():
        counts = [moved.count_of(model(frame[None].to(device))).float().cpu() for frame in frames]
    return torch.cat(counts) if counts else torch.zeros(0)


def evaluate_counts(
    trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Errors of the counts of frames: `mae`, `rmse`, `bias` (predicted less true); and `frames`, how many."""
    if not indices:
        raise DataError(f"expected frames of {crowd_set.name} to evaluate; found none. Pass others.")
    return _errors(predict_counts(trained, crowd_set, indices, device), crowd_set, indices)


def mean_errors(mean: float, crowd_set: CrowdSet, indices: Sequence[int]) -> dict[str, float]:
    """The same of one count for all frames, such as the mean of the training frames: what a network must beat."""
    return _errors(torch.full((len(indices),), mean, dtype=torch.float64), crowd_set, indices)


def _errors(predicted: Tensor, crowd_set: CrowdSet, indices: Sequence[int]) -> dict[str, float]:
    error = predicted.double() - crowd_set.counts(indices, torch.float64)
    measures = {"mae": error.abs().mean(), "rmse": error.square().mean().sqrt(), "bias": error.mean()}
    return {**{name: round(value.item(), 4) for name, value in measures.items()}, "frames": len(indices)}


def summary(out: Path, log: Mapping[str, Any]) -> str:
    """What a finished training tells, in two lines."""
    lines = [f"written: {out}, {beside(out, '.log.json')}"]
    for part in ("validation", "test"):
        if part in log:
            network, mean = log[part], log["mean_predictor"][part]
            lines.append(
                f"{part}: MAE {network['mae']:.2f}, RMSE {network['rmse']:.2f}, bias {network['bias']:+.2f} people on "
                f"{network['frames']} frames; the mean of the training frames has MAE {mean['mae']:.2f}"
            )
    return "\n".join(lines)


def described(crowd_set: CrowdSet) -> dict[str, Any]:
    """What tells one training's frames from another's."""
    digest, cells = hashlib.sha256(), crowd_set.cells()
    for index in (*crowd_set.train, *crowd_set.validation):
        frame = crowd_set.frames[index]
        digest.update(frame.name.encode() + np.ascontiguousarray(frame.points, np.float64).tobytes())
    return {
        "set": crowd_set.name,
        "frames": {part: len(getattr(crowd_set, part)) for part in ("train", "validation", "test")},
        "size": None if crowd_set.size is None else list(crowd_set.size),
        "sigma": crowd_set.sigma,
        "enlarge": crowd_set.enlarge,
        "roi_cells": None if cells is None else int(cells.sum()),
        "sha256": digest.hexdigest(),
    }


def record_of(
    identity: Mapping[str, Any], crowd_set: CrowdSet, trained: Trained, state: Fit, device: torch.device
) -> dict[str, Any]:
    """What a log says of a finished training."""
    mean = crowd_set.counts(crowd_set.train, torch.float64).mean().item()
    indices = {part: getattr(crowd_set, part) for part in ("validation", "test") if getattr(crowd_set, part)}
    return {
        "schema": SCHEMA,
        **identity,
        "epochs": state.epoch,
        **{part: evaluate_counts(trained, crowd_set, chosen, device) for part, chosen in indices.items()},
        "mean_predictor": {
            "count": round(mean, 4),
            **{part: mean_errors(mean, crowd_set, chosen) for part, chosen in indices.items()},
        },
        "training_seconds": round(state.seconds, 1),
        "machine": {"device": device_name(device), "system": platform.system()},
        "versions": versions(),
        "history": {
            "loss": [round(row["loss"], 5) for row in state.history],
            "validation_mae": [round(row["mae"], 4) for row in state.history],
        },
    }


def check_better(record: Mapping[str, Any]) -> None:
    """Raise unless the network counts the validation frames better than the mean of the training frames does."""
    network, mean = record["validation"]["mae"], record["mean_predictor"]["validation"]["mae"]
    if not network < mean:
        raise OutputError(
            f"expected a network that counts better than the mean of the training frames, whose validation MAE is "
            f"{mean:.2f}; found {network:.2f} after {record['epochs']} epochs. Train longer, or change --lr."
        )


def finished(out: Path, identity: Mapping[str, Any]) -> bool:
    """Whether these weights are there already."""
    log = beside(out, ".log.json")
    if not (out.exists() and log.exists()):
        if not os.access(folder(out.parent), os.W_OK):  # before hours of training, and not after
            raise FileError(f"expected to write into {out.parent}; the system does not allow it. Pass another --out.")
        return False
    other = differences(identity, read_log(log))
    if other:
        raise FileError(
            f"expected {out} to be of these settings and frames; found others in {log}: {other}. "
            "Pass another --out, or --fresh to write over it."
        )
    return True


def beside(out: str | os.PathLike[str], suffix: str) -> Path:
    """Another file of the same weights."""
    path = Path(out)
    if path.suffix != ".safetensors":
        raise ArgumentError(
            f"expected a name like mall.safetensors for the weights; found {path.name!r}. Change --out."
        )
    return path.with_suffix(suffix)


def read_log(path: Path) -> dict[str, Any]:
    """The log of a training."""
    again = "Train again with --fresh."
    log = read_json(path, "the log of a training", SCHEMA, again, finite=False)
    with understood(path, "the log of a training", again):
        summary(path.with_suffix(".safetensors"), log)
        _ = log["data"]["frames"]["train"], log["settings"]["rate"]  # tables of weights have them
    return log


def write_log(path: Path, log: Mapping[str, Any]) -> None:
    """Write a log, readable, all of it or nothing."""
    write_aside(path, json.dumps(log, indent=1) + "\n")
