"""How many rows a second `latedrop serve` answers, and how long a client waits: `python -m benchmarks.serve`

A network of 13 inputs and two layers of 64 is served by a process of its own. Clients keep one connection each and
send a request after the other. Predictor and service run in turns on the same machine, with torch on one thread; every
answer is compared with the predictor's.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
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
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description="latedrop serve under load.")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        record = measured(Path(folder), seconds)
    write("serve", record)
    print(markdown(record))


def measured(folder: Path, seconds: float) -> dict[str, Any]:
    """Measure every load, and the predictor by itself before each."""
    uq, rows = prepared(folder)
    port = free_port()
    process = started(folder, port)
    loads = []
    try:
        for count, kind in LOADS:
            direct = direct_speed(uq, rows, count, seconds)
            for clients in CONCURRENCY:
                answers = asyncio.run(load(port, uq, rows, count, kind, clients, seconds))
                loads.append({"rows": count, "type": kind, "clients": clients, **answers, "direct": direct})
                print(loads[-1], file=sys.stderr)
    finally:
        process.kill()
        process.wait()
    return {"machine": {**machine(torch.device("cpu")), "cores": os.cpu_count()}, "seconds": seconds, "loads": loads}


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


def started(folder: Path, port: int, *options: str) -> subprocess.Popen[str]:
    """Start the service; return it once it answers."""
    command = [sys.executable, "-c", "from latedrop.cli import main; main()", "serve", "served:net", "cal.json"]
    command += options
    process = subprocess.Popen([*command, "--port", str(port)], cwd=folder, stderr=subprocess.DEVNULL, text=True)
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the service did not start")


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Client:
    """One connection to a service, kept open, a request after the other."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, raw: bytes, timeout: float = 60.0) -> tuple[int, bytes]:
        """Return status and body of the answer to a raw request."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        writer.write(raw)
        return await asyncio.wait_for(self._answer(reader), timeout)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        lengths = [int(line.partition(":")[2]) for line in head if line.startswith("content-length:")]
        body = await reader.readexactly(lengths[0])
        if any(line.startswith("connection: close") for line in head):
            self.close()
        return int(head[0].split()[1]), body


def message(body: bytes | Any, kind: str = "application/json", path: str = "/predict") -> bytes:
    """Return a raw POST request; anything but bytes is written as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode("latin-1", "replace") + content


def direct_speed(uq: Any, rows: Any, count: int, seconds: float) -> dict[str, float]:
    """Call the predictor in this process for some seconds: rows per second, and milliseconds of a call."""
    uq.predict(rows[:count]).interval(0.9)
    times, end = [], time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        uq.predict(rows[:count]).to_dict(0.9)
        times.append(time.perf_counter() - now)
    return {"rows_per_second": count * len(times) / sum(times), **percentiles(times)}


async def load(port: int, uq: Any, rows: Any, count: int, kind: str, clients: int, seconds: float) -> dict[str, float]:
    """Let clients ask for `count` rows, one request after the other, for some seconds; compare the answers."""
    requests, expected = requests_of(uq, rows, count, kind)
    await Client(port).send(requests[0])  # the first prediction of a process takes longer
    times: list[float] = []
    wrong = refused = 0
    end = time.perf_counter() + seconds

    async def work(number: int) -> None:
        nonlocal wrong, refused
        client, i = Client(port), number
        while (now := time.perf_counter()) < end:
            status, body = await client.send(requests[i % len(requests)])
            if status == 429:
                refused += 1
                await asyncio.sleep(0.05)
                continue
            times.append(time.perf_counter() - now)
            wrong += not right(status, body, expected[i % len(requests)])
            i += 1
        client.close()

    start = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(clients)))
    speed = {"rows_per_second": count * len(times) / (time.perf_counter() - start), "requests": len(times)}
    return {**speed, "wrong": wrong, "refused": refused, **percentiles(times)}


def requests_of(uq: Any, rows: Any, count: int, kind: str) -> tuple[list[bytes], list[Any]]:
    """Return different requests, and mean and std that belong to them."""
    requests, expected = [], []
    for start in range(0, 640, count):
        part = rows[start : start + count]
        file = io.BytesIO()
        np.save(file, part)
        requests.append(message(file.getvalue() if kind.endswith("npy") else {"rows": part.tolist()}, kind))
        prediction = uq.predict(part)
        expected.append((prediction.mean.numpy(), prediction.std.numpy()))
    return requests, expected


def right(status: int, body: bytes, expected: Any) -> bool:
    """Return whether an answer is the prediction of these rows, up to rounding."""
    if status != 200:
        return False
    answer = json.loads(body)
    mean, std = expected
    near = [np.abs(np.array(answer[name]) - value) <= TOLERANCE * std for name, value in (("mean", mean), ("std", std))]
    return all(part.shape == mean.shape and part.all() for part in near)


def percentiles(times: list[float]) -> dict[str, float]:
    """Return percentiles of seconds, in milliseconds."""
    ordered = sorted(times)
    return {
        "p50_ms": 1000 * statistics.median(ordered),
        "p99_ms": 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def markdown(record: dict[str, Any]) -> str:
    """Return a row for each load, the predictor by itself beside it."""
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
