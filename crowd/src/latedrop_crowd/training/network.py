"""Train a network on a set and write it down: weights, and a log beside them.

The averaged weights at the end of the last epoch are kept. To choose an epoch by validation frames would be to choose
noise: these frames follow one another, and are worth a few independent ones. Validation frames are cut from the
training frames, and test frames are looked at once, at the end. The log beside the weights says how they were made and
what they reach.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from latedrop.devices import chosen_device
from latedrop.errors import ArgumentError, DataError
from latedrop.files import digest_of
from latedrop_crowd import layouts
from latedrop_crowd.blocks import time_blocks
from latedrop_crowd.layouts import CrowdSet, open_set
from latedrop_crowd.mcnn import MCNN, Trained, load_weights, save_weights
from latedrop_crowd.scenes import make_scenes
from latedrop_crowd.training.checkpoint import Checkpoint, Fit
from latedrop_crowd.training.counts import mean_errors, predict_counts
from latedrop_crowd.training.log import (
    add_test,
    beside,
    check_better,
    described,
    finished,
    read_log,
    record_of,
    write_log,
)
from latedrop_crowd.training.loop import fit
from latedrop_crowd.training.settings import RECOMMENDED, Settings

__all__ = ["SETS", "Request", "cross_fit", "fold_path", "fold_sets", "run", "test", "train"]

SETS = (*layouts.SETS, "scenes")
"""What can be trained on."""
_ENLARGE = {"ucsd": 2}


@dataclass(frozen=True)
class Request:
    """What to train.

    Attributes:
        set: one of `SETS`.
        out: where the weights go, `NAME.safetensors`.
        data: folder of the set; not needed for `scenes`.
        settings: None: those recommended for the set.
        part: `"train"` where the test frames are not at hand.
        view: the camera of PETS2009.
        enlarge: make frames so many times larger; None: 2 for UCSD, whose people are small, else 1.
        roi: count only inside the region of interest; None: as the set's protocol does.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        fresh: do not go on from a checkpoint, and write over what is there.
        checked: fail if the network is no better than the mean count of the training frames.
        progress: show bars.
        sigma: of the density kernel in pixels of the files, or `"adaptive"`; None: the set's own.
        folds: at least 2: cross-fit in so many blocks of time, see `cross_fit`; 0: one training.
    """

    set: str
    out: Path
    data: Path | None = None
    settings: Settings | None = None
    part: layouts.Part = "all"
    view: int = 1
    enlarge: int | None = None
    roi: bool | None = None
    device: str = "auto"
    fresh: bool = False
    checked: bool = True
    progress: bool = True
    sigma: layouts.Sigma | None = None
    folds: int = 0

    def open(self) -> CrowdSet:
        """The frames."""
        if self.set not in SETS:
            raise ArgumentError(f"expected a set among {', '.join(SETS)}; found {self.set!r}. Pass one of these.")
        if self.set == "scenes":
            return make_scenes()
        if self.data is None:
            raise ArgumentError(f"expected the folder of {self.set}; found none. Pass --data DIR.")
        enlarge = _ENLARGE.get(self.set, 1) if self.enlarge is None else self.enlarge
        return open_set(
            self.set,
            self.data,
            part=self.part,
            view=self.view,
            enlarge=enlarge,
            use_roi=self.roi,
            sigma=self.sigma,
        )


def run(request: Request, *, command: str | None = None) -> dict[str, Any]:
    """Train as asked; the log that is then beside the weights.

    Raises:
        LatedropError: a wrong argument, missing or malformed data, a file that cannot be written, a failed training.
    """
    options: dict[str, Any] = {"fresh": request.fresh, "checked": request.checked, "command": command}
    where = (request.out, chosen_device(request.device), request.progress)
    if request.folds:
        cross_fit(request.open(), request.settings, *where, folds=request.folds, **options)
    else:
        train(request.open(), request.settings, *where, **options)
    return read_log(beside(request.out, ".log.json"))


def test(request: Request) -> dict[str, Any]:
    """Train nothing: the log of the weights in `out`, with their errors on the test frames added."""
    return add_test(request.out, replace(request, part="test").open(), chosen_device(request.device))


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
    if checked:
        _check_checkable(crowd_set)
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
    trained = _trained(crowd_set, settings, state, device, about)
    record = record_of(identity, crowd_set, trained, state, device) | dict(notes or {})
    record |= {"seconds": round(time.perf_counter() - start, 1), "command": command}
    if checked:
        check_better(record)
    if out is not None and checkpoint is not None:
        save_weights(out, trained)
        write_log(beside(out, ".log.json"), record | {"weights_sha256": digest_of(out)})
        checkpoint.path.unlink(missing_ok=True)
    return trained


def _check_checkable(crowd_set: CrowdSet) -> None:
    if not crowd_set.validation:
        raise DataError(
            f"expected validation frames in {crowd_set.name}, to check the network with; found none. Open the set's "
            "training part, or pass --unchecked."
        )


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

    Args:
        crowd_set: its train and validation frames, and its test frames, if it has any, for the log.
        settings: None: those recommended for the set.
        out: `NAME.safetensors`; None writes nothing.
        device: `cpu`, `cuda`, ...
        progress: show bars.
        folds: how many runs, at least 2.
        fresh: do not go on from checkpoints, and write over what is there.
        checked: raise if the networks are no better on their runs than the mean count of the training frames.
        command: for the log.
    """
    settings = settings or RECOMMENDED.get(crowd_set.name, Settings())
    if settings.minutes is not None:
        raise ArgumentError("expected epochs to cross-fit, as blocks must be trained alike; found minutes.")
    options: dict[str, Any] = {"fresh": fresh, "command": command}
    error, notes = _errors_of_folds(crowd_set, settings, out, device, progress, folds, options)
    held = {"mae": float(error.abs().mean()), "rmse": float(error.square().mean().sqrt()), "bias": float(error.mean())}
    every = tuple(sorted((*crowd_set.train, *crowd_set.validation)))
    if checked:
        mean = mean_errors(crowd_set.counts(every, torch.float64).mean().item(), crowd_set, every)
        record = {"validation": held, "mean_predictor": {"validation": mean}}
        check_better(record | {"epochs": settings.epochs})
    about, said = {"folds": folds}, {"folds": notes, "held_out": held}
    whole = replace(crowd_set, train=every, validation=())
    return train(whole, settings, out, device, progress, checked=False, about=about, notes=said, **options)


