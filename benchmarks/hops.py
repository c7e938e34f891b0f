"""How far one has to walk through the source to follow one call: files entered, switches between them, depth, calls.

    python -m benchmarks.hops                                                      # of the latedrop that is imported
    python -m benchmarks.hops --source ../before/src src --labels before after     # two versions side by side
    python -m benchmarks.hops --tables                                             # from the JSON alone

`sys.setprofile` tells of every Python function that is entered and left. Only those in files of latedrop count; what
torch and others do in between is left out. A *switch* is a step from one file to another, by a call or on the way
back. *Depth* is the most latedrop functions that were inside each other. *Calls* are entries into functions, for
generators each time that they go on. Each case runs once before, with another seed, so that imports and what is made
once are not counted. The numbers do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import Residual
from benchmarks.timing import RESULTS, machine, write
from benchmarks.trees import answer_of, digest

FOLDER = Path(latedrop.__file__).parent
RATES, DRAWS, ROWS = (0.05, 0.1, 0.2), 20, 64
LABELS = {
    "files": "files",
    "ways": "ways between files",
    "room_switches": "switches between rooms",
    "switches": "switches between files",
    "depth": "depth",
    "calls": "calls",
}
PAIRS = 10
"""Pairs of files between which one walks most, that are written down."""


def main() -> None:
    parser = argparse.ArgumentParser(description="How far a call walks through the source.")
    parser.add_argument(
        "--source", type=Path, nargs="+", help="folders that hold latedrop/; the imported one by default"
    )
    parser.add_argument("--labels", nargs="+", help="a name for each of them; a digest of the source by default")
    parser.add_argument("--out", default="hops", help="name of the JSON in benchmarks/results")
    parser.add_argument("--tables", action="store_true", help="from the JSON that is there; measure nothing")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    if options.tables:
        print(markdown(json.loads((RESULTS / f"{options.out}.json").read_text(encoding="utf-8"))))
        return
    sources = options.source or [None]
    if options.labels and len(options.labels) != len(sources):
        parser.error(f"expected a label for each of {len(sources)} sources; found {len(options.labels)}")
    found = [answer_of("benchmarks.hops", ["--measure"], source) for source in sources]
    labels = options.labels or [each["machine"]["source"] for each in found]
    record = {
        "rates": len(RATES),
        "draws": DRAWS,
        "rows": ROWS,
        "sources": [{"label": label, **each} for label, each in zip(labels, found, strict=True)],
    }
    write(options.out, record)
    print(markdown(record))


def measure() -> dict[str, Any]:
    """All cases, in the version of latedrop that is imported."""
    torch.set_num_threads(1)
    about = machine(torch.device("cpu")) | {"source": digest()}
    return {"machine": about, "cases": {name: walked(run) for name, run in cases().items()}}


def cases() -> dict[str, Callable[[int], Callable[[], Any]]]:
    """By name: what makes, from a seed, the call that is followed."""
    made: dict[str, Callable[[int], Callable[[], Any]]] = {}
    for net, build in NETS.items():
        for method in ("sample", "linear"):
            made[f"calibrate, {method}, {net}"] = lambda seed, b=build, m=method: calibrated(b, m, seed)
    for net, build in NETS.items():
        for method in ("sample", "linear"):
            made[f"predict, {method}, {net}"] = lambda seed, b=build, m=method: predicted(b, m, seed)
    return made


def calibrated(build: Callable[[], tuple[nn.Module, Tensor]], method: str, seed: int) -> Callable[[], Any]:
    model, x = build()
    y = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(0))
    return lambda: latedrop.calibrate(model, (x, y), method=_method(method, seed), progress=False)


def _method(name: str, seed: int) -> Any:
    """A method by its name, with its options; a method that has no seed is the same every time."""
    return latedrop.Sampling(RATES, DRAWS, seed=seed) if name == "sample" else name


def predicted(build: Callable[[], tuple[nn.Module, Tensor]], method: str, seed: int) -> Callable[[], Any]:
    """A prediction after another one on the same rows, as most are."""
    predictor = calibrated(build, method, seed)()
    _, x = build()
    predictor.predict(x)
    return lambda: predictor.predict(x)


def mlp() -> tuple[nn.Module, Tensor]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    return _seeded(build, (ROWS, 8))


def cnn() -> tuple[nn.Module, Tensor]:
    return _seeded(lambda: Residual(8, 1), (ROWS, 3, 8, 8))


NETS = {"MLP": mlp, "CNN": cnn}


def walked(prepare: Callable[[int], Callable[[], Any]]) -> dict[str, Any]:
    """The numbers of one call, after another one with another seed."""
    prepare(1)()
    run, walk = prepare(0), Walk(FOLDER)
    walk.follow(run)
    pairs = [[*pair, count] for pair, count in walk.pairs.most_common(PAIRS)]
    return {
        "files": len(walk.files),
        "switches": walk.pairs.total(),
        "room_switches": sum(count for pair, count in walk.pairs.items() if len({*map(room, pair)}) > 1),
        "ways": len(walk.ways),
        "depth": walk.depth,
        "calls": walk.calls,
        "most": pairs,
    }


def room(name: str) -> str:
    """The package of a file, or the file itself where it stands at the top."""
    return name.partition("/")[0].removesuffix(".py")


class Walk:
    """Follows a call through the files below a folder.

    Attributes:
        files: those that were entered.
        pairs: how often one went from one file to another, directions together.
        ways: functions that call one in another file, with what they call: what a reader has to look up, once each.
        depth: the most functions inside each other.
        calls: entries into functions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}/"
        self.files: set[str] = set()
        self.pairs: Counter[tuple[str, str]] = Counter()
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
        before = self._file()
        if event == "call":
            name = frame.f_code.co_filename.removeprefix(self.folder)
            if before is not None and before != name:
                self.ways.add((self._stack[-1][0].f_code, frame.f_code))
            self._stack.append((frame, name))
            self.files.add(name)
            self.calls += 1
            self.depth = max(self.depth, len(self._stack))
        elif self._stack and self._stack[-1][0] is frame:
            self._stack.pop()
        now = self._file()
        if before is not None and now is not None and before != now:
            self.pairs[min(before, now), max(before, now)] += 1

    def _file(self) -> str | None:
        """Where one is."""
        return self._stack[-1][1] if self._stack else None

    def _counts(self, frame: FrameType) -> bool:
        """Comprehensions are functions in some versions of Python and not in others: they are none here."""
        code = frame.f_code
        return code.co_filename.startswith(self.folder) and (code.co_name[0] != "<" or code.co_name == "<lambda>")


def markdown(record: dict[str, Any]) -> str:
    """A row for each case; with several versions, their numbers side by side in the order of the labels."""
    sources = record["sources"]
    several = f" ({' / '.join(source['label'] for source in sources)})" if len(sources) > 1 else ""
    lines = [
        f"| call{several} | " + " | ".join(LABELS.values()) + " |",
        "| --- |" + " ---: |" * len(LABELS),
    ]
    for name in sources[0]["cases"]:
        cells = [" / ".join(str(source["cases"][name][key]) for source in sources) for key in LABELS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _seeded(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval(), torch.randn(shape)


if __name__ == "__main__":
    main()
