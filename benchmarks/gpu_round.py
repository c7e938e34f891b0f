"""One round over all that is measured on a GPU: ratios to plain passes, each with an interval, in eight minutes.

    python -m benchmarks.gpu_round                                # on the GPU where there is one; goes on where it was
    python -m benchmarks.gpu_round --only first_order sampling    # these parts
    python -m benchmarks.gpu_round --small --device cpu           # small networks, to try it out
    python -m benchmarks.gpu_round --out FILE --minutes 8         # no unit starts after so many minutes

Every unit is written to the JSON as soon as it is measured; what the JSON has from the same machine is left out, of any
version of latedrop: `--again` measures it anew. All candidates of a unit take turns in an order that changes from round
to round. A ratio is taken within each round; its interval is that of the median over the rounds, by order statistics,
at 90 % or wider. On a CPU the time is that of the process, which others on the machine disturb less than a clock.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import PARTS, Setting
from benchmarks.timing import QUICK, RESULTS, first_line, interval, machine

Runs = dict[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="All that is measured on a GPU, in one round.")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts only")
    parser.add_argument("--units", nargs="+", help="only units with one of these in their names, such as: unet")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--small", action="store_true", help="small networks, few rows")
    parser.add_argument("--rows", type=int, help="of a large network, at most; 4 on a CPU")
    parser.add_argument("--rounds", type=int, default=11, help="of each unit, at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each unit's rounds, about")
    parser.add_argument("--minutes", type=float, default=8.0, help="no unit starts after so many")
    parser.add_argument("--out", type=Path, help="the JSON; benchmarks/results/round_cpu.json or _gpu.json by default")
    parser.add_argument("--again", action="store_true", help="measure also what the JSON has")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    kind = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    path = options.out or RESULTS / f"round_{'gpu' if device.type == 'cuda' else 'cpu'}.json"
    torch.backends.cudnn.benchmark = True
    record: dict[str, Any] = {"machine": machine(device), "small": options.small, "units": {}}
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if known and not _same_machine(known, record):
        raise SystemExit(
            f"expected results of this machine and these sizes in {path}; found others. Pass another --out."
        )
    record["units"] = known.get("units", {})
    most = options.rows or (4 if device.type == "cpu" else 2**16)
    setting = Setting(device, options.small, most, Turns(options.rounds, options.seconds, device))
    for part in options.only or PARTS:
        for name, measure in PARTS[part](setting):
            left_out = options.units and not any(text in name for text in options.units)
            if left_out or (f"{part}, {name}" in record["units"] and not options.again):
                continue
            if time.perf_counter() - begin > 60 * options.minutes:
                print("no time is left; run it again to go on", file=sys.stderr)
                return
            record["units"][f"{part}, {name}"] = found = one(measure) | {"latedrop": record["machine"]["latedrop"]}
            save(path, record)
            print(f"{time.perf_counter() - begin:5.0f} s  {part}, {name}: {shown(found)}", flush=True)


def _same_machine(known: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether both are of one machine; every unit says by itself which version of latedrop it is of."""
    return known["small"] == record["small"] and all(
        known["machine"].get(key) == value for key, value in record["machine"].items() if key != "latedrop"
    )


