"""Train a network on a set, or cross-fit it, and write it down: weights, and a log beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from latedrop.errors import ArgumentError, DataError
from latedrop.files import digest_of
from latedrop_crowd.blocks import time_blocks
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import MCNN, Trained, load_weights, save_weights
from latedrop_crowd.training.checkpoint import Checkpoint
from latedrop_crowd.training.log import (
    beside,
    check_better,
    described,
    finished,
    mean_errors,
    predict_counts,
    record_of,
    write_log,
)
from latedrop_crowd.training.loop import Settings, fit

__all__ = ["RECOMMENDED", "cross_fit", "fold_path", "fold_sets", "train"]

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
        DataError: there is nothing to check it with.
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
        write_log(beside(out, ".log.json"), record | {"weights_sha256": digest_of(out)})
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
    """Train on all frames, and beside it on all but one block of time, for each block.

    The training and validation frames are cut into `folds` runs. For each run a network is trained on the others, and
    its counts of the run say how far off a network of this kind is. The final network is trained on all frames.
    `NAME.fold0.safetensors`, ... stay beside it: `calibrate_counter` fits the variance to the counts of their runs.
    The arguments are those of `train`; `checked` looks at the errors on the runs.
    """
    settings = settings or RECOMMENDED.get(crowd_set.name, Settings())
    options: dict[str, Any] = {"fresh": fresh, "command": command, "checked": False}
    errors, notes = [], []
    for number, part in enumerate(fold_sets(crowd_set, folds)):
        path = None if out is None else fold_path(out, number)
        network = train(replace(part, test=()), settings, path, device, progress, about={"fold": number}, **options)
        predicted = predict_counts(network, crowd_set, part.test, device).double()
        errors.append(predicted - crowd_set.counts(part.test, torch.float64))
        notes.append({"frames": len(part.test), "mae": float(errors[-1].abs().mean())})
    error = torch.cat(errors)
    left_out = {"mae": error.abs().mean(), "rmse": error.square().mean().sqrt(), "bias": error.mean()}
    measured = {name: float(value) for name, value in left_out.items()}
    every = tuple(sorted((*crowd_set.train, *crowd_set.validation)))
    if checked:
        mean = mean_errors(crowd_set.counts(every, torch.float64).mean().item(), crowd_set, every)
        check_better({"validation": measured, "mean_predictor": {"validation": mean}, "epochs": settings.epochs})
    whole, log = replace(crowd_set, train=every, validation=()), {"folds": notes, "held_out": measured}
    return train(whole, settings, out, device, progress, about={"folds": folds}, notes=log, **options)


def fold_sets(crowd_set: CrowdSet, folds: int) -> list[CrowdSet]:
    """For each block of time the set that leaves it out: `test` is the block, and all others are trained on.

    Raises:
        ArgumentError: fewer than 2 folds, or fewer frames than folds.
    """
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
