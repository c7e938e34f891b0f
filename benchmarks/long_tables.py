"""Tables of up to fifteen million rows: calibrating them, `latedrop predict` on a large csv file, predictions on Ray.

    python -m benchmarks.long_tables                    # --parts calibrate, predict or ray for one of them

Every way runs in a process of its own, on one thread: CPU seconds, its start included, and the most memory it took.

*calibrate*: the default through a tiny network, rows made batch by batch as they are read, beside reading alone and
plain passes. *predict*: 15 million rows of 13 columns, beside a plain pass that reads and writes with the same
functions. *ray*: parquet files by one worker in this process, and by one and two workers of Ray.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve import prepared
from benchmarks.timing import by_parts, markdown_table

ROWS = (100_000, 1_000_000, 10_000_000)
FILE_ROWS, PART, RAY_ROWS, RAY_FILES = 15_000_000, 20, 2_000_000, 8
BATCH = 8192
NAMES = tuple(f"x{i}" for i in range(13))
WAYS = ("reading", "plain passes", "calibrate")
CALIBRATE = """
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

def memory():
    status = open("/proc/self/status").read()
    return {name: int(re.search(name + r":\\s+(\\d+)", status)[1]) / 1024 for name in ("VmHWM", "VmRSS")}

latedrop.calibrate(net, next(iter(Table())), progress=False)  # imports what is imported at first use
before, start = memory()["VmRSS"], time.process_time()
if way == "calibrate":
    used = latedrop.calibrate(net, Table(), progress=False).calibration.rows
else:
    used = 0
    with torch.no_grad():
        for x, y in Table():
            used += len(net(x) if way == "plain passes" else x)
print(json.dumps({"cpu_seconds": time.process_time() - start, "megabytes": memory()["VmHWM"] - before, "rows": used}))
"""
PLAIN = """
import sys
import torch
from latedrop.cli.tables import choose, open_table, read_batches
from latedrop.cli.writing import write_rows
from served import net
data, out, size = sys.argv[1:]
table = open_table(data)
with torch.no_grad(), write_rows(out) as append:
    for rows in read_batches(table, choose(table, ignored=["id"], kept=["id"]), int(size)):
        append({**rows.kept, "mean": net(torch.from_numpy(rows.inputs).float())[:, 0].numpy()})
