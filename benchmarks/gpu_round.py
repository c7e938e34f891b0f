"""Speed step by step: draws, first order, the default, compiled or not, of one version of latedrop or of two.

    python -m benchmarks.gpu_round --old ../before/src --out round.json   # networks in half precision on a GPU
    python -m benchmarks.gpu_round --small --seconds 60 --out small.json  # tiny networks, on any machine

Each version of latedrop has a process of its own; they take turns case by case, in an order that changes, so that a
noisy machine disturbs all alike. *By hand* is one plain pass over as many copies of the rows as there are draws.
Compiling comes last, in a process for each network: its first call is what a user waits for. What does not fit into
the time is left out. Every answer is written at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import Residual
from benchmarks.timing import first_line, machine, markdown_table, peak_bytes, seconds_of, timed
from latedrop.files import write_aside

RATE, DRAWS, ROWS, ROUNDS, VALIDATION = 0.05, 50, (1, 8, 64), 2, 128
NETS = ("ResNet-50", "ViT-B", "ConvNeXt-T", "BERT-base", "MLP", "residual CNN", "LSTM")
GRACE = 20.0  # seconds that work may take beyond the end
WORK = ("plain", "by hand", "draws", "first order", "default")
COMPILED = {  # by network: work and rows, what matters most first
    "ResNet-50": [("draws", 8), ("default", 8), ("first order", 8), ("default", 1), ("default", 64)],
    "ViT-B": [("default", 8), ("draws", 8), ("default", 64)],
    "ConvNeXt-T": [("default", 8), ("draws", 8), ("default", 64)],
    "BERT-base": [("default", 8), ("draws", 8), ("default", 64)],
    "MLP": [("default", 1), ("draws", 1), ("default", 8), ("first order", 1), ("default", 64)],
    "residual CNN": [("default", 8), ("draws", 8)],
}
HERE = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of one version or two, on a GPU in half precision.")
    parser.add_argument("--old", type=Path, help="folder that holds latedrop/ of an older version")
    parser.add_argument("--new", type=Path, default=Path(latedrop.__file__).parents[1], help="that of the newer one")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--seconds", type=float, default=450, help="after which nothing new starts")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--small", action="store_true", help="tiny networks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.small)
    else:
        print(step_table(run(options)))


def run(options: Any) -> dict[str, Any]:
    """Measure everything, and write each answer when it is there."""
    begin = time.monotonic()
    half, end = begin + 0.5 * options.seconds, begin + options.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"machine": machine(device), "draws": DRAWS, "ms": {}, "calibrate": {}, "compiled": {}}

    def write() -> None:
        write_aside(options.out, (json.dumps(record, separators=(",", ":")) + "\n").encode())

    trees = {"new": options.new} | ({"old": options.old} if options.old else {})
    workers = {name: Worker(tree, options.small, half) for name, tree in trees.items()}
    for net, rows in [(net, rows) for rows in ROWS for net in options.nets]:
        record["ms"] |= in_turns(workers, net, rows)
        write()
    for name, worker in workers.items():
        record["calibrate"][name] = worker.ask(work="calibrate", net=options.nets[0])
        worker.close()
    for net in options.nets:
        worker = Worker(options.new, options.small, end)
        for work, rows in COMPILED.get(net, ()):
            job = {"net": net, "work": work, "rows": rows}
            case = worker.ask(**job, first=True)
            if isinstance(case, dict):
                case["ms"] = worker.ask(**job, engine="compiled")
                case["plain_ms"] = worker.ask(**job | {"work": "plain"})
            record["compiled"][f"{net}, {work}, {rows}"] = case
            write()
        worker.close()
    return record


def in_turns(workers: Mapping[str, Worker], net: str, rows: int) -> dict[str, Any]:
    """Let the versions take turns at all work on some rows; return milliseconds, or why there are none."""
    cases = [(name, work) for name in workers for work in WORK if name == "new" or work not in ("plain", "by hand")]
    answers: dict[tuple[str, str], list[Any]] = {case: [] for case in cases}
    for turn in range(ROUNDS):
        for name, work in random.Random(turn).sample(cases, len(cases)):
            if work != "by hand" or rows < max(ROWS):
                answers[name, work].append(workers[name].ask(net=net, work=work, rows=rows))
    numbers = {case: [value for value in values if isinstance(value, float)] for case, values in answers.items()}
    return {
        f"{net}, {rows}, {work}, {name}": median(numbers[name, work]) if numbers[name, work] else (values or [None])[0]
        for (name, work), values in answers.items()
    }


class Worker:
    """A process that imports latedrop from a tree, and measures what it is asked for until a time is up."""

    def __init__(self, tree: Path, small: bool, end: float) -> None:
        if not (tree / "latedrop" / "__init__.py").is_file():
            raise SystemExit(f"expected a folder with the package latedrop in it, as src of a clone; found {tree}.")
        self._folder, self._end = tempfile.TemporaryDirectory(ignore_cleanup_errors=True), end
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), self._folder.name)
        paths = {"PYTHONPATH": os.pathsep.join([str(tree.resolve()), str(HERE)])}
        command = [sys.executable, "-m", "benchmarks.gpu_round", "--worker", "--out", "-", *["--small"] * small]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen(command, env=os.environ | paths | caches, cwd=HERE, **pipes)

    def ask(self, **job: Any) -> Any:
        """Return what some work gives; a text where it failed or took too long, after which the process is gone."""
        left = self._end - time.monotonic()
        if left < 0 or self._process.poll() is not None:
            return "no time was left, or the process ended"
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], left + GRACE)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._process.kill()
        return json.loads(line) if line else "no time was left, or the process ended"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def serve(small: bool) -> None:
    """Answer the jobs that come in, one line of JSON each; others that print are sent elsewhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases: dict[str, Case] = {}
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if job["net"] not in cases:
                cases[job["net"]] = Case(job["net"], small)
            answer = cases[job["net"]].measured(**{key: value for key, value in job.items() if key != "net"})
        except Exception as error:
            answer = first_line(error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Case:
    """A network with random weights in half precision, its inputs, and calibrations of both kinds."""

    def __init__(self, name: str, small: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        model, make, self.readout = built(name, small)
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.model, self.make = model.to(self.device, self.dtype).eval(), make
        self.sites = latedrop.find_sites(self.model, self.inputs(3))
        self.network = latedrop.Network(self.model)
        self.predictors: dict[str, Any] = {}

    def inputs(self, rows: int) -> Any:
        """Return inputs of some rows on the device."""
        x = self.make(rows)
        return mapped(x, lambda t: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype))

    def predictor(self, work: str, rows: int = VALIDATION) -> Any:
        """Return a calibration of first order alone, or the default."""
        if work not in self.predictors:
            x = self.inputs(rows)
            common: dict[str, Any] = {"sites": self.sites, "readout": self.readout}
            parts = [latedrop.linearize(self.network, part, **common) for part in split(x, 64)]
            mean = torch.cat([part.mean for part in parts])
            spread = torch.cat([part.variance(RATE) for part in parts]).sqrt()
            y = mean + spread * torch.randn_like(spread)  # errors that the default learns something from
            options: dict[str, Any] = {"method": "linear"} if work == "first order" else {}
            if not options and find_spec("sklearn") is None and hasattr(latedrop, "Terms"):
                options = {"method": latedrop.Terms(["dropout", "leverage", "gradients"])}  # the default but its forest
            data = ((part, target) for part, target in zip(split(x, 64), y.split(64), strict=True))
            self.predictors[work] = latedrop.calibrate(
                self.model, data, readout=self.readout, progress=False, **options
            )
        return self.predictors[work]

    def plain(self, x: Any) -> Tensor:
        """Return the model's own output."""
        output = self.model(**x) if isinstance(x, dict) else self.model(x)
        result: Tensor = output if self.readout is None else output[self.readout]
        return result

    def call(self, work: str, rows: int, engine: Any) -> Callable[[], Any]:
        """Return what is timed."""
        x = self.inputs(rows)
        common: dict[str, Any] = {"sites": self.sites, "readout": self.readout}
        if work in ("plain", "by hand"):
            times = DRAWS if work == "by hand" else 1

            def passed() -> None:
                with torch.no_grad():
                    self.plain(mapped(x, lambda t: torch.cat([t] * times)))

            return passed
        if work == "draws":
            return lambda: latedrop.sample(self.network, x, RATE, DRAWS, engine=engine, **common)
        if work == "first order" and engine == "auto":
            return lambda: latedrop.linearize(self.network, x, **common)
        predictor = self.predictor(work)
        predictor.engine = engine
        return lambda: predictor.predict(x)

    def measured(self, work: str, rows: int = 0, engine: str = "auto", first: bool = False) -> Any:
        """Return milliseconds; of a first compiled call its seconds and memory, of a calibration its seconds."""
        if work == "calibrate":
            self.predictor("default")
            self.predictors.clear()
            return timed(lambda: self.predictor("default", 1000), self.device)[1]
        if first:
            usual = self.call(work, rows, "auto")
            usual()
            _, steps = peak_bytes(usual, self.device)
            run = self.call(work, rows, "compiled")
            (_, wait), peak = peak_bytes(lambda: timed(run, self.device), self.device)
            return {"seconds": wait, "bytes": peak, "auto_bytes": steps}
        run = self.call(work, rows, engine)
        run(), run()
        times: list[float] = []
        while sum(times) < 0.1 or len(times) < 3:
            times.append(seconds_of(run, self.device))
        return 1000 * median(times)


def split(x: Any, size: int) -> Iterator[Any]:
    """Yield inputs in parts of some rows."""
    rows = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
    for start in range(0, rows, size):
        yield mapped(x, lambda tensor, start=start: tensor[start : start + size])


def mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor of some inputs."""
    return {key: change(value) for key, value in x.items()} if isinstance(x, dict) else change(x)


def built(name: str, small: bool) -> tuple[nn.Module, Callable[[int], Any], str | None]:
    """Return a network of one output, what makes its inputs, and the readout."""
    if name == "MLP":
        layers = nn.Linear(13, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1)
        return nn.Sequential(*layers), lambda rows: torch.randn(rows, 13), None
    if name == "residual CNN":
        return Residual(16 if small else 64, 2), lambda rows: torch.randn(rows, 3, 32, 32), None
    if name == "LSTM":
        recurrent = nn.LSTM(32, 32, batch_first=True)
        return Steps(nn.Linear(6, 32), recurrent), lambda rows: torch.randn(rows, 12 if small else 48, 6), None
    if name == "BERT-base":
        from transformers import BertConfig, BertForSequenceClassification

        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        config: Any = BertConfig(**(dict(zip(names, (32, 2, 2, 64), strict=True)) if small else {}))
        config.num_labels = 1

        def texts(rows: int) -> dict[str, Tensor]:
            ids = torch.randint(1000, (rows, 16 if small else 128))
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        return BertForSequenceClassification(config), texts, "logits"
    from torchvision import models  # type: ignore[import-not-found,unused-ignore]

    kinds = {"ResNet-50": "resnet50", "ViT-B": "vit_b_16", "ConvNeXt-T": "convnext_tiny"}
    sides = {"image_size": 64} if small and name == "ViT-B" else {}
    model, side = models.get_model(kinds[name], weights=None, num_classes=1, **sides), 64 if small else 224
    for weight in model.parameters():
        if not weight.any():  # as of the head of ViT before it is trained
            nn.init.normal_(weight, std=0.02)
    return model, lambda rows: torch.randn(rows, 3, side, side), None


class Steps(nn.Module):
    """A linear layer, a recurrent one, and the last step."""

    def __init__(self, first: nn.Module, recurrent: nn.Module) -> None:
        super().__init__()
        self.first, self.recurrent, self.head = first, recurrent, nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.first(x).tanh())
        head: Tensor = self.head(states[:, -1])
        return head


def step_table(record: dict[str, Any]) -> str:
    """Return milliseconds step by step; those of an older version where it was measured."""
    ms = record["ms"]
    columns = {"plain": "plain, new", "by hand": "by hand, new"}
    for name in ("new", "old"):
        if any(key.endswith(f", {name}") for key in ms):
            columns |= {work if name == "new" else f"{work}, old": f"{work}, {name}" for work in WORK[2:]}
    cases = dict.fromkeys(", ".join(key.split(", ")[:2]) for key in ms)
    rows = [[case, *(_cell(ms.get(f"{case}, {column}")) for column in columns.values())] for case in cases]
    return markdown_table(["network, rows", *columns], rows)


def compiled_table(record: dict[str, Any]) -> str:
    """Return the first compiled call, later ones beside a plain pass, and the memory of the first."""
    rows = []
    for case, value in record["compiled"].items():
        if isinstance(value, dict):
            times = value["ms"] / value["plain_ms"] if "ms" in value else None
            sizes = [value[key] / 1e6 if key in value else None for key in ("bytes", "auto_bytes")]
            rows.append([case, *map(_cell, (value["seconds"], value.get("ms"), times, *sizes))])
    heads = ["network, work, rows", "first call, s", "later, ms", "in plain passes", "MB", "MB without compiling"]
    return markdown_table(heads, rows)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value or "-")[:60]


if __name__ == "__main__":
    main()
