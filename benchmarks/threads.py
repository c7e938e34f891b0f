"""Predictions per second of one predictor that many threads share, against one thread.

    python -m benchmarks.threads                                                   # of the latedrop that is imported
    python -m benchmarks.threads --source ../before/src src --labels before after  # two versions, one after the other
    python -m benchmarks.threads --tables                                          # from the JSON alone

All threads start at one barrier and predict one row after the other for `--seconds`; one thread and many take turns. It
is done with torch on one thread, as a server that answers many requests would have it, and with as many as torch
takes by default. A ratio of 1 says that threads wait for each other: Python's interpreter lock alone gives that for a
tiny network, and gives way where torch's kernels are what takes the time. Answers are compared with that of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch

import latedrop
from benchmarks.nets import SpeedNet, speed_nets
from benchmarks.timing import RESULTS, first_line, machine, write
from benchmarks.trees import answer_of, digest

NETS = ("uci_mlp", "residual_cnn")
RATE = 0.05
THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="One predictor under many threads.")
    parser.add_argument(
        "--source", type=Path, nargs="+", help="folders that hold latedrop/; the imported one by default"
    )
    parser.add_argument("--labels", nargs="+", help="a name for each of them; a digest of the source by default")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=[net.name for net in speed_nets("cpu")])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--engine", default="auto", help="of the predictor")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--out", help="name of the JSON in benchmarks/results; threads_cpu or threads_gpu by default")
    parser.add_argument("--tables", action="store_true", help="from the JSON that is there; measure nothing")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        warnings.simplefilter("ignore")
        print(json.dumps(measured(options)))
        return
    if options.tables:
        names = [options.out] if options.out else sorted(path.stem for path in RESULTS.glob("threads_*.json"))
        for name in names:
            print(markdown(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))))
        return
    sources = options.source or [None]
    if options.labels and len(options.labels) != len(sources):
        parser.error(f"expected a label for each of {len(sources)} sources; found {len(options.labels)}")
    passed = ["--measure", "--nets", *options.nets]
    for name in ("device", "threads", "draws", "engine", "seconds", "repeats"):
        passed += [f"--{name}", str(getattr(options, name))]
    found = [answer_of("benchmarks.threads", passed, source) for source in sources]
    labels = options.labels or [each["machine"]["source"] for each in found]
    record = {
        "threads": options.threads,
        "draws": options.draws,
        "engine": options.engine,
        "sources": [{"label": label, **each} for label, each in zip(labels, found, strict=True)],
    }
    kind = found[0]["kind"]
    write(options.out or f"threads_{kind}", record)
    print(markdown(record))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All networks, in the version of latedrop that is imported."""
    name = options.device
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    kind = "gpu" if device.type == "cuda" else "cpu"
    about = machine(device) | {"source": digest(), "cores": os.cpu_count()}
    nets = {net.name: net for net in speed_nets(kind)}
    default = torch.get_num_threads()
    found: dict[str, Any] = {}
    for net in options.nets:
        found[net] = {}
        for torch_threads in sorted({1, default}):
            torch.set_num_threads(torch_threads)
            predict = predictor_of(nets[net], device, options.draws, options.engine)
            found[net][str(torch_threads)] = compared(predict, options.threads, options.seconds, options.repeats)
    return {"machine": about, "kind": kind, "nets": found}


def predictor_of(net: SpeedNet, device: torch.device, draws: int, engine: str) -> Callable[[], latedrop.Prediction]:
    """What predicts one row with a calibrated network."""
    model = net.made(device)
    options: dict[str, Any] = {"method": latedrop.Sampling(rates=[RATE], draws=draws), "progress": False}
    if engine != "auto":
        options["engine"] = engine
    predictor = latedrop.calibrate(model, net.data(16, device, seed=1), **options)
    x, _ = net.data(1, device)
    return lambda: predictor.predict(x)


def compared(predict: Callable[[], latedrop.Prediction], threads: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Predictions per second of one thread and of many, in turns; medians."""
    expected = predict()

    def right() -> bool:
        found = predict()
        return torch.allclose(found.mean, expected.mean) and torch.allclose(
            found.variance, expected.variance, rtol=1e-3, atol=0
        )

    rates: dict[int, list[float]] = {1: [], threads: []}
    wrong, failed = 0, []
    for turn in range(repeats):
        for count in sorted(rates, reverse=bool(turn % 2)):
            done, taken, bad, errors = throughput(right, count, seconds)
            rates[count].append(done / taken)
            wrong, failed = wrong + bad, failed + errors
    one, many = (statistics.median(rates[count]) for count in (1, threads))
    return {"one": one, "many": many, "ratio": many / one, "wrong": wrong, "failed": len(failed), "errors": failed[:1]}


def throughput(work: Callable[[], bool], threads: int, seconds: float) -> tuple[int, float, int, list[str]]:
    """How often `work` ended in all threads together, in how many seconds; how often it was false; what it raised."""
    start = Barrier(threads + 1)
    stop = False

    def loop() -> tuple[int, int, list[str]]:
        done, bad, errors = 0, 0, []
        start.wait()
        while not stop:
            try:
                bad += not work()
                done += 1
            except Exception as error:
                errors.append(first_line(error))
        return done, bad, errors

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(loop) for _ in range(threads)]
        start.wait()
        begin = time.perf_counter()
        time.sleep(seconds)
        stop = True
        found = [future.result() for future in futures]
    taken = time.perf_counter() - begin
    return sum(f[0] for f in found), taken, sum(f[1] for f in found), [error for f in found for error in f[2]]


def markdown(record: dict[str, Any]) -> str:
    """A row for each network, number of torch's threads, and version."""
    many = record["threads"]
    lines = [
        f"| network | version | torch's threads | 1 thread [1/s] | {many} threads [1/s] | ratio | wrong | failed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for net in record["sources"][0]["nets"]:
        for source in record["sources"]:
            lines += [
                f"| {net.replace('_', ' ')} | {source['label']} | {torch_threads} | {row['one']:.4g} | "
                f"{row['many']:.4g} | {row['ratio']:.2f} | {row['wrong']} | {row['failed']} |"
                for torch_threads, row in source["nets"][net].items()
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
