"""Train MCNN on annotated frames: `latedrop crowd train`, or `python -m latedrop.crowd.train`, which needs no extra.

Validation frames are cut from the training frames, and the epoch of the second half with the best counts there,
`mae = mean |predicted - true|`, is kept. Test frames are looked at once, at the end. The log beside the weights says
how they were made and what they reach, and tables are made from the logs alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import latedrop
from latedrop.crowd import layouts
from latedrop.crowd.density import roi_cells
from latedrop.crowd.fitting import Checkpoint, Fit, Settings, differences, fit, in_order
from latedrop.crowd.layouts import CrowdSet, open_set
from latedrop.crowd.mcnn import MCNN, STRIDE, Trained, load_weights, save_weights
from latedrop.crowd.scenes import make_scenes
from latedrop.devices import chosen_device, device_name
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.files import write_aside
from latedrop.terminal import exit_code

__all__ = [
    "RECOMMENDED",
    "SCHEMA",
    "SETS",
    "STOPPED",
    "Request",
    "Settings",
    "add_test",
    "evaluate_counts",
    "main",
    "predict_counts",
    "read_logs",
    "run",
    "said",
    "table",
    "test",
    "train",
    "update_page",
]

SCHEMA = 1
SETS = (*layouts.SETS, "scenes")
"""What can be trained on."""
RECOMMENDED: dict[str, Settings] = {
    "mall": Settings(epochs=200),
    "ucsd": Settings(epochs=200),
    "pets": Settings(epochs=300),
    "shanghaitech-a": Settings(epochs=600, crop=256),
    "shanghaitech-b": Settings(epochs=400, crop=512),
    "scenes": Settings(epochs=40, lr=3e-3, crop=96),
}
"""Settings to start from, by set."""
STOPPED = "latedrop: stopped; the same command goes on from the last checkpoint, if an epoch was saved."
_ENLARGE = {"ucsd": 2}
_MARK = "<!-- the logs of the weights -->"


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
    return _read_log(_beside(request.out, ".log.json"))


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
    identity = {"settings": asdict(settings), "data": _described(crowd_set)}
    checkpoint = None
    if out is not None:
        checkpoint = Checkpoint(_beside(out, ".checkpoint.pt"), identity)
        if fresh:
            checkpoint.path.unlink(missing_ok=True)
        elif _finished(Path(out), identity):
            return load_weights(out, device)
    state = fit(crowd_set, settings, device, checkpoint, progress=progress)
    trained = _trained(crowd_set, settings, state, device)
    record = _record(identity, crowd_set, trained, state, device)
    record |= {"seconds": round(time.perf_counter() - start, 1), "command": command}
    if checked:
        _check_better(record)
    if out is not None and checkpoint is not None:
        save_weights(out, trained)
        record["weights_sha256"] = hashlib.sha256(Path(out).read_bytes()).hexdigest()
        write_aside(_beside(out, ".log.json"), (json.dumps(record, indent=1) + "\n").encode())
        checkpoint.path.unlink(missing_ok=True)
    return trained


def predict_counts(
    trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], device: str | torch.device = "cpu"
) -> Tensor:
    """Predicted counts of frames, `(N,)`; neighbours of one size go through together."""
    model = deepcopy(trained.model).to(device).eval()
    moved = replace(trained, roi=None if trained.roi is None else trained.roi.to(device))
    frames = in_order(lambda index: crowd_set.image(index, model.channels), indices)
    size = 16 if torch.device(device).type == "cuda" else 1
    with torch.inference_mode():
        counts = [moved.count_of(model(torch.stack(run).to(device))).float().cpu() for run in _alike(frames, size)]
    return torch.cat(counts) if counts else torch.zeros(0)


def evaluate_counts(
    trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Errors of the counts of frames: `mae`, `rmse`, `bias` (predicted less true); and `frames`, how many."""
    if not indices:
        raise DataError(f"expected frames of {crowd_set.name} to evaluate; found none. Open another part of the set.")
    return _errors(predict_counts(trained, crowd_set, indices, device), _counts(crowd_set, indices))


