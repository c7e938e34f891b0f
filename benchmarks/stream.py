"""Streams: which way to follow errors, what the library's holds, how soon alarms come. `python -m benchmarks.stream`

    python -m benchmarks.stream              # measure; JSON to benchmarks/results, a quarter of an hour
    python -m benchmarks.stream --part crowd # one part again: methods, delays, crowd, shift or alarms
    python -m benchmarks.stream --figures    # draw docs/images/stream_*.png from the JSON alone

Series of counts are those of `python -m studies crowd` (studies/results/crowd), a label every tenth or every 25th
frame; all frames are judged. Numbers are means over the frame with which labels begin. The interval score of Winkler
(1972) is the width and, for a miss, 2 / (1 - level) times its distance: less is better.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from benchmarks.stream_alarms import alarms
from benchmarks.stream_data import DRIFTS, SETS, Given, Series, crowd, drift
from benchmarks.stream_figure import figures
from benchmarks.stream_methods import METHODS, Issued, Method, Scaled
from benchmarks.stream_shift import shifted
from benchmarks.timing import RESULTS, machine
from latedrop.files import write_aside
from latedrop.streams import Stream
from latedrop.streams.tracking import Tracker

LEVEL = 0.9
EVERY = (10, 25)
PHASES = 5
OUT = RESULTS / "stream.json"
PARTS = ("methods", "delays", "crowd", "shift", "alarms")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Streams: coverage, width, and detection delay.")
    parser.add_argument("--part", choices=PARTS, help="measure this part alone")
    parser.add_argument("--figures", action="store_true", help="draw from the JSON that is there; measure nothing")
    parser.add_argument("--seeds", type=int, default=3, help="networks for each UCI set and side")
    options = parser.parse_args(arguments)
    if not options.figures:
        work = {
            "methods": methods,
            "delays": delays,
            "crowd": streams,
            "shift": shifted,
            "alarms": lambda: alarms(options.seeds),
        }
        record = json.loads(OUT.read_text(encoding="utf-8")) if options.part else {}
        record |= {part: work[part]() for part in ([options.part] if options.part else PARTS)}
        record["machine"] = machine(torch.device("cpu"))
        write_aside(OUT, (json.dumps(record, separators=(",", ":")) + "\n").encode())
    for path in figures(json.loads(OUT.read_text(encoding="utf-8"))):
        print(path)


def judged(series: Series, centre: np.ndarray, half: np.ndarray) -> dict[str, float]:
    """What intervals hold, how wide they are, and their score."""
    beyond = np.abs(series.truth - centre) - half
    return {
        "held": float((beyond <= 0).mean()),
        "width": float(2 * half.mean()),
        "score": float((2 * half + 2 / (1 - LEVEL) * np.maximum(beyond, 0)).mean()),
        "mae": float(np.abs(series.truth - centre).mean()),
    }


def followed(series: Series, method: Method, corrected: bool, labelled: list[int], late: int = 0) -> dict[str, float]:
    """One method on a series; labels come so many labels late."""
    tracker = Tracker(LEVEL, 1)  # for its bias alone
    centre, half, queue = np.zeros(len(series.mean)), np.zeros(len(series.mean)), []
    wanted = set(labelled)
    for i in range(len(series.mean)):
        bias = float(tracker.bias[0]) if corrected else 0.0
        centre[i], half[i] = series.mean[i] + bias, method.half() * series.std[i]
        if i in wanted:
            queue.append((i, method.half()))
        while len(queue) > late:
            at, given = queue.pop(0)
            now = float(tracker.bias[0]) if corrected else 0.0
            method.learn(abs(series.truth[at] - series.mean[at] - now) / series.std[at], given)
            tracker.learn(series.mean[at : at + 1], series.std[at : at + 1], series.truth[at : at + 1])
    return judged(series, centre, half)


def methods() -> dict[str, Any]:
    """Every method, with and without the running bias, on counts and on synthetic drifts."""
    runs: dict[str, list[tuple[Series, list[int]]]] = {}
    for name in SETS:
        series = crowd(name)
        for every in EVERY:
            runs[f"{name} {every}"] = [(series, phase(len(series.mean), every, k)) for k in range(PHASES)]
    for kind in DRIFTS:
        runs[kind] = [(series := drift(kind, seed), list(range(len(series.mean)))) for seed in range(PHASES)]
    return {
        f"{name}{', running bias' if corrected else ''}": {
            column: averaged([followed(series, make(LEVEL), corrected, labelled) for series, labelled in each])
            for column, each in runs.items()
        }
        for corrected in (False, True)
        for name, make in METHODS.items()
    }


def delays() -> dict[str, Any]:
    """The library's way, and one that learns from the interval given, when labels come late."""
    return {
        name: {
            f"{kind} {late}": averaged(
                [
                    followed(drift(kind, seed, 1500), make(LEVEL), True, list(range(1500)), late)
                    for seed in range(PHASES)
                ]
            )
            for kind in ("steady", "step", "walk")
            for late in (0, 20, 100)
        }
        for name, make in (("would the interval of now hold it", Scaled), ("did the interval given hold it", Issued))
    }


def streams() -> dict[str, Any]:
    """The library's streams on counts, and the run of median coverage for the figures."""
    found: dict[str, Any] = {}
    for name in SETS:
        series = crowd(name)
        own = judged(series, series.mean, 1.6448536269514722 * series.std)
        found[name] = {"own": own, "truth": series.truth.tolist(), "every": {}}
        for every in EVERY:
            regular = [streamed(series, phase(len(series.mean), every, k)) for k in range(PHASES)]
            chance = [streamed(series, by_chance(len(series.mean), every, seed)) for seed in range(PHASES)]
            found[name]["every"][str(every)] = {
                "regular": averaged([run["measures"] for run in regular]),
                "phases": [run["measures"]["held"] for run in regular],
                "chance": averaged([run["measures"] for run in chance]),
                "shown": sorted(regular, key=lambda run: run["measures"]["held"])[PHASES // 2],
            }
    return found


def streamed(series: Series, labelled: list[int]) -> dict[str, Any]:
    """A stream over a series, row by row."""
    stream, wanted = Stream(level=LEVEL, usual=series.usual), set(labelled)
    centre, half, capital, held = [], [], [], []
    for i in range(len(series.mean)):
        found = stream.follow(Given.of(series, [i]))
        centre.append(float(found.mean))
        half.append(float(found.high - found.low) / 2)
        if i in wanted:
            held.append(bool(stream.update(series.truth[i])))
        capital.append(stream.evidence["errors"])
    measures = judged(series, np.array(centre), np.array(half)) | {"held_labelled": float(np.mean(held))}
    alarm = next((int(a.row) for a in stream.alarms), None)
    rounded = {"centre": centre, "half": half, "log_capital": np.log10(np.maximum(capital, 1e-12)).tolist()}
    shown = {name: [round(value, 3) for value in values] for name, values in rounded.items()}
    return {"measures": measures, "labels": labelled, "alarm": alarm, **shown}


def phase(count: int, every: int, k: int) -> list[int]:
    """The frames with labels: each of some, beginning at one of the first."""
    return list(range(round((k + 1) * every / PHASES) - 1, count, every))


def by_chance(count: int, every: int, seed: int) -> list[int]:
    """As many, by chance."""
    return sorted(np.random.default_rng(seed).permutation(count)[: count // every].tolist())


def averaged(found: list[dict[str, float]]) -> dict[str, float]:
    """Means of each measure."""
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


if __name__ == "__main__":
    main()
