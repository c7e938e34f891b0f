"""Two versions of latedrop side by side: the same networks and draws, in one run, in turns.

    python -m benchmarks.versions --old ../before/src --new src                     # all networks, 1 row and many
    python -m benchmarks.versions --old ../before/src --new src --nets mcnn --engine-old vmap
    python -m benchmarks.versions --tables                                          # from the JSON alone

Each version has a process of its own that holds the network. Both are asked for one call at a time, in an order that
changes with each round, so that a noisy machine disturbs both alike; a quick call is repeated, and runs once before it
is timed. The third candidate is what a few lines can do, as a reference: *copying the rows*, at the number of draws at
once that suits it best. Memory is the peak of what a call allocates. A candidate that has taken `--cap` seconds on one
network and batch gets no further round. Standard deviations stand beside the times, as a wrong answer can be quick.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from benchmarks.nets import SpeedNet, speed_nets
from benchmarks.timing import QUICK, RESULTS, first_line, machine, peak_bytes, seconds_of
from benchmarks.trees import HERE, digest, environment
from latedrop import Site, find_sites, sample

RATE = 0.05
LABELS = {"old": "old", "new": "new", "copies": "copying the rows"}
AT_ONCE = (1, 2, 5, 10, 25, 50, 100, 200)
"""Draws that copying the rows may run at once."""
LONGEST = 20
"""Calls of one request, at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Two versions of latedrop side by side.")
    parser.add_argument("--old", type=Path, help="source folder of one version: the folder that holds latedrop/")
    parser.add_argument("--new", type=Path, help="source folder of the other one")
    parser.add_argument("--nets", nargs="+", choices=[net.name for net in speed_nets("cpu")], help="these only")
    parser.add_argument("--batch", nargs="+", default=["small", "large"], choices=["small", "large"])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="of each process, on a CPU")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--engine-old", default="auto", help="of sample, in the old version")
    parser.add_argument("--engine-new", default="auto", help="of sample, in the new version")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, at most")
    parser.add_argument("--cap", type=float, default=10, help="seconds of one candidate on one network and batch")
    parser.add_argument(
        "--out", type=Path, help="the JSON; benchmarks/results/versions_cpu.json or _gpu.json by default"
    )
    parser.add_argument("--tables", action="store_true", help="from the JSON that is there; measure nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answer_requests(sys.stdin)
        return
    if options.tables:
        for path in [options.out] if options.out else sorted(RESULTS.glob("versions_*.json")):
            print(markdown(json.loads(path.read_text(encoding="utf-8"))))
        return
    if options.old is None or options.new is None:
        parser.error("expected --old and --new, the source folders of two versions")
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = "gpu" if torch.device(device).type == "cuda" else "cpu"
    path = options.out or RESULTS / f"versions_{kind}.json"
    trees = {"old": options.old, "new": options.new}
    engines = {"old": options.engine_old, "new": options.engine_new}
    record: dict[str, Any] = {"kind": kind, "rate": RATE, "draws": options.draws, "engines": engines, "nets": {}}
    for net in [net for net in speed_nets(kind) if not options.nets or net.name in options.nets]:
        for batch in [batch for batch in net.batches if batch in options.batch]:
            workers = {name: Worker(tree, 6 * options.cap + 120) for name, tree in trees.items()}
            try:
                setup = {"net": net.name, "kind": kind, "batch": batch, "device": device, "draws": options.draws}
                setup |= {"threads": options.threads, "cap": options.cap}
                found = measure(workers, setup, engines, options.repeats, options.cap)
            finally:
                for worker in workers.values():
                    worker.close()
            record["nets"].setdefault(net.name, {})[batch] = found
            save(path, record)
            print(f"{net.name}, {batch}: {found['minutes']} min", file=sys.stderr, flush=True)
    print(markdown(record))


def measure(
    workers: dict[str, Worker], setup: dict[str, Any], engines: dict[str, str], repeats: int, cap: float
) -> dict[str, Any]:
    """Everything about one network and batch; `workers` has a process for each version."""
    begin = time.perf_counter()
    answers = {name: worker.ask(do="prepare", **setup, engine=engines[name]) for name, worker in workers.items()}
    asked = {name: (worker, "sample") for name, worker in workers.items()} | {"copies": (workers["new"], "copies")}
    found: dict[str, dict[str, Any]] = {}
    for name, (worker, candidate) in asked.items():
        error = answers["new" if name == "copies" else name].get("error")
        found[name] = {"error": error} if error else worker.ask(do="first", candidate=candidate)
    times: dict[str, list[float]] = {name: [] for name in asked}
    spent = {name: entry.pop("spent", cap) for name, entry in found.items()}
    for turn in range(repeats):
        for name in random.Random(turn).sample(list(asked), len(asked)):
            entry, (worker, candidate) = found[name], asked[name]
            expected = entry.get("first_seconds", cap)
            if "error" in entry or spent[name] + expected > cap:
                continue
            answer = worker.ask(do="time", candidate=candidate, expected=expected)
            if "error" in answer:
                entry["error"] = answer["error"]
            else:
                times[name].append(answer["seconds"])
                spent[name] += answer["spent"]
    for name, entry in found.items():
        first = entry.pop("first_seconds", None)
        if "error" not in entry:
            entry |= {"seconds": statistics.median(times[name]) if times[name] else first, "rounds": len(times[name])}
    return {
        "machine": {name: answer.get("machine") for name, answer in answers.items()},
        "rows": answers["new"].get("rows") or answers["old"].get("rows"),
        "candidates": found,
        "minutes": round((time.perf_counter() - begin) / 60, 2),
    }


class Worker:
    """A process with one version of latedrop in it, which answers one request at a time.

    Args:
        tree: the source folder of the version.
        patience: seconds after which a request counts as failed and the process is ended.
    """

    def __init__(self, tree: Path, patience: float) -> None:
        self.patience = patience
        command = [sys.executable, "-m", "benchmarks.versions", "--worker"]
        variables = environment(tree)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=variables, cwd=HERE, stdin=pipe, stdout=pipe, text=True)
        self._answers: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request; with `error` where it failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self.patience)
        except BrokenPipeError:
            line = ""
        except queue.Empty:
            self._process.kill()
            return {"error": f"no answer within {self.patience:.0f} s"}
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put("")


