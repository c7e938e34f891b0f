"""Train a network on a set and write it down: weights, and a log beside them.

Validation frames are cut from the training frames, and the epoch of the second half with the best counts there,
`mae = mean |predicted - true|`, is kept. Test frames are looked at once, at the end. The log beside the weights says
how they were made and what they reach.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from latedrop.crowd import layouts
from latedrop.crowd.layouts import CrowdSet, open_set
from latedrop.crowd.mcnn import MCNN, Trained, load_weights, save_weights
from latedrop.crowd.scenes import make_scenes
from latedrop.crowd.training.checkpoint import Checkpoint, Fit
from latedrop.crowd.training.log import (
    add_test,
    beside,
    check_better,
    described,
    finished,
    read_log,
    record_of,
    write_log,
)
from latedrop.crowd.training.loop import fit
from latedrop.crowd.training.settings import RECOMMENDED, Settings
from latedrop.devices import chosen_device
from latedrop.errors import ArgumentError
from latedrop.files import digest_of
from latedrop.terminal import need

__all__ = ["SETS", "Request", "run", "test", "train"]

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

    def open(self) -> CrowdSet:
        """The frames."""
        if self.set not in SETS:
            raise ArgumentError(f"expected a set among {', '.join(SETS)}; found {self.set!r}. Pass one of these.")
        if self.set == "scenes":
            return make_scenes()
        if self.data is None:
            raise ArgumentError(f"expected the folder of {self.set}; found none. Pass --data DIR.")
        enlarge = _ENLARGE.get(self.set, 1) if self.enlarge is None else self.enlarge
        return open_set(self.set, self.data, part=self.part, view=self.view, enlarge=enlarge, use_roi=self.roi)


def run(request: Request, *, command: str | None = None) -> dict[str, Any]:
    """Train as asked; the log that is then beside the weights.

    Raises:
        LatedropError: a wrong argument, missing or malformed data, a file that cannot be written, a failed training.
    """
    device = chosen_device(request.device)
    train(
        request.open(),
        request.settings,
        request.out,
        device,
        request.progress,
        fresh=request.fresh,
        checked=request.checked,
        command=command,
    )
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

    Raises:
        FileError: `out` cannot be written, or it or its checkpoint was made with other settings or frames.
        OutputError: the loss is not finite, the network is dead, or, where `checked`, it is no better than the mean.
    """
    settings = settings or RECOMMENDED.get(crowd_set.name, Settings())
    device, start = torch.device(device), time.perf_counter()
    identity = {"settings": asdict(settings), "data": described(crowd_set)}
    checkpoint = None
    if out is not None:
        need("crowd", "safetensors")  # before hours of training, and not after
        checkpoint = Checkpoint(beside(out, ".checkpoint.pt"), identity)
        if fresh:
            checkpoint.path.unlink(missing_ok=True)
        elif finished(Path(out), identity):
            return load_weights(out, device)
    state = fit(crowd_set, settings, device, checkpoint, progress=progress)
    trained = _trained(crowd_set, settings, state, device)
    record = record_of(identity, crowd_set, trained, state, device)
    record |= {"seconds": round(time.perf_counter() - start, 1), "command": command}
    if checked:
        check_better(record)
    if out is not None and checkpoint is not None:
        save_weights(out, trained)
        write_log(beside(out, ".log.json"), record | {"weights_sha256": digest_of(out)})
        checkpoint.path.unlink(missing_ok=True)
    return trained


def _trained(crowd_set: CrowdSet, settings: Settings, state: Fit, device: torch.device) -> Trained:
    with torch.random.fork_rng([]):  # initial weights that are thrown away should not move the caller's dice
        model = MCNN()
    model.load_state_dict(state.best)
    cells = crowd_set.cells()
    about = {
        "set": crowd_set.name,
        "sigma": crowd_set.sigma,
        "enlarge": crowd_set.enlarge,
        "size": crowd_set.size,
        "rate": settings.rate,
        "seed": settings.seed,
        "epochs": state.epochs,
        "best_epoch": state.best_epoch,
    }
    return Trained(model.to(device).eval(), None if cells is None else cells.to(device), about)
