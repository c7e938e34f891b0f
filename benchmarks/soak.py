"""Memory of the service over 200,000 requests and of the console over 50,000 frames: `python -m benchmarks.soak`

The service is a process of its own; eight clients send rows, malformed bodies, and questions for `/metrics`. One
request in twenty goes to a second service with `--stream`, and is followed by its label. The console looks at synthetic
frames as a camera would send them over two days, while a client asks for pages, pictures and timelines, and labels
frames: at most eight labels are kept, as every one takes memory. `--parts console` measures one part again.
"""

import json
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.console import counter_of, resident
from benchmarks.serve import prepared, served
from benchmarks.timing import by_parts, markdown_table
from latedrop_crowd.console.notices import Notices
from latedrop_crowd.console.server import make_app
from latedrop_crowd.console.sources import Camera, Shot, Source
from latedrop_crowd.console.store import Store
from latedrop_crowd.console.watch import Settings, Watch
from latedrop_crowd.console.zones import Rule
from latedrop_crowd.scenes import make_scenes

REQUESTS, FRAMES, SAMPLES, CLIENTS, KEPT_LABELS, DAYS = 200_000, 50_000, 100, 8, 8, 2
LOOKS = ("state", "events", "sources/0/picture", "sources/0/layers/density", "zones/1/timeline?seconds=86400")
WRONG = (b"", b"{", b'{"rows": [[1, "x"]]}', b'{"rows": [[1e999]]}', b'{"level": 9}')
TITLES = {"service": "requests to the service", "stream": "requests with --stream", "console": "frames of the console"}


def service(requests: int, *options: str) -> dict[str, Any]:
    """Send requests from eight clients to a service."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(CLIENTS) as pool:
        _, rows = prepared(Path(folder))
        answers, each = Counter[str](), -(-requests // SAMPLES // CLIENTS)
        with served(Path(folder), *options) as (port, process):
            samples = [(0, resident(process.pid))]
            for number in range(SAMPLES):
                ask = partial(client, port, rows, each, bool(options))
                for statuses in pool.map(ask, [f"{number}-{place}" for place in range(CLIENTS)]):
                    answers.update(statuses)
                samples.append((sum(answers.values()), resident(process.pid)))
            assert process.poll() is None, "the service has ended"
    return summary(samples, answers)


def client(port: int, rows: Any, count: int, stream: bool, seed: str) -> Counter[str]:
    """Send requests over one connection; count the answers by their status."""
    dice, wire, answers, names = random.Random(seed), HTTPConnection("127.0.0.1", port), Counter[str](), list[str]()
    for number in range(count + (count % 2 if stream else 0)):  # every row gets its label
        some = rows[(first := dice.randrange(len(rows) - 16)) : first + dice.choice((1, 1, 1, 4, 16))]
        kind, path = dice.random(), "/predict"
        body: Any = {"rows": some.tolist(), "level": dice.choice((0.5, 0.9))}
        if stream:
            path, body = ("/update", {"ids": names, "labels": [dice.gauss(0, 1)]}) if names else (path, body)
            names = [] if names else [f"{seed}-{number}"]
            body = {"rows": some[:1].tolist(), "ids": names} if names else body
        elif kind < 0.05:
            body = dice.choice(WRONG)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        metrics = not stream and 0.05 <= kind < 0.08
        asked = ("GET", "/metrics") if metrics else ("POST", path, content, {"Content-Type": "application/json"})
        wire.request(*asked)
        answer = wire.getresponse()
        answer.read()
        answers[str(answer.status)] += 1
    wire.close()
    return answers


def console(frames: int) -> dict[str, Any]:
    """Count frames by a console, with somebody who looks at it."""
    from starlette.testclient import TestClient

    trained, calibration = counter_of("scenes")
    scenes = (frame.pixels for frame in make_scenes(0, 12, 0).frames if frame.pixels is not None)
    pixels = [np.ascontiguousarray(scene[:72, :112]) for scene in scenes]  # small, so that counting is quick
    with tempfile.TemporaryDirectory() as folder:
        source, store = Source("square", True, lambda: iter(pixels)), Store(Path(folder) / "a.sqlite", most_bytes=5e6)
        watch = Watch([source], trained, calibration, store, Settings(stretch=1800.0, rule=Rule(hold=0.0)), Notices([]))
        view, page = watch.views[0], TestClient(make_app(watch), "http://127.0.0.1:8765", client=("127.0.0.1", 5))
        view.camera = Camera(source, watch._arrived)
        store.change_zone(view.zones[0].id, "Whole picture", 14.0)
        watch.zones_changed(view)
        answers, dice, samples = Counter[str](), random.Random(0), [(0, resident())]
        step, begun = DAYS * 86400 / frames, time.time() - DAYS * 86400
        for number in range(frames):
            watch._look(view, Shot(number, begun + step * number, pixels[number % len(pixels)], step * number))
            if number % 10 == 0:
                answers[str(page.get(f"/api/{dice.choice(LOOKS)}").status_code)] += 1
            if number % 2000 == 0:
                frame = page.post("/api/sources/0/freeze").json()["id"]
                made = page.post(f"/api/sources/0/frames/{frame}/label", json={"people": dice.randrange(30)}).json()
                if len(made["labelled"]) > KEPT_LABELS:
                    page.delete(f"/api/sources/0/frames/{min(row['id'] for row in made['labelled'])}/label")
            if (number + 1) % max(1, frames // SAMPLES) == 0:
                store.tidy()
                samples.append((number + 1, resident()))
        store.close()
    return summary(samples, answers)


def summary(samples: list[tuple[int, float]], answers: Counter[str]) -> dict[str, Any]:
    """Return memory after the first fifth, in which everything is used once."""
    later = [value for _, value in samples[len(samples) // 5 :]]
    record = {"count": samples[-1][0], "least_mb": min(later), "most_mb": max(later), "answers": dict(answers)}
    return record | {"samples": [[count, round(value, 1)] for count, value in samples]}


def growth(samples: Any, begin: float, end: float) -> float:
    """Return by how much memory grew between two parts of the samples, by least squares, in MB."""
    some = np.array(samples[round(begin * len(samples)) : round(end * len(samples))])
    return float(np.polyfit(some[:, 0], some[:, 1], 1)[0] * (some[-1, 0] - some[0, 0]))


def table(record: dict[str, Any]) -> str:
    rows = []
    for name, part in ((name, record[name]) for name in TITLES):
        changes = (f"{growth(part['samples'], *ends):.1f}" for ends in ((0.2, 0.5), (0.5, 1)))
        memory = f"{part['least_mb']:.0f} to {part['most_mb']:.0f}"
        rows.append([TITLES[name], f"{part['count']:,}", memory, *changes])
    heads = ["work", "number", "memory [MB]", "growth to the middle [MB]", "in the second half [MB]"]
    return markdown_table(heads, rows)


if __name__ == "__main__":
    some = REQUESTS // 20
    parts = {"service": partial(service, REQUESTS - some), "stream": partial(service, some, "--stream", "state.json")}
    by_parts("soak", {**parts, "console": partial(console, FRAMES)})