def answer_requests(requests: IO[str]) -> None:
    """What a worker does: one line of JSON for each line that it reads."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    bench: Bench | None = None
    for line in requests:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "prepare":
                bench = Bench(**request)
                answer = bench.about()
            else:
                assert bench is not None
                answer = bench.first(**request) if do == "first" else bench.time(**request)
        except Exception as error:
            answer = {"error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Bench:
    """One network, its rows and the two candidates of a process."""

    def __init__(
        self, net: str, kind: str, batch: str, device: str, draws: int, threads: int, cap: float, engine: str
    ) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        made: SpeedNet = next(each for each in speed_nets(kind) if each.name == net)
        self.model = made.made(self.device)
        self.x, _ = made.data(made.batches[batch], self.device)
        self.sites = find_sites(self.model, self.x[:3])
        self.draws, self.cap = draws, cap
        self.warm_up = engine == "compiled" or self.device.type == "cuda"
        self.options = {} if engine == "auto" else {"engine": engine}
        self.chunk = 0

    def about(self) -> dict[str, Any]:
        return {"rows": len(self.x), "machine": machine(self.device) | {"source": digest()}}

    def run(self, candidate: str) -> tuple[Tensor, Tensor]:
        """Mean and variance by one of the candidates."""
        if candidate == "copies":
            return copying_rows(self.model, self.x, self.sites, RATE, self.draws, self.chunk)
        moments = sample(self.model, self.x, RATE, self.draws, sites=self.sites, **self.options)
        return moments.mean, moments.variance

    def first(self, candidate: str) -> dict[str, Any]:
        """Memory, spread and a first time; where kernels are made on the way, after a call that makes them."""
        start = time.perf_counter()
        answer: dict[str, Any] = {}
        if candidate == "copies":
            self.chunk = answer["at_once"] = best_chunk(self._seconds_at_once, self.draws, self.cap / 3)
        if self.warm_up:
            self.run(candidate)
        warm = time.perf_counter()
        (_, variance), size = peak_bytes(lambda: self.run(candidate), self.device)
        end = time.perf_counter()
        answer |= {"bytes": size, "std": float(f"{float(variance.sqrt().mean()):.6g}")}
        return answer | {"first_seconds": end - warm, "spent": end - (warm if self.warm_up else start)}

    def time(self, candidate: str, expected: float) -> dict[str, Any]:
        """Median seconds of one call, or of several quick ones."""
        start = time.perf_counter()
        count = 1
        if expected < 10 * QUICK:  # also where it seems slow only because a profiler ran along
            self.run(candidate)
            quick = seconds_of(lambda: self.run(candidate), self.device)
            count = min(LONGEST, 1 + int(10 * QUICK / quick))
        taken = [seconds_of(lambda: self.run(candidate), self.device) for _ in range(count)]
        return {"seconds": statistics.median(taken), "spent": time.perf_counter() - start}

    def _seconds_at_once(self, chunk: int) -> float:
        """Seconds per draw; the least of several calls, where one is quick."""

        def run() -> Any:
            return copying_rows(self.model, self.x, self.sites, RATE, chunk, chunk)

        if self.warm_up or chunk == 1:
            run()
        taken = seconds_of(run, self.device)
        again = 4 if taken < 10 * QUICK else 0
        return min([taken, *(seconds_of(run, self.device) for _ in range(again))]) / chunk


def copying_rows(
    model: nn.Module, x: Tensor, sites: Sequence[Site], rate: float, draws: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance over draws that are rows of one batch: the least code that does it, masks of torch's generator.

    With `t` draws at once the model sees `t · N` rows, and the input of each site, as `(t, N, ...)`, is multiplied by
    masks `(t, 1, ...)`. The examples must lie along the first axis everywhere.
    """
    now = 0

    def thin(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h = args[0].unflatten(0, (now, -1))
        kept = torch.rand(now, 1, *h.shape[2:], device=h.device) >= rate
        mask = kept.to(h.dtype).div_(1 - rate)
        return (h * mask).flatten(0, 1), *args[1:]

    layers = dict(model.named_modules())
    handles = [layers[site.name].register_forward_pre_hook(thin) for site in sites]
    outputs = []
    try:
        with torch.no_grad():
            for start in range(0, draws, chunk):
                now = min(chunk, draws - start)
                outputs.append(model(x.repeat(now, *(1,) * (x.dim() - 1))).unflatten(0, (now, -1)))
    finally:
        for handle in handles:
            handle.remove()
    joined = torch.cat(outputs)
    return joined.mean(0), joined.var(0, correction=min(1, draws - 1))


def best_chunk(seconds: Callable[[int], float], draws: int, budget: float) -> int:
    """How many draws at once take the least time per draw.

    No larger number is tried after two in a row that were slower, nor where it would take longer than `budget`.

    >>> best_chunk({1: 1.0, 2: 0.6, 5: 0.5, 10: 0.9}.__getitem__, 10, budget=100)
    5
    """
    best, least, spent, slower = 1, float("inf"), 0.0, 0
    for chunk in sorted({*(size for size in AT_ONCE if size < draws), draws}):
        if chunk > 1 and spent + chunk * least > budget:
            break
        try:
            each = seconds(chunk)
        except (RuntimeError, MemoryError):
            if chunk == 1:
                raise
            break
        spent += chunk * each
        slower = 0 if each < least else slower + 1
        if each < least:
            best, least = chunk, each
        if slower == 2:
            break
    return best


def markdown(record: dict[str, Any]) -> str:
    """A row for each network and batch."""
    names = list(LABELS)
    head = [f"{LABELS[name]} [ms]" for name in names] + ["old / new", "copying / new"]
    head += [f"{LABELS[name]} [MiB]" for name in names] + ["std new / old"]
    lines = ["| network | rows | " + " | ".join(head) + " |", "| --- | ---: |" + " ---: |" * len(head)]
    for net, by_batch in record["nets"].items():
        for entry in by_batch.values():
            found = entry["candidates"]
            cells = [_number(found[name].get("seconds"), 1e-3) for name in names]
            cells += [_ratio(found, "old", "new", "seconds"), _ratio(found, "copies", "new", "seconds")]
            cells += [_number(found[name].get("bytes"), 2**20) for name in names]
            cells += [_ratio(found, "new", "old", "std")]
            lines.append(f"| {net.replace('_', ' ')} | {entry['rows']} | " + " | ".join(cells) + " |")
    failed = [
        f"{net.replace('_', ' ')}, {entry['rows']} rows, {LABELS[name]}: {candidate['error']}"
        for net, by_batch in record["nets"].items()
        for entry in by_batch.values()
        for name, candidate in entry["candidates"].items()
        if "error" in candidate
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def save(path: Path, record: dict[str, Any]) -> None:
    """Write the record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def _number(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3g}"


def _ratio(found: dict[str, dict[str, Any]], top: str, bottom: str, key: str) -> str:
    a, b = found[top].get(key), found[bottom].get(key)
    return f"{a / b:.2f}" if a is not None and b else "-"


if __name__ == "__main__":
    main()
