"""Memory of the service over 200,000 requests and of the console over 50,000 frames.

    python -m benchmarks.soak                 # about an hour
    python -m benchmarks.soak --parts console # one part again; the others stay as they are
    python -m benchmarks.soak --parts         # draw docs/images/soak.png from the JSON alone

The service is a process of its own; eight clients send rows as JSON and npy, malformed bodies, and questions for
`/metrics`. One request in twenty goes to a second service with `--stream`, and is followed by its label. The console
looks at synthetic frames as a camera would send them over two days, while a client asks for pages, pictures and
timelines of 24 hours, moves zones and labels frames. Every label fits the counts to all labels anew, which takes memory
for each of them: at most eight are kept, the oldest is taken back. A fit gives memory back in pieces of other sizes, of
which the allocator keeps some: resident memory makes steps, while the bytes in use stay the same. `labels` has many of
them, with three frames before each, and records both.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import io
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serve import Client, free_port, message, prepared, started
from benchmarks.timing import machine, markdown_table, stored, write
from latedrop import plots
from latedrop_crowd.calibration import load_calibration
from latedrop_crowd.console.notices import Notices
from latedrop_crowd.console.server import make_app
from latedrop_crowd.console.sources import Camera, Shot, Source
from latedrop_crowd.console.store import Store
from latedrop_crowd.console.watch import Settings, Watch
from latedrop_crowd.console.zones import Rule
from latedrop_crowd.mcnn import faster, load_weights, shipped
from latedrop_crowd.scenes import make_scenes

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "soak.png"
REQUESTS, FRAMES, SAMPLES, CLIENTS = 200_000, 50_000, 100, 8
DAYS = 2  # of the console's frames: the timeline of one is full after half of them
KEPT_LABELS, LABELS = 8, 400  # of the console, and of the part with many
SIZE = (72, 112)  # of the console's frames, in pixels
_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


def service(folder: Path, requests: int, *options: str) -> dict[str, Any]:
    """Send requests from eight clients to a service."""
    _, rows = prepared(folder)
    port = free_port()
    process = started(folder, port, *options)
    samples, answers = [(0, megabytes(process.pid))], Counter[str]()
    try:

        async def part(seed: int, count: int) -> None:
            clients = (client(port, rows, -(-count // CLIENTS), f"{seed}-{i}", bool(options)) for i in range(CLIENTS))
            for statuses in await asyncio.gather(*clients):
                answers.update(statuses)

        for number in range(SAMPLES):
            asyncio.run(part(number, -(-requests // SAMPLES)))
            samples.append((sum(answers.values()), megabytes(process.pid)))
        assert process.poll() is None, "the service has ended"
    finally:
        process.terminate()
        process.wait(60)
    return summary(samples, answers)


async def client(port: int, rows: Any, count: int, seed: str, stream: bool) -> Counter[str]:
    """Send requests over one connection; count the answers by their status."""
    dice, wire, answers = random.Random(seed), Client(port), Counter[str]()
    names: list[str] = []
    for number in range(count + (count % 2 if stream else 0)):  # every row gets its label
        some = rows[(first := dice.randrange(len(rows) - 16)) : first + dice.choice((1, 1, 1, 4, 16))]
        kind = dice.random()
        if stream and names:
            raw = message({"ids": names[:1], "labels": [dice.gauss(0, 1)]}, path="/update")
            names = []
        elif stream:
            names = [f"{seed}-{number}"]
            raw = message({"rows": some[:1].tolist(), "ids": names})
        elif kind < 0.05:
            raw = message(dice.choice((b"", b"{", b'{"rows": [[1, "x"]]}', b'{"rows": [[1e999]]}', b'{"level": 9}')))
        elif kind < 0.08:
            raw = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        elif kind < 0.25:
            file = io.BytesIO()
            np.save(file, some)
            raw = message(file.getvalue(), "application/x-npy")
        else:
            raw = message({"rows": some.tolist(), "level": dice.choice((0.5, 0.9))})
        status, _ = await wire.send(raw)
        answers[str(status)] += 1
    wire.close()
    return answers


def console(folder: Path, frames: int, label_every: int) -> dict[str, Any]:
    """Count frames by a console, with somebody who looks at it."""
    from starlette.testclient import TestClient

    trained = faster(load_weights(shipped("scenes")))
    calibration = load_calibration(shipped("scenes", ".calibration.json"), trained)
    scenes = (frame.pixels for frame in make_scenes(0, 12, 0).frames if frame.pixels is not None)
    pixels = [np.ascontiguousarray(scene[: SIZE[0], : SIZE[1]]) for scene in scenes]  # small, so that counting is quick
    source, store = Source("square", True, lambda: iter(pixels)), Store(folder / "console.sqlite", most_bytes=5e6)
    watch = Watch([source], trained, calibration, store, Settings(stretch=1800.0, rule=Rule(hold=0.0)), Notices([]))
    view, page = watch.views[0], TestClient(make_app(watch), "http://127.0.0.1:8765", client=("127.0.0.1", 5))
    view.camera = Camera(source, watch._arrived)
    store.change_zone(view.zones[0].id, "Whole picture", 14.0)
    watch.zones_changed(view)
    answers, dice = Counter[str](), random.Random(0)
    step, begun = DAYS * 86400 / frames, time.time() - DAYS * 86400
    samples, in_use = [(0, megabytes())], []
    for number in range(frames):
        watch._look(view, Shot(number, begun + step * number, pixels[number % len(pixels)], step * number))
        if number % 10 == 0:
            answers.update(str(status) for status in asked(page, number, dice))
        if number % label_every == 0:
            answers.update(str(status) for status in labelled(page, dice))
        if (number + 1) % max(1, frames // SAMPLES) == 0:
            store.tidy()
            gc.collect()
            samples.append((number + 1 if label_every > 3 else number // label_every + 1, megabytes()))
            in_use.append(round(megabytes_in_use(), 1))
    store.close()
    return {**summary(samples, answers), "in_use_mb": in_use}


def asked(page: Any, number: int, dice: random.Random) -> list[int]:
    """Ask for what somebody at the console looks at, and draw a zone now and then."""
    looks = ("state", "events", "sources/0/picture", "sources/0/layers/density", "zones/1/timeline?seconds=86400")
    statuses = [page.get(f"/api/{dice.choice(looks)}").status_code]
    if number % 500 == 0:
        x, y = dice.uniform(0, 0.5), dice.uniform(0, 0.5)
        corners = [[x, y], [x + 0.4, y], [x + 0.4, y + 0.4], [x, y + 0.4]]
        made = page.post("/api/sources/0/zones", json={"name": f"zone {number}", "points": corners, "limit": 5})
        zones = made.json()["zones"]
        gone = page.delete(f"/api/sources/0/zones/{zones[1]['id']}") if len(zones) > 4 else made
        statuses += [made.status_code, gone.status_code]
    return statuses


def labelled(page: Any, dice: random.Random) -> list[int]:
    """Label the last frame, and take the oldest label back."""
    frame = page.post("/api/sources/0/freeze").json()["id"]
    made = page.post(f"/api/sources/0/frames/{frame}/label", json={"people": dice.randrange(30)})
    labels = [row["id"] for row in made.json()["labelled"]]
    gone = page.delete(f"/api/sources/0/frames/{min(labels)}/label") if len(labels) > KEPT_LABELS else made
    return [made.status_code, gone.status_code]


def megabytes(process: int | str = "self") -> float:
    """Return the resident memory of a process."""
    text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


class _Mallinfo(ctypes.Structure):
    """Hold what `mallinfo2` of glibc returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def megabytes_in_use() -> float:
    """Return the memory of this process that was asked for and not given back; NaN where the C library cannot tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return float("nan")
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return float(info.uordblks + info.hblkhd) / (1 << 20)


def summary(samples: list[tuple[int, float]], answers: Counter[str]) -> dict[str, Any]:
    """Return memory after the first fifth, in which everything is used once."""
    later = [value for _, value in samples[len(samples) // 5 :]]
    return {
        "count": samples[-1][0],
        "least_mb": round(min(later), 1),
        "most_mb": round(max(later), 1),
        "answers": dict(sorted(answers.items())),
        "samples": [[count, round(value, 1)] for count, value in samples],
    }


def growth(samples: Any, begin: float, end: float) -> float:
    """Return by how much memory grew between two parts of the samples, by least squares, in MB."""
    some = np.array(samples[round(begin * len(samples)) : round(end * len(samples))])
    return float(np.polyfit(some[:, 0], some[:, 1], 1)[0] * (some[-1, 0] - some[0, 0]))


PARTS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "service": ("requests to the service", lambda folder: service(folder, REQUESTS - REQUESTS // 20)),
    "stream": (
        "requests with --stream",
        lambda folder: service(folder, REQUESTS // 20, "--stream", "state.json"),
    ),
    "console": ("frames of the console", partial(console, frames=FRAMES, label_every=2000)),
    "labels": ("labels of the console", partial(console, frames=3 * LABELS, label_every=3)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of the service and of the console over many hours' work.")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    torch.set_num_threads(1)
    record = stored("soak")
    for part in parser.parse_args().parts:
        with tempfile.TemporaryDirectory() as folder:
            record[part] = {"machine": machine(torch.device("cpu")), **PARTS[part][1](Path(folder))}
        print(part, record[part]["answers"], file=sys.stderr)
        write("soak", record)
    print(markdown(record))
    print(figure(record))


def markdown(record: dict[str, Any]) -> str:
    """Return a row for each part."""
    rows = []
    for name, (title, _) in PARTS.items():
        part = record[name]
        memory = f"{part['least_mb']:.0f} to {part['most_mb']:.0f}"
        early, late = (growth(part["samples"], *ends) for ends in ((0.2, 0.5), (0.5, 1)))
        rows.append([title, f"{part['count']:,}", memory, f"{early:.1f}", f"{late:.1f}"])
    heads = ["work", "number", "memory [MB]", "growth to the middle [MB]", "in the second half [MB]"]
    return markdown_table(heads, rows)


def figure(record: dict[str, Any]) -> Path:
    """Draw memory over the work of each part."""
    drawing = plots.new_figure(9, 5.5)
    for axes, (name, (title, _)) in zip(drawing.subplots(2, 2, sharey=True).flat, PARTS.items(), strict=True):
        counts, resident = zip(*record[name]["samples"], strict=True)
        axes.plot(counts, resident, label="resident")
        if in_use := record[name].get("in_use_mb"):
            axes.plot(counts[1:], in_use, "--", label="in use")
            axes.legend(loc="lower right")
        axes.set(xlabel=title, ylabel="memory [MB]")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    axes.set_ylim(0)
    drawing.savefig(IMAGE, dpi=150)
    return IMAGE


if __name__ == "__main__":
    main()
