"""Seconds per call, measured in turns so that a noisy machine disturbs all candidates alike."""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

import latedrop
from latedrop.files import write_aside
from studies.pages import order_interval, table

Result = TypeVar("Result")

RESULTS = Path(__file__).parent / "results"
QUICK = 0.02  # seconds


def turns_within(
    candidates: dict[str, Callable[[], Any]], *, repeats: int, seconds: float, device: torch.device
) -> tuple[dict[str, list[float]], int, dict[str, str]]:
    """Time all candidates in as many rounds as start within `seconds`; in more where all is quick.

    Each round has an order of its own, and what is quick runs once before it is timed: else it would pay for what the
    one before it has left in the caches. Returns the seconds of every round, the number of rounds, and what stopped
    those that did not get through.
    """
    times, failed = {name: [] for name in candidates}, {}
    begin, rounds = time.perf_counter(), 0
    while rounds == 0 or _another(rounds, time.perf_counter() - begin, repeats, seconds):
        for name, run in random.Random(rounds).sample(list(candidates.items()), len(candidates)):
            if name in failed:
                continue
            try:
                if times[name] and times[name][-1] < QUICK:
                    run()
                times[name].append(seconds_of(run, device))
            except Exception as error:
                failed[name] = first_line(error)  # the error itself would keep tensors alive
        rounds += 1
    return {name: times[name] for name in candidates if name not in failed}, rounds, failed


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in times.items()}


def interval(values: list[float]) -> list[float]:
    """Lower end, median and upper end: order statistics that hold the true median at 90 %, if there are enough.

    >>> interval([3.0, 1.0, 2.0])
    [1.0, 2.0, 3.0]
    """
    low, high = order_interval(values) or (min(values), max(values))
    return [low, statistics.median(values), high]


def first_line(error: BaseException) -> str:
    """The first line of what went wrong first, and its type."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    return timed(run, device)[1]


def timed(run: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Return what `run` returns, and the seconds that it took."""
    _wait(device)
    start = time.perf_counter()
    result = run()
    _wait(device)
    return result, time.perf_counter() - start


def peak_bytes(run: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Return what `run` returns, and the most bytes of tensors that lived at once and were not there before.

    On CUDA the allocator keeps count. On a CPU the allocator's calls are recorded by torch's profiler and added up in
    their order. That is the same quantity, exact and the same in every run, which the resident memory of a process is
    not: it keeps what was freed. What libraries such as oneDNN take for themselves is in neither.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to the terminal otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = run()
    recorded = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in recorded if event.name() == "[memory]"]
    live = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        most = max(most, live)
    return result, most


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    versions = {"torch": torch.__version__, "latedrop": latedrop.__version__}
    return {"device": name, "python": platform.python_version(), **versions}


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """Return a Markdown table; the first `words` columns are text, the others numbers."""
    return "\n".join(table(head, rows, words))


def write(name: str, record: dict[str, Any]) -> None:
    """Write one result as JSON, whole or not at all."""
    write_aside(RESULTS / f"{name}.json", json.dumps(record, separators=(",", ":")) + "\n")


def by_seeds(name: str, measured: Callable[[int], dict[str, Any]], seeds: int) -> None:
    """Measure on one thread for `seeds`, unless the command line names another number, and write the result."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}")
    parser.add_argument("--seeds", type=int, default=seeds)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    record = {"machine": machine(torch.device("cpu")), "seeds": options.seeds, **measured(options.seeds)}
    write(name, record | {"cpu_seconds": round(time.process_time() - start)})


def by_sets(name: str, measured: Callable[[str, int], Any], sets: Iterable[str], seeds: int, **settings: Any) -> None:
    """Measure every set with every seed, as `by_seeds` does; `settings` stand beside the results."""

    def record(count: int) -> dict[str, Any]:
        return settings | {"sets": {each: [measured(each, seed) for seed in range(count)] for each in sets}}

    by_seeds(name, record, seeds)


def by_parts(name: str, parts: Mapping[str, Callable[[], Any]], inside: str | None = None) -> dict[str, Any]:
    """Measure on one thread the parts that the command line names, write each, and return the whole record.

    Parts stand at the top of the record, or under a name inside.
    """
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="the others stay as they are")
    torch.set_num_threads(1)
    record = stored(name)
    for part in parser.parse_args().parts:
        record["machine"] = machine(torch.device("cpu"))
        (record if inside is None else record.setdefault(inside, {}))[part] = parts[part]()
        write(name, record)
        print(f"{part}: measured", flush=True)
    return record


def stored(name: str) -> dict[str, Any]:
    """Read a result; an empty record where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _another(rounds: int, taken: float, repeats: int, seconds: float) -> bool:
    quick = taken < min(1.0, seconds) and rounds < 10 * repeats
    return quick or (rounds < repeats and taken < seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
