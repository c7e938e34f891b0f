"""Speed on a GPU in half precision: draws, first order, the default, compiled or not, of two versions.

    python -m benchmarks.gpu_round --old ../before/src --out round.json
    python -m benchmarks.gpu_round --tables --out round.json            # from the JSON alone
    python -m benchmarks.gpu_round --small --seconds 60 --out small.json  # tiny networks, on any machine

Each version of latedrop has a process of its own; they take turns case by case, in an order that changes, so that a
noisy machine disturbs all alike. *By hand* is one plain pass over as many copies of the rows as there are draws.
Compiling comes last, in a process for each network, several at a time after the first one, which is alone: its first
call is what a user waits for. What does not fit into the time is left out. Every answer is written at once.
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
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.core_speed import Steps
from benchmarks.nets import Residual
from benchmarks.timing import first_line, machine, peak_bytes, seconds_of, timed
from benchmarks.trees import HERE, environment

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed on a GPU, in half precision.")
    parser.add_argument("--old", type=Path, help="folder that holds latedrop/ of an older version")
    parser.add_argument("--new", type=Path, help="that of the newer one; the one that is imported, by default")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--seconds", type=float, default=450, help="after which nothing new starts")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--small", action="store_true", help="tiny networks, to try this script")
    parser.add_argument("--tables", action="store_true", help="from the JSON that is there; measure nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.small)
        return
    if not options.tables:
        run(options)
    print(markdown(json.loads(options.out.read_text(encoding="utf-8"))))


def run(options: Any) -> None:
    """Measure everything, and write each answer when it is there."""
    begin = time.monotonic()
    half, end = begin + 0.5 * options.seconds, begin + options.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"machine": machine(device), "draws": DRAWS, "ms": {}, "calibrate": {}, "compiled": {}}
    trees = {"new": options.new} | ({"old": options.old} if options.old else {})
    workers = {name: Worker(tree, options.small) for name, tree in trees.items()}
    try:
        for net, rows in [(net, rows) for rows in ROWS for net in options.nets]:
            _turns(record, workers, net, rows, half)
            _write(options.out, record)
        for name, worker in workers.items():
            record["calibrate"][name] = worker.ask(half, work="calibrate", net=options.nets[0])
            worker.close()
            _write(options.out, record)
        workers = {net: Worker(options.new, options.small) for net in options.nets if net in COMPILED}
        jobs = {net: [{"net": net, "work": work, "rows": rows} for work, rows in COMPILED[net]] for net in workers}
        first = next(iter(workers))
        _compile(record, workers, {first: jobs[first][:1]}, end)
        _write(options.out, record)
        jobs[first] = jobs[first][1:]
        while any(jobs.values()):
            _compile(record, workers, {net: waiting[:1] for net, waiting in jobs.items() if waiting}, end)
            jobs = {net: waiting[1:] for net, waiting in jobs.items()}
            _write(options.out, record)
        for net, worker in workers.items():
            for work, rows in COMPILED[net]:
                case = record["compiled"].get(f"{net}, {work}, {rows}", {})
                if "seconds" in case:
                    case["ms"] = worker.ask(end, net=net, work=work, rows=rows, engine="compiled")
                    case["plain_ms"] = worker.ask(end, net=net, work="plain", rows=rows)
            _write(options.out, record)
    finally:
        for worker in workers.values():
            worker.close()


def _turns(record: dict[str, Any], workers: dict[str, Worker], net: str, rows: int, end: float) -> None:
    """Let the versions take turns at all work on some rows."""
    cases = [(name, work) for name in workers for work in WORK if name == "new" or work not in ("plain", "by hand")]
    answers: dict[tuple[str, str], list[Any]] = {case: [] for case in cases}
    for turn in range(ROUNDS if time.monotonic() < end else 0):
        for name, work in random.Random(turn).sample(cases, len(cases)):
            if work != "by hand" or rows < max(ROWS):
                answers[name, work].append(workers[name].ask(end, net=net, work=work, rows=rows))
    for (name, work), values in answers.items():
        numbers = [value for value in values if isinstance(value, float)]
        record["ms"][f"{net}, {rows}, {work}, {name}"] = median(numbers) if numbers else (values or [None])[0]


def _compile(record: dict[str, Any], workers: dict[str, Worker], jobs: dict[str, Any], end: float) -> None:
    """Let several networks compile one case each, at once."""
    if time.monotonic() > end:
        return
    for net, (job,) in jobs.items():
        workers[net].send(**job, first=True)
    for net, (job,) in jobs.items():
        record["compiled"][f"{net}, {job['work']}, {job['rows']}"] = workers[net].answer(end)


class Worker:
    """A process that imports latedrop from a tree, and measures what it is asked for."""

    def __init__(self, tree: Path | None, small: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), self._folder.name)
        command = [sys.executable, "-m", "benchmarks.gpu_round", "--worker", "--out", "-", *["--small"] * small]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen(command, env=environment(tree) | caches, cwd=HERE, **pipes)

    def send(self, **job: Any) -> None:
        """Start some work."""
        if self._process.poll() is None:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def answer(self, end: float) -> Any:
        """Return what the work gave; a text where it failed or took too long, after which the process is gone."""
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()) + GRACE)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._process.kill()
        return json.loads(line) if line else "no time was left, or the process ended"

    def ask(self, end: float, **job: Any) -> Any:
        """Return what some work gives, if there is time for it."""
        if time.monotonic() > end:
            return "no time was left"
        self.send(**job)
        return self.answer(end)

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
        self.network = latedrop.Network(self.model) if hasattr(latedrop, "Network") else self.model
        self.predictors: dict[str, Any] = {}

    def inputs(self, rows: int) -> Any:
        """Return inputs of some rows on the device."""
        x = self.make(rows)
        if isinstance(x, dict):
            return {key: value.to(self.device) for key, value in x.items()}
        return x.to(self.device, self.dtype)

    def predictor(self, work: str, rows: int = VALIDATION) -> Any:
        """Return a calibration of first order alone, or the default."""
        if work not in self.predictors:
            x = self.inputs(rows)
            common: dict[str, Any] = {"sites": self.sites, "readout": self.readout}
            parts = [latedrop.linearize(self.network, part, **common) for part in split(x, 64)]
            mean, spread = (
                torch.cat([part.mean for part in parts]),
                torch.cat([p.variance(RATE) for p in parts]).sqrt(),
            )
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
            return {
                "seconds": wait,
                "bytes": peak,
                "auto_bytes": steps,
                "again_bytes": peak_bytes(run, self.device)[1],
            }
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
        yield mapped(x, partial(_cut, start, start + size))


def _cut(start: int, stop: int, tensor: Tensor) -> Tensor:
    return tensor[start:stop]


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

        size: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
        config: Any = BertConfig(**(size if small else {}))
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


def step_table(record: dict[str, Any]) -> str:
    """Return milliseconds step by step; those of an older version where it was measured."""
    ms, names = (
        record["ms"],
        [name for name in ("new", "old") if any(key.endswith(f", {name}") for key in record["ms"])],
    )
    heads = ["plain", "by hand", *(work if name == "new" else f"{work}, old" for work in WORK[2:] for name in names)]
    lines = [f"| network, rows | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for case in dict.fromkeys(", ".join(key.split(", ")[:2]) for key in ms):
        values = [ms.get(f"{case}, {what}") for what in ("plain, new", "by hand, new")]
        values += [ms.get(f"{case}, {work}, {name}") for work in WORK[2:] for name in names]
        lines.append(f"| {case} | " + " | ".join(_cell(value) for value in values) + " |")
    return "\n".join(lines)


def markdown(record: dict[str, Any]) -> str:
    """Return both tables."""
    lines = [step_table(record), "", f"calibrate, seconds: {record['calibrate']}", ""]
    lines += ["| compiled | first, s | ms | of plain | MB | MB of auto |", "| --- |" + " ---: |" * 5]
    for case, value in record["compiled"].items():
        value = value if isinstance(value, dict) else {"seconds": value}
        taken, plain = value.get("ms"), value.get("plain_ms")
        times = taken / plain if isinstance(taken, float) and isinstance(plain, float) else None
        sizes = [value[key] / 1e6 if key in value else None for key in ("bytes", "auto_bytes")]
        lines.append(f"| {case} | " + " | ".join(map(_cell, (value["seconds"], value.get("ms"), times, *sizes))) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value or "-")[:60]


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
