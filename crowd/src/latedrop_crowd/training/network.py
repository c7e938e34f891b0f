"""Train a network on a set, or cross-fit it, and write it down: weights, and a log beside them of what they reach."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop.devices import device_name, versions
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.files import digest_of, understood, write_aside
from latedrop.terminal import folder, read_json
from latedrop_crowd.blocks import time_blocks
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import MCNN, Trained, load_weights, save_weights
from latedrop_crowd.training.loop import Checkpoint, Fit, Settings, differences, fit

__all__ = ["RECOMMENDED", "cross_fit", "described", "evaluate_counts", "predict_counts", "read_log", "summary", "train"]

RECOMMENDED: dict[str, Settings] = {
    "mall": Settings(epochs=50, batch=4),
    "ucsd": Settings(epochs=50),
    "pets": Settings(epochs=50, batch=4),
    "own": Settings(epochs=200),
    "scenes": Settings(epochs=40, lr=3e-3, crop=96),
}
"""Settings to start from, by set."""


def train(
    crowd_set: CrowdSet,
    settings: Settings | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
    *,
    fresh: bool = False,
    checked: bool = True,
    command: str | None = None,
    about: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Trained:
    """Train a network; with `out`, write its weights there and a log beside them, and checkpoints while it goes on.

    A training that was stopped goes on from its checkpoint; one that is finished is not run again.

    Args:
        crowd_set: its train and validation frames are used, and its test frames, if it has any, for the log.
        settings: None: those recommended for the set.
        out: `NAME.safetensors`; the log is `NAME.log.json`. None writes nothing.
        device: `cpu`, `cuda`, ...
        progress: show bars.
        fresh: do not go on from a checkpoint, and write over what is there.
        checked: raise if the network is no better on validation frames than the mean count of the training frames.
        command: for the log.
        about: what else the weights say about themselves; plain JSON.
        notes: what else the log says; plain JSON.

    Raises:
        FileError: `out` cannot be written, or it or its checkpoint was made with other settings or frames.
        OutputError: the loss is not finite, the network is dead, or, where `checked`, it is no better than the mean.
    """
    settings = settings or RECOMMENDED.get(crowd_set.name, Settings())
    if checked and not crowd_set.validation:
        raise DataError(
            f"expected validation frames in {crowd_set.name}, to check the network with; found none. List some in "
            "validation.txt."
        )
    device, start = torch.device(device), time.perf_counter()
    identity = {"settings": asdict(settings), "data": described(crowd_set)}
    checkpoint = None
    if out is not None:
        checkpoint = Checkpoint(beside(out, ".checkpoint.pt"), identity)
        if fresh:
            checkpoint.path.unlink(missing_ok=True)
        elif finished(Path(out), identity):
            return load_weights(out, device)
    state = fit(crowd_set, settings, device, checkpoint, progress=progress)
    with torch.random.fork_rng([]):  # initial weights that are thrown away should not move the caller's dice
        model = MCNN()
    model.load_state_dict(state.average.state_dict())
    cells = crowd_set.cells()
    words = {name: getattr(crowd_set, name) for name in ("sigma", "enlarge", "size")}
    words |= {"set": crowd_set.name, "rate": settings.rate, "seed": settings.seed, "epochs": state.epoch}
    words |= dict(about or {})
    trained = Trained(model.to(device).eval(), None if cells is None else cells.to(device), words)
    record = record_of(identity, crowd_set, trained, state, device) | dict(notes or {})
    record |= {"seconds": round(time.perf_counter() - start, 1), "command": command}
    if checked:
        check_better(record)
    if out is not None and checkpoint is not None:
        save_weights(out, trained)
        log = json.dumps(record | {"weights_sha256": digest_of(out)}, indent=1)
        write_aside(beside(out, ".log.json"), f"{log}\n")
        checkpoint.path.unlink(missing_ok=True)
    return trained


def cross_fit(
    crowd_set: CrowdSet,
    settings: Settings | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
    *,
    folds: int = 5,
    fresh: bool = False,
    checked: bool = True,
    command: str | None = None,
) -> Trained:
    """Train on all frames, and beside it on all but one block of time, for each of `folds` blocks.

    Counts of a block by the network that left it out say how far off such a network is: `calibrate_counter` fits the
    variance to them, so `NAME.fold0.safetensors`, ... stay beside the final network. Arguments are those of `train`.
    """
    settings = settings or RECOMMENDED.get(crowd_set.name, Settings())
    options: dict[str, Any] = {"fresh": fresh, "command": command, "checked": False}
    errors, notes = [], []
    for number, part in enumerate(fold_sets(crowd_set, folds)):
        path = None if out is None else fold_path(out, number)
        network = train(replace(part, test=()), settings, path, device, progress, about={"fold": number}, **options)
        predicted = predict_counts(network, crowd_set, part.test).double()
        errors.append(predicted - crowd_set.counts(part.test, torch.float64))
        notes.append({"frames": len(part.test), "mae": float(errors[-1].abs().mean())})
    measured = _errors(torch.cat(errors))
    every = tuple(sorted((*crowd_set.train, *crowd_set.validation)))
    if checked:
        mean = mean_errors(crowd_set.counts(every, torch.float64).mean().item(), crowd_set, every)
        check_better({"validation": measured, "mean_predictor": {"validation": mean}, "epochs": settings.epochs})
    whole, log = replace(crowd_set, train=every, validation=()), {"folds": notes, "held_out": measured}
    return train(whole, settings, out, device, progress, about={"folds": folds}, notes=log, **options)


def fold_sets(crowd_set: CrowdSet, folds: int) -> list[CrowdSet]:
    """For each block of time the set that leaves it out: `test` is the block, and all others are trained on."""
    every = (*crowd_set.train, *crowd_set.validation)
    if folds < 2 or len(every) < folds:
        raise ArgumentError(
            f"expected 2 folds or more and a frame for each; found {folds} folds of {len(every)} frames. Change "
            "--folds."
        )
    left_out = [(block, frozenset(block)) for block in time_blocks(every, folds)]
    return [
        replace(crowd_set, train=tuple(i for i in every if i not in left), validation=(), test=block)
        for block, left in left_out
    ]


def fold_path(out: str | os.PathLike[str], number: int) -> Path:
    """Where the network of a fold is kept, beside the final one."""
    return beside(out, f".fold{number}.safetensors")


SCHEMA = 1


def predict_counts(trained: Trained, crowd_set: CrowdSet, indices: Sequence[int]) -> Tensor:
    """Predicted counts of frames, `(N,)`."""
    frames = in_order(lambda index: crowd_set.image(index, trained.channels).to(trained.device), indices)
    with torch.inference_mode():
        counts = [trained.count_of(trained.model(frame[None])).float().cpu() for frame in frames]
    return torch.cat(counts) if counts else torch.zeros(0)


def evaluate_counts(trained: Trained, crowd_set: CrowdSet, indices: Sequence[int]) -> dict[str, float]:
    """Errors of the counts of frames: `mae`, `rmse`, `bias` (predicted less true); and `frames`, how many."""
    if not indices:
        raise DataError(f"expected frames of {crowd_set.name} to evaluate; found none. Pass others.")
    predicted = predict_counts(trained, crowd_set, indices).double()
    return _rounded(predicted - crowd_set.counts(indices, torch.float64))


def mean_errors(mean: float, crowd_set: CrowdSet, indices: Sequence[int]) -> dict[str, float]:
    """Errors of one count for all frames, such as the mean of the training frames: a network must beat them."""
    return _rounded(mean - crowd_set.counts(indices, torch.float64))


def _errors(error: Tensor) -> dict[str, float]:
    measures = {"mae": error.abs().mean(), "rmse": error.square().mean().sqrt(), "bias": error.mean()}
    return {name: value.item() for name, value in measures.items()}


def _rounded(error: Tensor) -> dict[str, float]:
    return {**{name: round(value, 4) for name, value in _errors(error).items()}, "frames": len(error)}


def summary(out: Path, log: Mapping[str, Any]) -> str:
    """Sum a finished training up, in two lines."""
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
    """Describe the frames of a training, so that it is told from others."""
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
    """Gather what the log of a finished training says."""
    mean = crowd_set.counts(crowd_set.train, torch.float64).mean().item()
    indices = {part: getattr(crowd_set, part) for part in ("validation", "test") if getattr(crowd_set, part)}
    return {
        "schema": SCHEMA,
        **identity,
        "epochs": state.epoch,
        **{part: evaluate_counts(trained, crowd_set, chosen) for part, chosen in indices.items()},
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
