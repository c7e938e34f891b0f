"""A service under load: `latedrop serve` on one machine, and its clients on the same.

    python -m benchmarks.serve            # writes results/serve.json
    python -m benchmarks.serve --quick    # a few seconds, and writes nothing

A network of 13 inputs and two layers of 64 is served by a process of its own. Clients keep one connection each and send
a request after the other. Predictor and service run in turns on the same machine, with torch on one thread. Then 10,000
malformed requests are sent, and last the service is killed and started again under load.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import latedrop
from benchmarks.serve_client import Client, Lost, message
from benchmarks.timing import machine, write

CODE = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
"""
CONCURRENCY = (1, 4, 16, 64, 256)
LOADS = ((1, "application/json"), (64, "application/x-npy"))
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description="latedrop serve under load.")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    seconds, malformed = (0.5, 300) if options.quick else (options.seconds, options.malformed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        uq, rows = prepared(Path(folder))
        record = measured(Path(folder), uq, rows, seconds, malformed)
    print(json.dumps(record, indent=1))
    if not options.quick:
        print(write("serve", record))


def prepared(folder: Path) -> tuple[Any, Any]:
    """A calibrated network whose code and calibration lie in the folder, and rows."""
    (folder / "served.py").write_text(CODE)
    names: dict[str, Any] = {}
    exec(CODE, names)
    dice = np.random.default_rng(0)
    x = dice.normal(size=(1000, 13)).astype(np.float32)
    y = np.sin(x[:, :1]) + 0.2 * dice.normal(size=(1000, 1))
    uq = latedrop.calibrate(names["net"], (x, y), progress=False)
    uq.save(folder / "cal.json")
    return uq, x


def measured(folder: Path, uq: Any, rows: Any, seconds: float, malformed: int) -> dict[str, Any]:
    port = free_port()
    process = started(folder, port)
    try:
        loads = []
        for count, kind in LOADS:
            direct = direct_speed(uq, rows, count, seconds)
            for clients in CONCURRENCY:
                found = asyncio.run(load(port, uq, rows, count, kind, clients, seconds))
                loads.append({"rows": count, "type": kind, "clients": clients, **found, "direct": direct})
                print(loads[-1], file=sys.stderr)
        fuzzed = asyncio.run(fuzz(port, uq, rows, malformed))
        print(fuzzed, file=sys.stderr)
        killed, process = asyncio.run(kill(folder, port, process, uq, rows, seconds))
    finally:
        process.kill()
        process.wait()
    batched = direct_speed(uq, rows, 256, seconds)
    about = {"machine": {**machine(torch.device("cpu")), "cores": os.cpu_count()}, "seconds": seconds}
    return {**about, "direct_256": batched, "loads": loads, "fuzz": fuzzed, "kill": killed}


def started(folder: Path, port: int, *options: str) -> subprocess.Popen[str]:
    """The service, once it answers."""
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


def direct_speed(uq: Any, rows: Any, count: int, seconds: float) -> dict[str, float]:
    """Calling the predictor in this process, for as long: rows per second, and milliseconds of a call."""
    uq.predict(rows[:count]).interval(0.9)
    times, end = [], time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        found = uq.predict(rows[:count])
        found.to_dict(0.9)
        times.append(time.perf_counter() - now)
    return {"rows_per_second": count * len(times) / sum(times), **percentiles(times)}


async def load(port: int, uq: Any, rows: Any, count: int, kind: str, clients: int, seconds: float) -> dict[str, float]:
    """Clients that ask for `count` rows, one request after the other, for so many seconds; answers are compared."""
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
    taken = time.perf_counter() - start
    speed = {"rows_per_second": count * len(times) / taken, "requests": len(times)}
    return {**speed, "wrong": wrong, "refused": refused, **percentiles(times)}


def requests_of(uq: Any, rows: Any, count: int, kind: str) -> tuple[list[bytes], list[Any]]:
    """Different requests, and mean and std that belong to them."""
    found, expected = [], []
    for start in range(0, 640, count):
        part = rows[start : start + count]
        found.append(message(npy(part) if kind.endswith("npy") else {"rows": part.tolist()}, kind))
        prediction = uq.predict(part)
        expected.append((prediction.mean.numpy(), prediction.std.numpy()))
    return found, expected


def right(status: int, body: bytes, expected: Any) -> bool:
    """Whether an answer is the prediction of these rows, up to rounding."""
    if status != 200:
        return False
    found = json.loads(body)
    mean, std = expected
    near = [np.abs(np.array(found[name]) - value) <= TOLERANCE * std for name, value in (("mean", mean), ("std", std))]
    return all(part.shape == mean.shape and part.all() for part in near)


async def fuzz(port: int, uq: Any, rows: Any, count: int) -> dict[str, Any]:
    """Malformed requests, four at a time; then the service has to be healthy and right."""
    dice = random.Random(0)
    bad = [malformed_request(dice, rows) for _ in range(count)]
    statuses: Counter[str] = Counter()

    async def work(requests: list[bytes]) -> None:
        for raw in requests:
            client = Client(port)
            try:
                status, _ = await client.send(raw, timeout=5.0)
                statuses[str(status)] += 1
            except Lost:
                statuses["closed"] += 1
            except (TimeoutError, asyncio.TimeoutError):
                statuses["waited for more"] += 1  # it promised more bytes than it sent
            client.close()

    await asyncio.gather(*(work(bad[i::4]) for i in range(4)))
    requests, expected = requests_of(uq, rows, 1, "application/json")
    status, body = await Client(port).send(requests[0])
    health = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    healthy = (await Client(port).send(health))[0] == 200 and right(status, body, expected[0])
    return {"requests": count, "statuses": dict(sorted(statuses.items())), "healthy": healthy}


def malformed_request(dice: random.Random, rows: Any) -> bytes:
    """A valid body with bytes changed, cut or added, JSON of the wrong kind, or HTTP that is none."""
    bodies = [
        (json.dumps({"rows": rows[:2].tolist()}).encode(), "application/json"),
        (npy(rows[:2]), "application/x-npy"),
    ]
    body, kind = dice.choice(bodies)
    way = dice.randrange(7)
    if way == 0:
        return dice.randbytes(dice.randrange(1, 200)) + b"\r\n\r\n"
    if way == 1:
        wrong = [None, [], {}, {"rows": None}, {"rows": [[]]}, {"rows": [["x"] * 13]}, {"rows": [[1e308] * 13]}]
        wrong += [
            {"rows": [[1] * 12]},
            {"rows": "__import__('os')"},
            {"level": 2, "rows": [[1] * 13]},
            "x",
            1,
            {"a": {}},
        ]
        return message(dice.choice(wrong))
    if way == 2:
        return message(body, dice.choice(["", "text/html", "application/x-pickle", "image/png", "multipart/form-data"]))
    if way == 3:
        return message(body[: dice.randrange(len(body))], kind)
    if way == 4:
        return message(body, kind, dice.choice(["/", "/update", "/predict/x", "/predict?level=nan", "/../etc/passwd"]))
    changed = bytearray(body)
    for _ in range(dice.randrange(1, 9)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return message(bytes(changed), kind if way == 5 else dice.choice(bodies)[1])


async def kill(
    folder: Path, port: int, process: subprocess.Popen[str], uq: Any, rows: Any, seconds: float
) -> tuple[dict[str, Any], subprocess.Popen[str]]:
    """Under load: SIGKILL, start again, then SIGTERM, start again. Every request has a right answer or an error."""
    requests, expected = requests_of(uq, rows, 1, "application/json")
    counts: Counter[str] = Counter()
    done = asyncio.Event()

    async def work(number: int) -> None:
        client, i = Client(port), number
        while not done.is_set():
            counts["sent"] += 1
            try:
                status, body = await client.send(requests[i % len(requests)])
                kind = "right" if right(status, body, expected[i % len(requests)]) else "wrong"
                counts[kind if status == 200 else "refused"] += 1
            except Lost:
                counts["error seen by the client"] += 1
                await asyncio.sleep(0.02)
            i += 1
        client.close()

    async def disturb() -> None:
        nonlocal process
        for sign in (signal.SIGKILL, signal.SIGTERM):
            await asyncio.sleep(seconds)
            process.send_signal(sign)
            await asyncio.to_thread(process.wait)
            process = await asyncio.to_thread(started, folder, port)
        await asyncio.sleep(seconds)
        done.set()

    await asyncio.gather(disturb(), *(work(number) for number in range(16)))
    without = counts["sent"] - sum(counts[name] for name in ("right", "wrong", "refused", "error seen by the client"))
    return {
        **{name: counts[name] for name in ("sent", "right", "wrong", "refused", "error seen by the client")},
        "without answer or error": without,
    }, process


def percentiles(times: list[float]) -> dict[str, float]:
    """Of seconds, in milliseconds."""
    ordered = sorted(times)
    return {
        "p50_ms": 1000 * statistics.median(ordered),
        "p99_ms": 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def markdown(record: dict[str, Any]) -> str:
    """A row for each load, the predictor by itself beside it."""
    lines = [
        "| rows, as | clients | p50 [ms] | p99 [ms] | rows per second | predictor by itself | wrong | refused |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record["loads"]:
        kind = re.sub(r".*[/-]", "", row["type"])
        lines.append(
            f"| {row['rows']}, {kind} | {row['clients']} | {row['p50_ms']:.3g} | {row['p99_ms']:.3g} | "
            f"{row['rows_per_second']:,.0f} | {row['direct']['rows_per_second']:,.0f} | {row['wrong']} | "
            f"{row['refused']} |"
        )
    return "\n".join(lines)


def accidents(record: dict[str, Any]) -> str:
    """What became of malformed requests, and of those that met a kill."""
    statuses = ", ".join(f"{status}: {count:,}" for status, count in record["fuzz"]["statuses"].items())
    lines = ["| test | found |", "| --- | --- |"]
    lines.append(f"| {record['fuzz']['requests']:,} malformed requests | {statuses} |")
    lines.append(f"| after them | {'healthy, and right' if record['fuzz']['healthy'] else 'not healthy'} |")
    counts = ", ".join(f"{name}: {count:,}" for name, count in record["kill"].items())
    return "\n".join([*lines, f"| killed and restarted, 16 clients | {counts} |"])


if __name__ == "__main__":
    main()