def _errors_of_folds(
    crowd_set: CrowdSet,
    settings: Settings,
    out: str | os.PathLike[str] | None,
    device: str | torch.device,
    progress: bool,
    folds: int,
    options: dict[str, Any],
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Errors of all frames `(N,)`, each by the network that left it out, and what the log says of these networks."""
    errors, notes = [], []
    for number, part in enumerate(fold_sets(crowd_set, folds)):
        path = None if out is None else fold_path(out, number)
        options = options | {"checked": False, "about": {"fold": number}}
        network = train(replace(part, test=()), settings, path, device, progress, **options)
        predicted = predict_counts(network, crowd_set, part.test, device).double()
        errors.append(predicted - crowd_set.counts(part.test, torch.float64))
        notes.append({"frames": len(part.test), "mae": float(errors[-1].abs().mean())})
    return torch.cat(errors), notes


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


def _trained(
    crowd_set: CrowdSet, settings: Settings, state: Fit, device: torch.device, more: Mapping[str, Any] | None
) -> Trained:
    with torch.random.fork_rng([]):  # initial weights that are thrown away should not move the caller's dice
        model = MCNN()
    model.load_state_dict(state.average.state_dict())
    cells = crowd_set.cells()
    about = {
        "set": crowd_set.name,
        "sigma": crowd_set.sigma,
        "enlarge": crowd_set.enlarge,
        "size": crowd_set.size,
        "rate": settings.rate,
        "seed": settings.seed,
        "epochs": state.epochs,
        **(more or {}),
    }
    return Trained(model.to(device).eval(), None if cells is None else cells.to(device), about)
