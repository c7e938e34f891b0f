"""The default of `calibrate` on tables of up to ten million rows: time beside plain passes, and memory.

    python -m benchmarks.long_table                        # 1e5 to 1e7 rows of 13 numbers through a tiny network
    python -m benchmarks.long_table --rows 100000 300000   # these, and writes nothing

The rows are made batch by batch as they are read, so that no table lies in memory. Each way runs in a process of its
own, on one thread: reading alone, plain passes of the network over all rows, the calibration. CPU seconds are of that
work alone; memory is the most that the process held beyond what it held when it began.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import machine, write

ROWS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
BATCH = 8192
WAYS = ("reading", "plain passes", "calibrate")
HERE = Path(__file__).parents[1]
PROCESS = """
import json, re, sys, time, warnings
import torch
from torch import nn
import latedrop
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
way, rows, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
net = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1)).eval().requires_grad_(False)

class Table:
    row_total = rows
    def __iter__(self):
        dice = torch.Generator().manual_seed(1)
        for start in range(0, rows, batch):
            x = torch.randn(min(batch, rows - start), 13, generator=dice)
            noise = torch.randn(len(x), 1, generator=dice)
            yield x, x[:, :1] + (0.1 + 0.3 * x[:, 1:2].abs()) * noise

def held():
    status = open("/proc/self/status").read()
    return {name: int(re.search(name + r":\\s+(\\d+)", status)[1]) / 1024 for name in ("VmHWM", "VmRSS")}

latedrop.calibrate(net, next(iter(Table())), progress=False)  # imports what is imported at first use
before, start = held()["VmRSS"], time.process_time()
if way == "calibrate":
    uq = latedrop.calibrate(net, Table(), progress=False)
    used = uq.calibration.rows
else:
    used = 0
    with torch.no_grad():
        for x, y in Table():
            used += len(net(x) if way == "plain passes" else x)
print(json.dumps({"cpu_seconds": time.process_time() - start, "megabytes": held()["VmHWM"] - before, "rows": used}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="The default of calibrate on long tables.")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"machine": machine(torch.device("cpu")), "batch": BATCH, "tables": {}}
    for rows in options.rows:
        record["tables"][str(rows)] = {way: measured(way, rows) for way in WAYS}
        print(rows, record["tables"][str(rows)], file=sys.stderr)
        if options.rows == list(ROWS):
            write("long_table", record)
    print(markdown(record))


def measured(way: str, rows: int) -> dict[str, float]:
    """CPU seconds, megabytes and rows of a way."""
    command = [sys.executable, "-c", PROCESS, way, str(rows), str(BATCH)]
    done = subprocess.run(
        command, cwd=HERE, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(record: dict[str, Any]) -> str:
    """A row for each length; times without reading."""
    lines = [
        "| rows | reading [CPU s] | plain passes [CPU s] | calibrate [CPU s] | calibrate / plain passes | rows used | "
        "calibrate, memory [MB] |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rows, ways in record["tables"].items():
        reading, plain, ours = (ways[way]["cpu_seconds"] for way in WAYS)
        plain, ours = plain - reading, ours - reading
        cells = [f"{int(rows):,}", f"{reading:.2f}", f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.1f}"]
        cells += [f"{ways['calibrate']['rows']:,}", f"{ways['calibrate']['megabytes']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