"""
COMMAND = "from latedrop.cli import main; main()"
# A small process between: what a process took at most counts what it was forked from.
WATCH = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(json.dumps({"cpu_seconds": usage.ru_utime + usage.ru_stime, "megabytes": usage.ru_maxrss / 1024}))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def calibrate() -> dict[str, Any]:
    def ways(rows: int) -> dict[str, Any]:
        return {way: run(Path(), ["-c", CALIBRATE, way, str(rows), str(BATCH)]) for way in WAYS}

    return {"batch": BATCH, "tables": {str(rows): ways(rows) for rows in ROWS}}


def predict() -> dict[str, Any]:
    """Measure the command, on the whole file and on a part of it, beside a plain pass."""
    with tempfile.TemporaryDirectory() as name:
        folder, part = Path(name), FILE_ROWS // PART
        prepared(folder, 50)
        write_table(folder / "all.csv", FILE_ROWS)
        write_table(folder / "part.csv", part)
        options = ["--keep", "id", "--untrained", "-o", "out.csv", "--data"]
        words = ["-c", COMMAND, "predict", "served:net", "cal.json", *options]
        ways = {
            "plain pass": (FILE_ROWS, ["-c", PLAIN, "all.csv", "plain.csv", str(BATCH)]),
            "latedrop predict": (FILE_ROWS, [*words, "all.csv"]),
            "latedrop predict, a part of the file": (part, [*words, "part.csv"]),
        }
        watched = {
            way: {"rows": count, **run(folder, ["-c", WATCH, sys.executable, *w])} for way, (count, w) in ways.items()
        }
        return {"rows": FILE_ROWS, "bytes": (folder / "all.csv").stat().st_size, "ways": watched}


def ray() -> dict[str, Any]:
    """Measure one worker in this process, and the same files through Ray with one worker and with two."""
    from pyarrow import parquet, table

    from latedrop.adapters.ray import Asked, Predictions, predict_folder

    dice, rows, clocks = np.random.default_rng(1), RAY_ROWS // RAY_FILES, {}
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name, "data")
        data.mkdir()
        prepared(folder, 50)
        paths = [data / f"{i}.parquet" for i in range(RAY_FILES)]
        for path in paths:
            columns = {name: dice.normal(size=rows) for name in NAMES}
            parquet.write_table(table({**columns, "id": np.arange(rows)}), path)
        options: dict[str, Any] = {"inputs": NAMES, "keep": ("id",), "folder": name, "device": "cpu"}
        job = Asked("served:net", str(folder / "cal.json"), untrained=True, **options)
        predictions = Predictions(job)
        predictions(parquet.read_table(paths[0]).slice(0, 10))
        start = time.process_time()
        for path in paths:
            parquet.write_table(predictions(parquet.read_table(path)), folder / "one.parquet")
        seconds = time.process_time() - start
        for workers in (1, 2):
            begin = time.perf_counter()
            predict_folder(job, str(data), str(folder / f"out{workers}"), workers=workers)
            clocks[workers] = time.perf_counter() - begin
    return {"rows": RAY_ROWS, "cpu_seconds": seconds, "ray_seconds": clocks}


def write_table(path: Path, rows: int) -> None:
    from latedrop.cli.writing import write_rows

    dice = np.random.default_rng(1)
    with write_rows(str(path)) as append:
        for start in range(0, rows, 100_000):
            count = min(100_000, rows - start)
            numbers = {name: np.round(dice.normal(size=count), 6) for name in NAMES}
            append({**numbers, "id": np.arange(start, start + count)})


def run(folder: Path, words: list[str]) -> dict[str, float]:
    """Return what a process of Python writes as its last line."""
    options: dict[str, Any] = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run([sys.executable, *words], cwd=folder, check=True, **options)
    return json.loads(done.stdout.splitlines()[-1])


def calibrate_table(record: dict[str, Any]) -> str:
    """Return a row for each length; times without reading."""
    lines = []
    for rows, ways in record["calibrate"]["tables"].items():
        reading, plain, ours = (ways[way]["cpu_seconds"] for way in WAYS)
        plain, ours = plain - reading, ours - reading
        cells = [f"{int(rows):,}", f"{reading:.2f}", f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.1f}"]
        lines.append([*cells, f"{ways['calibrate']['rows']:,}", f"{ways['calibrate']['megabytes']:.0f}"])
    heads = ["rows", "reading [CPU s]", "plain passes [CPU s]", "calibrate [CPU s]", "calibrate / plain passes"]
    return markdown_table([*heads, "rows used", "calibrate, memory [MB]"], lines, 0)


def predict_table(record: dict[str, Any]) -> str:
    """Return a row for each way; the ratio is of CPU seconds per row."""
    lines, ways = [], record["predict"]["ways"]
    plain = ways["plain pass"]
    for name, way in ways.items():
        each = way["cpu_seconds"] / way["rows"]
        ratio = each / (plain["cpu_seconds"] / plain["rows"])
        cells = [f"{way['rows']:,}", f"{way['cpu_seconds']:.1f}", f"{1 / each:,.0f}", f"{ratio:.1f}"]
        lines.append([name, *cells, f"{way['megabytes']:.0f}"])
    heads = ["way", "rows", "CPU seconds", "rows per CPU second", "against a plain pass", "most memory [MB]"]
    return markdown_table(heads, lines)


def ray_table(record: dict[str, Any]) -> str:
    """Return what a billion rows take on so many workers, from the speed of one."""
    speed, lines = record["ray"]["rows"] / record["ray"]["cpu_seconds"], []
    for workers in (1, 16, 64, 256):
        hours = 1e9 / speed / workers / 3600
        taken = f"{hours:.1f} h" if hours > 1 else f"{60 * hours:.1f} min"
        lines.append([workers, f"{speed * workers:,.0f}", taken, f"{workers * hours:.2f}"])
    heads = ["workers, a CPU core each", "rows per second", "a billion rows take", "core hours"]
    return markdown_table(heads, lines, 0)


if __name__ == "__main__":
    by_parts("long_tables", {"calibrate": calibrate, "predict": predict, "ray": ray})
