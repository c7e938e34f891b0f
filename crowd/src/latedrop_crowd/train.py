"""Train MCNN on annotated frames: `latedrop crowd train`, or `python -m latedrop_crowd.train`, which needs no extra.

The options are declared here once; `latedrop crowd train` hands its words on to `main`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from latedrop.devices import chosen_device
from latedrop.errors import ArgumentError
from latedrop.files import check_apart
from latedrop.terminal import command_parser, exit_code
from latedrop_crowd.training.counts import evaluate_counts, predict_counts
from latedrop_crowd.training.log import SCHEMA, add_test, said
from latedrop_crowd.training.network import SETS, Request, cross_fit, run, test, train
from latedrop_crowd.training.settings import RECOMMENDED, Settings

__all__ = [
    "RECOMMENDED",
    "SCHEMA",
    "SETS",
    "STOPPED",
    "Request",
    "Settings",
    "add_test",
    "cross_fit",
    "evaluate_counts",
    "main",
    "predict_counts",
    "run",
    "said",
    "test",
    "train",
]

STOPPED = "latedrop: stopped; the same command goes on from the last checkpoint, if an epoch was saved."
_PROGRAM = "python -m latedrop_crowd.train"


def main(arguments: Sequence[str] | None = None, program: str = _PROGRAM) -> int:
    """The command line without extras; the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = vars(_parser(program).parse_args(arguments))
    only_test, debug = options.pop("test"), options.pop("debug")

    def work() -> str:
        request = _request(options)
        log = test(request) if only_test else run(request, command=_command(arguments))
        return said(request.out, log)

    return exit_code(work, STOPPED, debug=debug)


def _parser(program: str = _PROGRAM) -> argparse.ArgumentParser:
    parser = command_parser(
        program,
        "Train a counter on the training frames of a set; it goes on from its checkpoint where it was stopped.",
        example="--set mall --data mall_dataset --out mall.safetensors",
    )
    add = parser.add_argument
    add("--set", required=True, choices=SETS)
    add(
        "--data",
        type=Path,
        help="folder of the set as it was released, or of your own frames; not needed for scenes",
    )
    add("--out", type=Path, required=True, help="where the weights go: NAME.safetensors")
    add("--epochs", type=int, help="passes over the training frames")
    add("--minutes", type=float, help="instead of --epochs: as many as fit into this time")
    add("--batch", type=int, help="frames per step")
    add("--lr", type=float, help="largest learning rate")
    add("--crop", type=int, help="side of random squares in pixels; 0: whole frames")
    add("--rate", type=float, help="of embedded dropout")
    add("--seed", type=int, help="of weights, order, crops and masks")
    add("--jitter", type=float, help="of contrast and brightness")
    add("--no-flip", dest="flip", action="store_false", default=None, help="do not mirror frames")
    add("--average", type=float, help="how much of the averaged weights each step keeps")
    add("--precision", choices=("bf16", "fp32"), help="bf16 by default on a GPU")
    add("--part", choices=("all", "train"), default="all", help="train: where the test frames are not at hand")
    add("--test", action="store_true", help="no training: count the test frames with --out, and add to its log")
    add("--view", type=int, default=1, help="camera of PETS2009")
    add("--enlarge", type=int, help="factor by which frames are enlarged; 2 by default for ucsd")
    add("--roi", action=argparse.BooleanOptionalAction, help="count only inside the region of interest")
    add("--sigma", type=_sigma, help="of a head's kernel in pixels, or adaptive; by default the set's own, 4 for own")
    add("--folds", type=int, default=0, help="number of blocks of time to cross-fit in")
    add("--resume", action="store_true", help="go on from a checkpoint, if there is one; this is the default")
    add("--fresh", action="store_true", help="start again, and write over what is there")
    add("--unchecked", dest="checked", action="store_false", help="keep a network that is no better than the mean")
    return parser


def _sigma(text: str) -> float | str:
    """A width, or the word adaptive."""
    return text if text == "adaptive" else float(text)


def _request(options: Mapping[str, Any]) -> Request:
    given = {name: value for name, value in options.items() if value is not None}
    if given.pop("resume") and given["fresh"]:
        raise ArgumentError("expected one of --resume and --fresh; found both. Leave one out.")
    check_apart({"--out": given["out"]}, {"--data": given.get("data")})
    device = chosen_device(given["device"])
    chosen = {one.name: given.pop(one.name) for one in fields(Settings) if one.name in given}
    chosen = {"precision": "bf16" if device.type == "cuda" else "fp32"} | chosen
    if chosen.get("crop") == 0:
        chosen["crop"] = None
    return Request(settings=replace(RECOMMENDED.get(given["set"], Settings()), **chosen), **given)


def _command(arguments: Sequence[str]) -> str:
    """The command for the log: folders are the user's own business."""
    said = list(arguments)
    for option, name in (("--data", lambda path: "DIR"), ("--out", lambda path: Path(path).name)):
        for i, word in enumerate(said):
            if word == option and i + 1 < len(said):
                said[i + 1] = name(said[i + 1])
            elif word.startswith(f"{option}="):
                said[i] = f"{option}={name(word.partition('=')[2])}"
    return f"{_PROGRAM} {shlex.join(said)}"


if __name__ == "__main__":
    sys.exit(main())
