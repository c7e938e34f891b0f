"""How far one has to walk through the source to follow one call: files and functions entered, ways, depth, calls.

    python -m benchmarks.hops               # of the latedrop that is imported
    python -m benchmarks.hops --tables      # from the JSON alone

`sys.setprofile` tells of every Python function that is entered and left. Only those in files of latedrop count; what
torch and others do in between is left out. *Ways between files* are functions that call one in another file, with what
they call. *Depth* is the most latedrop functions that were inside each other. *Calls* are entries into functions, for
generators each time that they go on. Each case runs once before, so that imports and what is made
once are not counted. The numbers do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import Residual
from benchmarks.timing import RESULTS, machine, write
from benchmarks.trees import digest

FOLDER = Path(latedrop.__file__).parent
RATES, DRAWS, ROWS = (0.05, 0.1, 0.2), 20, 64
LABELS = {"files": "files", "functions": "functions", "ways": "ways between files", "depth": "depth", "calls": "calls"}


def main() -> None:
    parser = argparse.ArgumentParser(description="How far a call walks through the source.")
    parser.add_argument("--tables", action="store_true", help="from the JSON that is there; measure nothing")
    if parser.parse_args().tables:
        print(markdown(json.loads((RESULTS / "hops.json").read_text(encoding="utf-8"))))
        return
    record = {"rates": len(RATES), "draws": DRAWS, "rows": ROWS, **measure()}
    write("hops", record)
    print(markdown(record))


def measure() -> dict[str, Any]:
    """All cases, in the version of latedrop that is imported."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    about = machine(torch.device("cpu")) | {"source": digest()}
    return {"machine": about, "cases": {name: walked(run) for name, run in cases().items()}}


def cases() -> dict[str, Callable[[int], Callable[[], Any]]]:
    """By name: what makes, from a seed, the call that is followed."""
    made: dict[str, Callable[[int], Callable[[], Any]]] = {}
    for net, build in NETS.items():
        for method in METHODS:
            made[f"calibrate, {method}, {net}"] = lambda seed, b=build, m=method: calibrated(b, m, seed)
    for net, build in NETS.items():
        for method in METHODS:
            made[f"predict, {method}, {net}"] = lambda seed, b=build, m=method: predicted(b, m, seed)
        made[f"sample, {net}"] = lambda seed, b=build: sampled(b, seed)
    return made


def calibrated(build: Callable[[], tuple[nn.Module, Tensor]], method: str, seed: int) -> Callable[[], Any]:
    model, x = build()
    y = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"method": method, "seed": seed, "progress": False}
    options |= {"reference": x} if method == "terms" else {"rates": RATES, "draws": DRAWS}
    return lambda: latedrop.calibrate(model, (x, y), **options)


def predicted(build: Callable[[], tuple[nn.Module, Tensor]], method: str, seed: int) -> Callable[[], Any]:
    """A prediction after another one on the same rows, as most are."""
    predictor = calibrated(build, method, seed)()
    _, x = build()
    predictor.predict(x)
    return lambda: predictor.predict(x)


def sampled(build: Callable[[], tuple[nn.Module, Tensor]], seed: int) -> Callable[[], Any]:
    """The same of draws of a network, at sites that were found before."""
    model, x = build()
    network, sites = latedrop.Network(model), latedrop.find_sites(model, x)
    latedrop.sample(network, x, 0.1, DRAWS, seed, sites)
    return lambda: latedrop.sample(network, x, 0.1, DRAWS, seed, sites)


def mlp() -> tuple[nn.Module, Tensor]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    return _seeded(build, (ROWS, 8))


def cnn() -> tuple[nn.Module, Tensor]:
    return _seeded(lambda: Residual(8, 1), (ROWS, 3, 8, 8))


NETS = {"MLP": mlp, "CNN": cnn}
METHODS = ("terms", "sample", "linear")


def walked(prepare: Callable[[int], Callable[[], Any]]) -> dict[str, Any]:
    """The numbers of one call, after another one."""
    prepare(0)()
    run, walk = prepare(0), Walk(FOLDER)
    walk.follow(run)
    return {
        "files": len(walk.files),
        "functions": len(walk.functions),
        "ways": len(walk.ways),
        "depth": walk.depth,
        "calls": walk.calls,
    }


class Walk:
    """Follows a call through the files below a folder.

    Attributes:
        files: those that were entered.
        functions: likewise.
        ways: functions that call one in another file, with what they call: what a reader has to look up, once each.
        depth: the most functions inside each other.
        calls: entries into functions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}/"
        self.files: set[str] = set()
        self.functions: set[Any] = set()
        self.ways: set[tuple[Any, Any]] = set()
        self.depth = self.calls = 0
        self._stack: list[tuple[FrameType, str]] = []

    def follow(self, run: Callable[[], Any]) -> None:
        """Run it, and note where it goes."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            run()
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not self._counts(frame):
            return
        if event == "call":
            name = frame.f_code.co_filename.removeprefix(self.folder)
            if self._stack and self._stack[-1][1] != name:
                self.ways.add((self._stack[-1][0].f_code, frame.f_code))
            self._stack.append((frame, name))
            self.files.add(name)
            self.functions.add(frame.f_code)
            self.calls += 1
            self.depth = max(self.depth, len(self._stack))
        elif self._stack and self._stack[-1][0] is frame:
            self._stack.pop()

    def _counts(self, frame: FrameType) -> bool:
        """Comprehensions are functions in some versions of Python and not in others: they are none here."""
        code = frame.f_code
        return code.co_filename.startswith(self.folder) and (code.co_name[0] != "<" or code.co_name == "<lambda>")


def markdown(record: dict[str, Any]) -> str:
    """A row for each case."""
    lines = ["| call | " + " | ".join(LABELS.values()) + " |", "| --- |" + " ---: |" * len(LABELS)]
    for name, counts in record["cases"].items():
        lines.append(f"| {name} | " + " | ".join(str(counts[key]) for key in LABELS) + " |")
    return "\n".join(lines)


def _seeded(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval(), torch.randn(shape)


if __name__ == "__main__":
    main()
