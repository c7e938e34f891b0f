"""How many rows a second `latedrop serve` answers, and how long a client waits: `python -m benchmarks.serve`

A network of 13 inputs and two layers of 64 is served by a process of its own. Clients keep one connection each and
send a request after the other. Predictor and service run in turns, with torch on one thread; every answer is compared.
"""

import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import latedrop
from benchmarks.timing import machine, markdown_table, write

CODE = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(13, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
"""
CONCURRENCY = (1, 4, 16, 64, 256)
LOADS = ((1, "application/json"), (64, "application/x-npy"))
SECONDS, TOLERANCE = 5.0, 1e-5
"""Of each load; of a difference, in standard deviations."""


def main() -> None:
    torch.set_num_threads(1)
    loads = []
    with tempfile.TemporaryDirectory() as name:
        uq, rows = prepared(Path(name))
        with served(Path(name)) as (port, _):
            for count, kind in LOADS:
                direct = direct_speed(uq, rows, count)
                for clients in CONCURRENCY:
                    answers = load(port, uq, rows, count, kind, clients)
                    loads.append({"rows": count, "type": kind, "clients": clients, **answers, "direct": direct})
                    print(loads[-1], flush=True)
    about = {**machine(torch.device("cpu")), "cores": os.cpu_count()}
    write("serve", {"machine": about, "seconds": SECONDS, "loads": loads})


def prepared(folder: Path, width: int = 64) -> tuple[Any, Any]:
    """Write a calibrated network's code and calibration to the folder; return its predictor, and rows."""
    code = CODE.replace("WIDTH", str(width))
    (folder / "served.py").write_text(code)
    names: dict[str, Any] = {}
    exec(code, names)
    dice = np.random.default_rng(0)
    x = dice.normal(size=(1000, 13)).astype(np.float32)
    y = np.sin(x[:, :1]) + 0.2 * dice.normal(size=(1000, 1))
    uq = latedrop.calibrate(names["net"], (x, y), progress=False)
    uq.save(folder / "cal.json")
    return uq, x


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run the service; yield its port and process once it answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", "from latedrop.cli import main; main()", "serve", "served:net", "cal.json"]
    process = subprocess.Popen([*command, "--port", str(port), *options], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port, process
    finally:
        process.terminate()
        process.wait(60)


def direct_speed(uq: Any, rows: Any, count: int) -> dict[str, float]:
    """Call the predictor in this process for some seconds: rows per second, and milliseconds of a call."""
    uq.predict(rows[:count]).interval(0.9)
    times, end = [], time.perf_counter() + SECONDS
    while (now := time.perf_counter()) < end:
        uq.predict(rows[:count]).to_dict(0.9)
        times.append(time.perf_counter() - now)
    return {"rows_per_second": count * len(times) / sum(times), **percentiles(times)}


def load(port: int, uq: Any, rows: Any, count: int, kind: str, clients: int) -> dict[str, float]:
    """Let clients ask for `count` rows, one request after the other, for some seconds; compare the answers."""
    bodies, expected = requests_of(uq, rows, count, kind)
    times: list[float] = []
    answers = Counter[str]()

    def ask(connection: HTTPConnection, i: int) -> tuple[int, bytes]:
        connection.request("POST", "/predict", bodies[i % len(bodies)], {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def work(i: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        while (now := time.perf_counter()) < end:
            status, body = ask(connection, i)
            if status == 429:
                answers["refused"] += 1
                time.sleep(0.05)
                continue
            times.append(time.perf_counter() - now)
            answers["wrong"] += not right(status, body, expected[i % len(bodies)])
            i += 1
        connection.close()

    ask(HTTPConnection("127.0.0.1", port), 0)  # the first prediction of a process takes longer
    start = time.perf_counter()
    end = start + SECONDS
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))
    speed = {"rows_per_second": count * len(times) / (time.perf_counter() - start), "requests": len(times)}
    return {**speed, "wrong": answers["wrong"], "refused": answers["refused"], **percentiles(times)}


def requests_of(uq: Any, rows: Any, count: int, kind: str) -> tuple[list[bytes], list[Any]]:
    """Return the bodies of different requests, and mean and std that belong to them."""
    bodies, expected = [], []
    for start in range(0, 640, count):
        part, file = rows[start : start + count], io.BytesIO()
        np.save(file, part)
        bodies.append(file.getvalue() if kind.endswith("npy") else json.dumps({"rows": part.tolist()}).encode())
        prediction = uq.predict(part)
        expected.append((prediction.mean.numpy(), prediction.std.numpy()))
    return bodies, expected


def right(status: int, body: bytes, expected: Any) -> bool:
    """Return whether an answer is the prediction of these rows, up to rounding."""
    answer, (mean, std) = json.loads(body), expected
    pairs = [(np.array(answer.get(name)), value) for name, value in (("mean", mean), ("std", std))]
    near = (a.shape == b.shape and (np.abs(a - b) <= TOLERANCE * std).all() for a, b in pairs)
    return status == 200 and all(near)


def percentiles(times: list[float]) -> dict[str, float]:
    middle, late = np.quantile(times, [0.5, 0.99])
    return {"p50_ms": 1000 * float(middle), "p99_ms": 1000 * float(late)}


def table(record: dict[str, Any]) -> str:
    rows = []
    for row in record["loads"]:
        sent = f"{row['rows']}, {re.sub(r'.*[/-]', '', row['type'])}"
        speeds = [f"{speed['rows_per_second']:,.0f}" for speed in (row, row["direct"])]
        waits = [f"{row[key]:.3g}" for key in ("p50_ms", "p99_ms")]
        rows.append([sent, row["clients"], *waits, *speeds, row["wrong"], row["refused"]])
    heads = ["rows, as", "clients", "p50 [ms]", "p99 [ms]", "rows per second", "predictor by itself"]
    return markdown_table([*heads, "wrong", "refused"], rows)


if __name__ == "__main__":
    main()