def add_test(out: Path, crowd_set: CrowdSet, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Count the test frames with weights that were trained where those were not at hand, and add the errors to the log.

    Raises:
        FileError: no weights or no log, or weights that are not those of the log.
        DataError: the set has no test frames.
    """
    path = _beside(out, ".log.json")
    log, trained = _read_log(path), load_weights(out, device)
    if log.get("weights_sha256") != hashlib.sha256(out.read_bytes()).hexdigest():
        raise FileError(f"expected the log of {out} in {path}; found that of other weights. Put them together again.")
    log["test"] = evaluate_counts(trained, crowd_set, crowd_set.test, device)
    mean = torch.tensor(log["mean_predictor"]["count"], dtype=torch.float64)
    log["mean_predictor"]["test"] = _errors(mean.expand(len(crowd_set.test)), _counts(crowd_set, crowd_set.test))
    write_aside(path, (json.dumps(log, indent=1) + "\n").encode())
    return log


def read_logs(folder: Path) -> dict[str, dict[str, Any]]:
    """The logs in a folder, by the name of their weights."""
    return {path.name.removesuffix(".log.json"): _read_log(path) for path in sorted(folder.glob("*.log.json"))}


def table(logs: Mapping[str, Mapping[str, Any]]) -> str:
    """What the networks reach on test frames, as a Markdown table."""
    titles = ["weights", "set", "rate", "frames: train, validation, test", "epochs, best", "test MAE", "test RMSE"]
    titles.append("mean predictor: MAE, RMSE")
    rows = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for name, log in logs.items():
        test, mean = log.get("test"), log["mean_predictor"].get("test")
        numbers = {**log["data"]["frames"], **({"test": test["frames"]} if test else {})}
        frames = ", ".join(str(numbers[part]) for part in ("train", "validation", "test"))
        reached = [f"{test['mae']:.2f}", f"{test['rmse']:.2f}"] if test else ["not measured"] * 2
        against = f"{mean['mae']:.2f}, {mean['rmse']:.2f}" if mean else "not measured"
        epochs = f"{log['epochs']}, {log['best_epoch']}"
        cells = [f"`{name}`", log["data"]["set"], f"{log['settings']['rate']:g}", frames, epochs, *reached, against]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def update_page(page: Path, logs: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the table between the two marks of a page."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(_MARK)
    _, end, after = rest.partition(_MARK)
    if not (mark and end):
        raise FileError(f"expected {_MARK} above and below the table in {page}; found fewer. Put them there.")
    write_aside(page, f"{before}{_MARK}\n{table(logs)}{_MARK}{after}".encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line without extras; the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)

    def work() -> str:
        options = _parser().parse_args(arguments)
        only_test = vars(options).pop("test")
        request = _request(options)
        log = test(request) if only_test else run(request, command=_command(arguments))
        return said(request.out, log)

    return exit_code(work, STOPPED)


def said(out: Path, log: Mapping[str, Any]) -> str:
    """What a finished training tells, in two lines."""
    lines = [f"written: {out}, {_beside(out, '.log.json')}"]
    for part in ("validation", "test"):
        if part in log:
            own, mean = log[part], log["mean_predictor"][part]
            lines.append(
                f"{part}: MAE {own['mae']:.2f}, RMSE {own['rmse']:.2f}, bias {own['bias']:+.2f} people on "
                f"{own['frames']} frames; the mean of the training frames has MAE {mean['mae']:.2f}"
            )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m latedrop.crowd.train", description=__doc__)
    add = parser.add_argument
    add("--set", required=True, choices=SETS)
    add("--data", type=Path, help="folder of the set, in the layout of its release; not needed for scenes")
    add("--out", type=Path, required=True, help="where the weights go: NAME.safetensors")
    add("--epochs", type=int, help="passes over the training frames")
    add("--minutes", type=float, help="instead of --epochs: as many as fit into this time")
    add("--batch", type=int, help="frames per step")
    add("--lr", type=float, help="largest learning rate")
    add("--crop", type=int, help="side of random squares in pixels; 0: whole frames")
    add("--rate", type=float, help="of embedded dropout")
    add("--seed", type=int)
    add("--jitter", type=float, help="of contrast and brightness")
    add("--no-flip", dest="flip", action="store_false", default=None, help="do not mirror frames")
    add("--average", type=float, help="how much of the averaged weights each step keeps")
    add("--precision", choices=("bf16", "fp32"), help="bf16 by default on a GPU")
    add("--part", choices=("all", "train"), default="all", help="train: where the test frames are not at hand")
    add(
        "--test",
        action="store_true",
        help="no training: count the test frames with --out, and add to its log",
    )
    add("--view", type=int, default=1, help="camera of PETS2009")
    add("--enlarge", type=int, help="make frames so many times larger; 2 by default for ucsd")
    add("--roi", action=argparse.BooleanOptionalAction, help="count only inside the region of interest")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--resume", action="store_true", help="go on from a checkpoint, if there is one; this is the default")
    add("--fresh", action="store_true", help="start again, and write over what is there")
    add("--unchecked", dest="checked", action="store_false", help="keep a network that is no better than the mean")
    add("--no-progress", dest="progress", action="store_false", help="no bars")
    return parser


def _request(options: argparse.Namespace) -> Request:
    given = {name: value for name, value in vars(options).items() if value is not None}
    if given.pop("resume") and given["fresh"]:
        raise ArgumentError("expected one of --resume and --fresh; found both. Leave one out.")
    device = chosen_device(options.device)
    chosen = {one.name: given.pop(one.name) for one in fields(Settings) if one.name in given}
    chosen = {"precision": "bf16" if device.type == "cuda" else "fp32"} | chosen
    if chosen.get("crop") == 0:
        chosen["crop"] = None
    return Request(settings=replace(RECOMMENDED[options.set], **chosen), **given)


def _command(arguments: Sequence[str]) -> str:
    """The command for the log: folders are the user's own business."""
    said = list(arguments)
    for option, name in (("--data", lambda path: "DIR"), ("--out", lambda path: Path(path).name)):
        for i, word in enumerate(said):
            if word == option and i + 1 < len(said):
                said[i + 1] = name(said[i + 1])
            elif word.startswith(f"{option}="):
                said[i] = f"{option}={name(word.partition('=')[2])}"
    return shlex.join(["python", "-m", "latedrop.crowd.train", *said])


def _alike(frames: Iterator[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Runs of frames of one shape, at most `size` long."""
    run: list[Tensor] = []
    for frame in frames:
        if run and (len(run) == size or run[0].shape != frame.shape):
            yield run
            run = []
        run.append(frame)
    if run:
        yield run


def _counts(crowd_set: CrowdSet, indices: Sequence[int]) -> Tensor:
    return torch.tensor([crowd_set.count(i) for i in indices], dtype=torch.float64)


def _errors(predicted: Tensor, true: Tensor) -> dict[str, float]:
    error = predicted.double() - true
    measures = {"mae": error.abs().mean(), "rmse": error.square().mean().sqrt(), "bias": error.mean()}
    return {**{name: round(value.item(), 4) for name, value in measures.items()}, "frames": len(true)}


def _trained(crowd_set: CrowdSet, settings: Settings, state: Fit, device: torch.device) -> Trained:
    with torch.random.fork_rng([]):  # initial weights that are thrown away should not move the caller's dice
        model = MCNN()
    model.load_state_dict(state.best)
    roi = None if crowd_set.roi is None else torch.from_numpy(roi_cells(crowd_set.roi, STRIDE)).to(device)
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
    return Trained(model.to(device).eval(), roi, about)


def _described(crowd_set: CrowdSet) -> dict[str, Any]:
    """What tells one training's frames from another's."""
    digest = hashlib.sha256()
    for index in (*crowd_set.train, *crowd_set.validation):
        frame = crowd_set.frames[index]
        digest.update(frame.name.encode() + np.ascontiguousarray(frame.points, np.float64).tobytes())
    return {
        "set": crowd_set.name,
        "frames": {part: len(getattr(crowd_set, part)) for part in ("train", "validation", "test")},
        "size": None if crowd_set.size is None else list(crowd_set.size),
        "sigma": crowd_set.sigma,
        "enlarge": crowd_set.enlarge,
        "roi_cells": None if crowd_set.roi is None else int(roi_cells(crowd_set.roi, STRIDE).sum()),
        "sha256": digest.hexdigest(),
    }


def _record(
    identity: Mapping[str, Any], crowd_set: CrowdSet, trained: Trained, state: Fit, device: torch.device
) -> dict[str, Any]:
    mean = _counts(crowd_set, crowd_set.train).mean()
    parts = [part for part in ("validation", "test") if getattr(crowd_set, part)]
    indices = {part: getattr(crowd_set, part) for part in parts}
    return {
        "schema": SCHEMA,
        **identity,
        "epochs": state.epochs,
        "best_epoch": state.best_epoch,
        "dead_networks": state.attempt,
        **{part: evaluate_counts(trained, crowd_set, indices[part], device) for part in parts},
        "mean_predictor": {
            "count": round(mean.item(), 4),
            **{part: _errors(mean.expand(len(indices[part])), _counts(crowd_set, indices[part])) for part in parts},
        },
        "training_seconds": round(state.seconds, 1),
        "machine": {"device": device_name(device), "system": platform.system()},
        "versions": {
            "latedrop": latedrop.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "history": {
            "loss": [round(row["loss"], 5) for row in state.history],
            "validation_mae": [round(row["mae"], 4) for row in state.history],
        },
    }


def _check_better(record: Mapping[str, Any]) -> None:
    own, mean = record["validation"]["mae"], record["mean_predictor"]["validation"]["mae"]
    if not own < mean:
        raise OutputError(
            f"expected a network that counts better than the mean of the training frames, whose validation MAE is "
            f"{mean:.2f}; found {own:.2f} after {record['epochs']} epochs, the best of them {record['best_epoch']}. "
            "Train longer, change --lr, or pass --unchecked to keep it."
        )


def _finished(out: Path, identity: Mapping[str, Any]) -> bool:
    """Whether these weights are there already."""
    log = _beside(out, ".log.json")
    if not (out.exists() and log.exists()):
        _check_writable(out)
        return False
    other = differences(identity, _read_log(log))
    if other:
        raise FileError(
            f"expected {out} to be of these settings and frames; found others in {log}: {other}. "
            "Pass another --out, or --fresh to write over it."
        )
    return True


def _check_writable(out: Path) -> None:
    """Before hours of training, and not after."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"expected to make the folder {out.parent}; the system says: {error}. Pass another --out."
        ) from error
    if not os.access(out.parent, os.W_OK):
        raise FileError(f"expected to write into {out.parent}; the system does not allow it. Pass another --out.")


def _beside(out: str | os.PathLike[str], suffix: str) -> Path:
    path = Path(out)
    if path.suffix != ".safetensors":
        raise ArgumentError(
            f"expected a name like mall.safetensors for the weights; found {path.name!r}. Change --out."
        )
    return path.with_suffix(suffix)


def _read_log(path: Path) -> dict[str, Any]:
    try:
        log: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"expected the log of a training in {path}; {error}. Train again with --fresh.") from error
    if not isinstance(log, dict) or log.get("schema") != SCHEMA:
        raise FileError(f"expected a log of schema {SCHEMA} in {path}; found another. Train again with --fresh.")
    return log


if __name__ == "__main__":
    sys.exit(main())