def one(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, with the seconds that it took; or what went wrong."""
    start = time.perf_counter()
    try:
        found = measure()
    except Exception as error:
        found = {"error": first_line(error)}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found | {"took": round(time.perf_counter() - start, 1)}


class Turns:
    """Times candidates in turns.

    Args:
        rounds: at most; two where one takes longer than the time there is.
        seconds: that the rounds should take.
        device: is waited for.
    """

    def __init__(self, rounds: int, seconds: float, device: torch.device) -> None:
        self.rounds, self.seconds, self.device = rounds, seconds, device
        self._clock = time.perf_counter if device.type == "cuda" else time.process_time

    def __call__(self, runs: Runs, base: str) -> dict[str, Any]:
        """Median seconds of each candidate, its ratio to `base` with an interval, and why some failed."""
        failed: dict[str, str] = {}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for name, run in runs.items():
            try:
                run()
                run()
            except Exception as error:
                failed[name] = first_line(error)
        begin, done = time.perf_counter(), 0
        while done < 2 or self._another(done, time.perf_counter() - begin):
            for name, run in random.Random(done).sample(list(runs.items()), len(runs)):
                if name not in failed:
                    times[name].append(self._once(run))
            done += 1
        good = {name: found for name, found in times.items() if name not in failed}
        ratios = {}
        if base in good:
            ratios = {
                name: interval([a / b for a, b in zip(found, good[base], strict=True)]) for name, found in good.items()
            }
        seconds = {name: statistics.median(found) for name, found in good.items()}
        return {"seconds": seconds, "ratios": ratios, "base": base, "rounds": done, "failed": failed}

    def _another(self, done: int, taken: float) -> bool:
        """Whether there is a further round; of quick candidates there are up to ten times as many."""
        return taken < self.seconds and (done < self.rounds or (taken < 1 and done < 10 * self.rounds))

    def _once(self, run: Callable[[], Any]) -> float:
        """Seconds of a call; of a quick one the median of five, after one that is not timed."""
        taken = self._seconds(run)
        return taken if taken > QUICK else statistics.median(self._seconds(run) for _ in range(5))

    def _seconds(self, run: Callable[[], Any]) -> float:
        waits = self.device.type == "cuda"
        if waits:
            torch.cuda.synchronize(self.device)
        start = self._clock()
        run()
        if waits:
            torch.cuda.synchronize(self.device)
        return self._clock() - start


def shown(found: dict[str, Any]) -> str:
    """A unit in one line."""
    if "ratios" not in found:
        return json.dumps({key: value for key, value in found.items() if not isinstance(value, dict)})
    parts = [
        f"{name} {low:.2f}-{high:.2f}" for name, (low, _, high) in found["ratios"].items() if name != found["base"]
    ]
    return "; ".join([*parts, *(f"{name}: {why[:60]}" for name, why in found["failed"].items())])


def save(path: Path, record: dict[str, Any]) -> None:
    """Write the record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def markdown(record: dict[str, Any], part: str) -> Iterator[str]:
    """The lines of a table of one part: a row for each unit, the ratio of each candidate with its interval."""
    units = {k.removeprefix(f"{part}, "): v for k, v in record["units"].items() if k.startswith(f"{part}, ")}
    names = list(dict.fromkeys(name for unit in units.values() for name in unit.get("ratios", {})))
    base = next((unit["base"] for unit in units.values() if "base" in unit), "")
    columns = [name for name in names if name != base]
    yield "| network | " + f"{base} [ms] | " + " | ".join(columns) + " |"
    yield "| --- | ---: |" + " ---: |" * len(columns)
    for name, unit in units.items():
        if "seconds" not in unit or base not in unit["seconds"]:
            continue
        cells = [f"{1e3 * unit['seconds'][base]:.3g}"]
        for column in columns:
            ratio = unit["ratios"].get(column)
            digits = 3 if ratio is not None and ratio[1] < 0.1 else 2
            cells.append("-" if ratio is None else "{1:.{d}f} ({0:.{d}f} to {2:.{d}f})".format(*ratio, d=digits))
        yield f"| {name} | " + " | ".join(cells) + " |"


def first_order_table(record: dict[str, Any]) -> str:
    """Time beside a plain pass and memory beside a training step."""
    units = {k.removeprefix("first_order, "): v for k, v in record["units"].items() if k.startswith("first_order, ")}
    lines = [
        "| network, rows | sites | plain pass [ms] | first order | with leverage and guard | the same, compiled "
        "| memory / training step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, unit in units.items():
        cells = [str(unit["sites"]), f"{1e3 * unit['seconds']['plain']:.3g}"]
        for run in ("first order", "predict", "compiled"):
            found = unit["ratios"].get(run)
            cells.append("-" if found is None else f"{found[1]:.1f} ({found[0]:.1f} to {found[2]:.1f})")
        cells.append(f"{unit['bytes']['predict'] / unit['bytes']['training step']:.2f}")
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def one_row_table(record: dict[str, Any]) -> str:
    """Microseconds of one row of the tiny network; of a prediction also those that are not its passes."""
    units = {k.removeprefix("one_row, "): v["seconds"] for k, v in record["units"].items() if k.startswith("one_row, ")}
    lines = ["| call | time [us] | beside | time of that [us] | ratio | the rest [us] |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    for draws in ("10 draws", "50 draws"):
        found = units[draws]
        for way in [way for way in ("auto", "compiled") if way in found]:
            call = f"`sample`, {draws}" + (", compiled" if way == "compiled" else "")
            lines += [_beside(call, found[way], other, found[other]) for other in ("stacked loop", "copying the rows")]
    found = units["predict"]
    passes = {"50 draws": "one pass over 50 draws", "first order": "forward and backward", "default": "plain"}
    for way, other in passes.items():
        for asked in [asked for asked in (way, f"{way}, compiled") if asked in found]:
            rest = f"{1e6 * (found[asked] - found[other]):.0f}"
            lines.append(_beside(f"`predict`, {asked}", found[asked], other, found[other], rest))
    return "\n".join(lines)


def _beside(call: str, seconds: float, other: str, its: float, rest: str = "-") -> str:
    other = "one plain pass" if other == "plain" else other
    return f"| {call} | {1e6 * seconds:.0f} | {other} | {1e6 * its:.0f} | {seconds / its:.2f} | {rest} |"


def calibration_table(record: dict[str, Any]) -> str:
    """The default of `calibrate` as a whole, in a process that has done it before."""
    lines = ["| validation rows | plain passes of all rows [s] | calibrate [s] | calibrate / plain | memory [MB] |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for name, unit in record["units"].items():
        if not name.startswith("calibration, "):
            continue
        rows = name.removeprefix("calibration, ").replace("_", " ")
        rows = "ResNet-50, 1000 rows" if rows == "resnet50" else rows
        plain, whole = (unit["times"][way][-1] for way in ("plain", "calibrate"))
        size = f"{unit['bytes']['calibrate'] / 1e6:.0f}"
        lines.append(f"| {rows} | {plain:.2f} | {whole:.2f} | {whole / plain:.1f} | {size} |")
    return "\n".join(lines)


def sampling_table(record: dict[str, Any], part: str) -> str:
    """Candidates beside 50 plain passes."""
    return "\n".join(markdown(record, part)).replace("_", " ")


def first_prediction_table(records: dict[str, dict[str, Any]]) -> str:
    """Seconds to the first compiled prediction of a process, by the clock and of the processor."""
    lines = [
        "| network | on | first process [s] | later processes [s] | processor, later [s] |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for on, record in records.items():
        for name, unit in record["units"].items():
            if "later processes" in unit:
                net = name.rpartition(" ")[2].replace("_", " ")
                later = [
                    " to ".join(f"{s:.1f}" for s in sorted(t)) for t in (unit["later processes"], unit["busy"][1:])
                ]
                lines.append(f"| {net} | {on} | {unit['first process']:.0f} | {later[0]} | {later[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
