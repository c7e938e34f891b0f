"""`latedrop predict` on a csv file larger than one likes to wait for, against a plain pass of the same network.

    python -m benchmarks.large_file                    # 15 million rows of 13 columns, 1.9 GB, in the temporary folder
    python -m benchmarks.large_file --rows 300000      # fewer, and writes nothing

Every way runs in a process of its own, on one thread, over the same file: CPU seconds (its start included) and the most
memory that it held. The plain pass reads with the same reader, runs the network without gradients on as many rows at
once, and writes its output with the same writer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import latedrop
from benchmarks.timing import machine, write
from latedrop.cli.writing import write_rows

CODE = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
"""
PLAIN = """
import sys
import torch
from latedrop.cli.tables import choose, open_table, read_batches
from latedrop.cli.writing import write_rows
from tiny import net
data, out, size = sys.argv[1:]
table = open_table(data)
with torch.no_grad(), write_rows(out) as append:
    for rows in read_batches(table, choose(table, ignored=["id"], kept=["id"]), int(size)):
        append({**rows.kept, "mean": net(torch.from_numpy(rows.inputs).float())[:, 0].numpy()})
"""
COMMAND = "from latedrop.cli import main; main()"
# A small process between: what a process held at most counts what it was forked from.
WATCH = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps({"cpu_seconds": cpu, "seconds": time.perf_counter() - start, "megabytes": usage.ru_maxrss / 1024}))
sys.exit(os.waitstatus_to_exitcode(status))
"""
NAMES = [f"x{i}" for i in range(13)]
AT_ONCE = 8192
PART = 20


def main() -> None:
    parser = argparse.ArgumentParser(description="latedrop predict on a large csv file.")
    parser.add_argument("--rows", type=int, default=15_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = measured(Path(folder), options.rows)
    print(json.dumps(record, indent=1))
    if options.rows == parser.get_default("rows"):
        print(write("large_file", record))


def measured(folder: Path, rows: int) -> dict[str, Any]:
    calibrated(folder)
    made(folder / "all.csv", rows)
    made(folder / "part.csv", rows // PART)
    predict = ["predict", "tiny:net", "cal.json", "--keep", "id", "--untrained", "-o", "out.csv", "--data"]
    ways = {
        "plain pass": (rows, ["-c", PLAIN, "all.csv", "plain.csv", str(AT_ONCE)]),
        "latedrop predict": (rows, ["-c", COMMAND, *predict, "all.csv"]),
        "latedrop predict, a part of the file": (rows // PART, ["-c", COMMAND, *predict, "part.csv"]),
    }
    found = {}
    for name, (count, words) in ways.items():
        found[name] = {"rows": count, **run(folder, words)}
        print(name, found[name], file=sys.stderr)
    about = {**machine(torch.device("cpu")), "cores": os.cpu_count()}
    return {"machine": about, "rows": rows, "bytes": (folder / "all.csv").stat().st_size, "ways": found}


def calibrated(folder: Path) -> None:
    """The network's code and its calibration."""
    (folder / "tiny.py").write_text(CODE)
    names: dict[str, Any] = {}
    exec(CODE, names)
    dice = np.random.default_rng(0)
    x = dice.normal(size=(1000, 13)).astype(np.float32)
    with torch.no_grad():
        mean = names["net"](torch.from_numpy(x)).numpy()
    y = mean + 0.1 * (1 + np.abs(x[:, :1])) * dice.normal(size=(1000, 1))
    latedrop.calibrate(names["net"], (x, y), progress=False).save(folder / "cal.json")


def made(path: Path, rows: int) -> None:
    """Rows of 13 numbers with six decimals, and an id."""
    dice = np.random.default_rng(1)
    with write_rows(str(path)) as append:
        for start in range(0, rows, 100_000):
            count = min(100_000, rows - start)
            numbers = {name: np.round(dice.normal(size=count), 6) for name in NAMES}
            append({**numbers, "id": np.arange(start, start + count)})


def run(folder: Path, words: list[str]) -> dict[str, float]:
    """CPU seconds, seconds and megabytes of a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WATCH, sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(record: dict[str, Any]) -> str:
    """A row for each way; the ratio is of CPU seconds per row."""
    plain = record["ways"]["plain pass"]
    lines = [
        "| way | rows | CPU seconds | rows per CPU second | against a plain pass | most memory [MB] |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, way in record["ways"].items():
        each = way["cpu_seconds"] / way["rows"]
        ratio = each / (plain["cpu_seconds"] / plain["rows"])
        lines.append(
            f"| {name} | {way['rows']:,} | {way['cpu_seconds']:.1f} | {1 / each:,.0f} | {ratio:.1f} | "
            f"{way['megabytes']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
