"""What a worker of a Ray cluster does in a second, and what a billion rows would cost on paper.

    python -m benchmarks.cluster                   # writes results/cluster.json
    python -m benchmarks.cluster --rows 20000      # fewer, and writes nothing

One worker's work is measured in this process, in CPU seconds on one thread: read parquet, predict, write parquet. The
same files then go through Ray on this machine, with one worker and with two. The network is that of
`benchmarks.large_file`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.large_file import NAMES, calibrated
from benchmarks.timing import machine, write
from latedrop.adapters.ray import Asked, Predictions, predict_folder

BILLION = 1_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Predictions on Ray.")
    parser.add_argument("--rows", type=int, default=2_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        record = measured(Path(folder), options.rows)
    print(json.dumps(record, indent=1))
    if options.rows == parser.get_default("rows"):
        print(write("cluster", record))


def measured(folder: Path, rows: int) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    calibrated(folder)
    data = folder / "data"
    data.mkdir()
    dice = np.random.default_rng(1)
    for i in range(8):
        columns = {name: dice.normal(size=rows // 8) for name in NAMES}
        pyarrow.parquet.write_table(pyarrow.table({**columns, "id": np.arange(rows // 8)}), data / f"{i}.parquet")
    given: dict[str, Any] = {"inputs": tuple(NAMES), "keep": ("id",), "folder": str(folder), "device": "cpu"}
    asked = Asked("tiny:net", str(folder / "cal.json"), untrained=True, **given)
    found = {"rows": rows, "worker": worker(asked, data, folder), "ray": []}
    for workers in (1, 2):
        start = time.perf_counter()
        predict_folder(asked, str(data), str(folder / f"out{workers}"), workers=workers)
        found["ray"].append({"workers": workers, "seconds": time.perf_counter() - start})
    return {"machine": {**machine(torch.device("cpu")), "cores": os.cpu_count()}, **found}


def worker(asked: Asked, data: Path, folder: Path) -> dict[str, float]:
    """CPU seconds of one worker for all files, and rows per CPU second."""
    import pyarrow.parquet

    predictions, rows = Predictions(asked), 0
    predictions(pyarrow.parquet.read_table(data / "0.parquet").slice(0, 10))
    start = time.process_time()
    for file in sorted(data.glob("*.parquet")):
        table = pyarrow.parquet.read_table(file)
        pyarrow.parquet.write_table(predictions(table), folder / "one.parquet")
        rows += len(table)
    taken = time.process_time() - start
    return {"cpu_seconds": taken, "rows_per_second": rows / taken}


def markdown(record: dict[str, Any]) -> str:
    """A billion rows on so many workers, from one worker's speed."""
    speed = record["worker"]["rows_per_second"]
    lines = [
        "| workers, a CPU core each | rows per second | a billion rows take | core hours |",
        "| ---: | ---: | ---: | ---: |",
    ]
    hours = BILLION / speed / 3600
    for workers in (1, 16, 64, 256):
        wall = BILLION / speed / workers
        shown = f"{wall / 3600:.1f} h" if wall > 3600 else f"{wall / 60:.1f} min"
        lines.append(f"| {workers} | {speed * workers:,.0f} | {shown} | {hours:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
