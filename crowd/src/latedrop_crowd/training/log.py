"""The log beside trained weights: how they were made, and what they reach."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latedrop.devices import device_name, versions
from latedrop.errors import ArgumentError, FileError, OutputError
from latedrop.files import digest_of, understood, write_aside
from latedrop.terminal import folder, read_json
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained, load_weights
from latedrop_crowd.training.checkpoint import Fit, differences
from latedrop_crowd.training.counts import evaluate_counts, mean_errors

__all__ = [
    "SCHEMA",
    "add_test",
    "beside",
    "check_better",
    "described",
    "finished",
    "read_log",
    "record_of",
    "said",
    "write_log",
]

SCHEMA = 1


def add_test(out: Path, crowd_set: CrowdSet, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Count the test frames with weights that were trained where those were not at hand, and add the errors to the log.

    Raises:
        FileError: no weights or no log, or weights that are not those of the log.
        DataError: the set has no test frames.
    """
    path = beside(out, ".log.json")
    log, trained = read_log(path), load_weights(out, device)
    if log.get("weights_sha256") != digest_of(out):
        raise FileError(f"expected the log of {out} in {path}; found that of other weights. Put them together again.")
    log["test"] = evaluate_counts(trained, crowd_set, crowd_set.test, device)
    log["mean_predictor"]["test"] = mean_errors(log["mean_predictor"]["count"], crowd_set, crowd_set.test)
    write_log(path, log)
    return log


def said(out: Path, log: Mapping[str, Any]) -> str:
    """What a finished training tells, in two lines."""
    lines = [f"written: {out}, {beside(out, '.log.json')}"]
    for part in ("validation", "test"):
        if part in log:
            own, mean = log[part], log["mean_predictor"][part]
            lines.append(
                f"{part}: MAE {own['mae']:.2f}, RMSE {own['rmse']:.2f}, bias {own['bias']:+.2f} people on "
                f"{own['frames']} frames; the mean of the training frames has MAE {mean['mae']:.2f}"
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
    parts = [part for part in ("validation", "test") if getattr(crowd_set, part)]
    indices = {part: getattr(crowd_set, part) for part in parts}
    return {
        "schema": SCHEMA,
        **identity,
        "epochs": state.epochs,
        "dead_networks": state.attempt,
        **{part: evaluate_counts(trained, crowd_set, indices[part], device) for part in parts},
        "mean_predictor": {
            "count": round(mean, 4),
            **{part: mean_errors(mean, crowd_set, indices[part]) for part in parts},
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
    own, mean = record["validation"]["mae"], record["mean_predictor"]["validation"]["mae"]
    if not own < mean:
        raise OutputError(
            f"expected a network that counts better than the mean of the training frames, whose validation MAE is "
            f"{mean:.2f}; found {own:.2f} after {record['epochs']} epochs. Train longer, "
            "change --lr, or pass --unchecked to keep it."
        )


def finished(out: Path, identity: Mapping[str, Any]) -> bool:
    """Whether these weights are there already."""
    log = beside(out, ".log.json")
    if not (out.exists() and log.exists()):
        _check_writable(out)
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
        said(path.with_suffix(".safetensors"), log)
        _ = log["data"]["frames"]["train"], log["settings"]["rate"]  # tables of weights have them
    return log


def write_log(path: Path, log: Mapping[str, Any]) -> None:
    """Write a log, readable, all of it or nothing."""
    write_aside(path, (json.dumps(log, indent=1) + "\n").encode())


def _check_writable(out: Path) -> None:
    """Before hours of training, and not after."""
    if not os.access(folder(out.parent), os.W_OK):
        raise FileError(f"expected to write into {out.parent}; the system does not allow it. Pass another --out.")
