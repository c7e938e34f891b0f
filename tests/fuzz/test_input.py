"""Damaged files and odd requests: each is understood, or refused in our words; nothing else is raised.

Seeded, and a fixed number of tries: about half a minute here; `make fuzz` tries ten times as many, and `make fuzz
FUZZ=150` for an hour. What once went wrong is tried first, every time.
"""

from __future__ import annotations

import io
import json
import os
import random
import socket
import sqlite3
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette import testclient

import latedrop
from counters import console
from latedrop.cli.tables import choose, open_table, read_batches
from latedrop.errors import FileError, LatedropError
from latedrop.onnx_files.metadata import sealed
from latedrop.records import checksum_of
from latedrop.serving import Limits, Service
from latedrop.serving.app import make_app
from latedrop.web import listening
from latedrop_crowd.console.server import make_app as console_app
from latedrop_crowd.console.sources import Camera, Shot
from latedrop_crowd.console.store import Store
from latedrop_crowd.scenes import make_scenes
from networks import mlp
from rounding import assert_same_up_to_rounding

FACTOR, SEED = int(os.environ.get("LATEDROP_FUZZ", "1")), os.environ.get("LATEDROP_FUZZ_SEED", "0")
STRANGE: list[Any] = [None, True, "x", "", -1, 0, 0.5, float("nan"), 1e300, 10**400, -(10**12), [], [[]], {}, "\ud800"]
HUGE = (
    b"9" * 400,
    b"1e999",
    b"-1",
    b"NaN",
    b"18446744073709551616",
    b"\x00",
    b"\xff\xfe",
    b"\r",
    b'"',
    b"=1+1",
    b"[" * 2000,
)
X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


def tries(name: str, count: int) -> Iterator[random.Random]:
    """Dice for each try, `count` of them in the quick suite."""
    for number in range(count * FACTOR):
        yield random.Random(f"{SEED} {name} {number}")


def damaged(content: bytes, dice: random.Random) -> bytes:
    """The content with one to three bits, numbers, pieces or ends that are others."""
    content_now = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        place = dice.randrange(len(content_now) + 1)
        kind = dice.randrange(6)
        if kind == 0 and place < len(content_now):
            content_now[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            content_now[place : place + dice.randrange(1, 9)] = dice.randbytes(dice.randrange(9))
        elif kind == 2:
            content_now[place : place + dice.randrange(9)] = dice.choice(HUGE)
        elif kind == 3:
            other = dice.randrange(len(content_now) + 1)
            content_now[place:place] = content_now[other : other + dice.randrange(1, 200)]
        elif kind == 4:
            del content_now[place : place + dice.randrange(1, 200)]
        elif kind == 5 and dice.random() < 0.3:
            del content_now[place:]
    return bytes(content_now)


def replaced(value: Any, dice: random.Random) -> Any:
    """The JSON value with something else at one place in it."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        return {**value, key: replaced(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        place = dice.randrange(len(value))
        return [*value[:place], replaced(value[place], dice), *value[place + 1 :]]
    return dice.choice(STRANGE)


@pytest.fixture(scope="module")
def predictor() -> Any:
    return latedrop.calibrate(mlp(3, 8, 1), (X, X[:, :1] ** 2), reference=X + 0.1, progress=False)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a file or a row is warned of is no error
        yield


def test_calibrations(predictor: Any, tmp_path: Path) -> None:
    path = tmp_path / "cal.json"
    predictor.save(path)
    content = path.read_bytes()
    document = json.loads(content)
    (name,) = (key for key in document if key != "checksum")
    for dice in tries("calibration", 150):
        path.write_bytes(damaged(content, dice))
        with suppress(LatedropError):
            latedrop.load(path, predictor.model)
        record = replaced(document[name], dice)
        with suppress(TypeError, ValueError):  # a checksum of what is no JSON
            path.write_text(json.dumps({name: record, "checksum": checksum_of(record)}))
        with suppress(LatedropError):
            latedrop.load(path, predictor.model).predict(X[:3]).interval(0.8)


def test_onnx_files(predictor: Any, tmp_path: Path, capfd: Any) -> None:

    path = predictor.to_onnx(tmp_path / "model.onnx", X[:4])
    content = path.read_bytes()
    model = content[: len(content) - len(sealed(b""))]
    assert sealed(model) == content
    for dice in tries("onnx", 300):
        other = damaged(content, dice)
        path.write_bytes(other)
        with pytest.raises(FileError) if other != content else nullcontext():
            latedrop.load_onnx(path)
    for dice in tries("sealed onnx", 60):  # on purpose, then: any numbers may come out, but no other error
        path.write_bytes(sealed(damaged(model, dice)))
        with suppress(LatedropError):
            latedrop.load_onnx(path).predict(X[:3])


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays) if len(arrays) > 1 else np.savez(file, **arrays)
    return file.getvalue()


def promising(shape: tuple[int, ...]) -> bytes:
    """A npz file whose head promises rows that are not there."""
    head, file = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", head.getvalue() + bytes(64))
    return file.getvalue()


CSV = "a,b,y\n" + "".join(f"{i / 3},{-i}e-3,{i}\n" for i in range(40))
TABLES = {
    ".csv": [
        *(CSV.encode(), CSV.encode("utf-16"), b"\xef\xbb\xbfa;b\n1,5;2\n", b'a,b\n"1\n2",3\n', b"a,b\r1,2\r3,4"),
        b"a,b\n" + b"1" * 200_000 + b",2\n",
    ],
    ".npz": [npz(x=X), npz(x=X, y=X[:, 0]), npz(x=np.asfortranarray(X)), promising((10**15, 3)), promising((-1, -8))],
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{kind}"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(LatedropError):
            table = open_table(str(path))
            assert (table.count or 0) < 10**6, "a head was believed"
            for rows in read_batches(table, choose(table), 16):
                assert len(rows.finite) <= 10**6

    for content in TABLES[kind]:
        read(content)
    for dice in tries(kind, 250):
        read(damaged(dice.choice(TABLES[kind]), dice))


def strict(content: bytes) -> Any:
    """JSON as other languages read it: without NaN."""
    return json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


BODIES = [
    ("application/json", b'{"rows": [[1, 2, 3]], "level": 0.9, "ids": ["a"]}'),
    ("application/json", b'{"inputs": {"input": [[1, 2, 3]]}, "dtype": "float32"}'),
    ("application/json", b'{"rows": [[1, 2, 3]], "level": ' + b"1" + b"0" * 400 + b"}"),
    ("application/json", b'{"ids": ["a"], "labels": [1e308]}'),
    ("application/json", b'{"ids": ["a"], "labels": [1e999]}'),
    ("application/x-npy", npy(X[:4])),
    ("application/x-npy", npy(np.asfortranarray(X[:4]))),
    ("application/vnd.apache.arrow.stream", b"\xff\xff\xff\xff\x70\x00\x00\x00" + bytes(64)),
    ("image/png", b"\x89PNG\r\n\x1a\n"),
]


def test_requests_to_the_service(predictor: Any) -> None:

    service = Service(predictor, limits=Limits(queue_rows=100, wait=0.0), stream=predictor.stream())
    with testclient.TestClient(make_app(service), "http://127.0.0.1:1", client=("127.0.0.1", 5)) as client:

        def ask(kind: str, body: bytes, path: str) -> None:
            answer = client.post(path, content=body, headers={"content-type": kind})
            assert answer.status_code in (200, 400, 413, 415, 422), (answer.text, body)
            actual = strict(answer.content)
            assert answer.status_code == 200 or actual["error"].startswith("expected"), actual

        for kind, body in BODIES:
            ask(kind, body, "/predict")
            ask(kind, body, "/update")
        for dice in tries("service", 400):
            kind, body = dice.choice(BODIES)
            if kind == "application/json" and dice.random() < 0.5:
                with suppress(ValueError):
                    body = json.dumps(replaced(json.loads(body), dice)).encode()
            ask(
                dice.choice((kind, kind, "application/json")), damaged(body, dice), dice.choice(("/predict", "/update"))
            )
        assert client.post("/predict", json={"rows": X[:1].tolist()}).status_code == 200


def http(kind: str, body: bytes, path: str = "/predict") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def answered(place: tuple[str, int], message: bytes, seconds: float) -> bytes:
    """Return the answer until the server closes the connection, or says nothing for some time."""
    answer = b""
    with suppress(OSError), socket.create_connection(place, seconds) as wire:
        wire.sendall(message)
        while part := wire.recv(65536):
            answer += part
    return answer


PATHS = ("/", "/update", "/predict/x", "/predict?level=nan", "/../etc/passwd", "/%ff%00", "http://evil/predict")
KINDS = ("", "text/html", "application/x-pickle", "multipart/form-data", "application/json; charset=utf-16")


def test_bytes_on_the_wire(predictor: Any) -> None:
    """Anything may be sent to the port: what is no request is refused or closed, and then others are answered."""

    actual, _ = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(Service(predictor)), log_level="critical"))
    thread = Thread(target=server.run, args=([actual],), daemon=True)
    thread.start()
    place = actual.getsockname()
    for dice in tries("wire", 60):
        kind, body = dice.choice(BODIES)
        message = dice.choice(
            (
                dice.randbytes(dice.randrange(1, 200)) + b"\r\n\r\n",
                http(kind, body, dice.choice(PATHS)),
                http(dice.choice(KINDS), body),
                damaged(http(kind, body), dice),
            )
        )
        assert answered(place, message, 0.2)[9:10] in (b"", b"1", b"2", b"4"), message
    answer = answered(place, http("application/json", json.dumps({"rows": X[:3].tolist()}).encode()), 60.0)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert_same_up_to_rounding(np.array(strict(body)["mean"], np.float32), predictor.predict(X[:3]).mean.numpy())
    server.should_exit = True
    thread.join(30)


SQUARE = [[0, 0], [0.6, 0], [0.6, 1], [0, 1]]
REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "sources/0/zones", {"name": "a", "points": SQUARE, "limit": 3}),
    ("PUT", "sources/0/zones/1", {"name": "a", "limit": 1e300}),
    ("DELETE", "sources/0/zones/2", None),
    ("POST", "sources/0/frames/1/label", {"people": 3, "heads": [[0.5, 0.5]]}),
    ("POST", "sources/0/frames/1/label", {"people": 3}),
    ("POST", "sources/0/freeze", None),
    ("POST", "sources/0/snapshot", None),
    ("POST", "sources/0/calibrations/1/restore", None),
    ("POST", "alarms/1/acknowledge", None),
    *(("GET", f"zones/1/timeline?seconds={size}", None) for size in ("60", "nan", "1e999", "-5", "9" * 400)),
    *(("GET", path, None) for path in ("state", "events", "events.csv", "sources/0/counts.csv?seconds=1e308")),
    *(("GET", path, None) for path in ("sources/0/layers/density", "pictures/1", "frames/1", f"frames/{10**30}")),
]


def test_requests_to_the_console(tmp_path: Path) -> None:
    pixels = make_scenes(0, 6, 0).frames[0].pixels
    watch = console(Store(tmp_path / "a.sqlite"), "door")
    watch.views[0].camera = Camera(watch.views[0].source, watch._arrived)
    watch._look(watch.views[0], Shot(1, 1e9, pixels[:80, :120], 0.0))
    watch.freeze(watch.views[0])
    client = testclient.TestClient(console_app(watch), "http://127.0.0.1:1", client=("127.0.0.1", 5))

    def ask(method: str, path: str, body: bytes | None) -> None:
        answer = client.request(method, f"/api/{path}", content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (method, path, body, answer.text)
        if "json" in answer.headers.get("content-type", ""):
            strict(answer.content)

    for method, path, body in REQUESTS:
        ask(method, path, None if body is None else json.dumps(body).encode())
    for dice in tries("console", 250):
        method, path, body = dice.choice(REQUESTS)
        if dice.random() < 0.3:
            path = "".join(str(dice.choice((-1, 0, 1, 2, 10**20, "x", "%00"))) if c.isdigit() else c for c in path)
        sent = None if body is None else json.dumps(replaced(body, dice)).encode()
        ask(method, path, damaged(sent, dice) if sent is not None and dice.random() < 0.5 else sent)
    watch.store.close()


def test_files_of_the_console(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    store = Store(path)
    zone = store.zones("door")[0].id
    store.add_counts((zone, float(i), 1.0, 0.0, 2.0, 0.1) for i in range(300))
    store.add_event("door", "alarm", "too many", zone, b"picture")
    store.close()
    content = path.read_bytes()
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE events (id INTEGER)")
    other.close()
    with pytest.raises(FileError, match="was not changed"):
        Store(foreign)
    for dice in tries("store", 60):
        path.write_bytes(damaged(content, dice))
        for end in ("-wal", "-journal"):
            Path(f"{path}{end}").unlink(missing_ok=True)
        with suppress(LatedropError):
            damaged_store = Store(path)
            try:
                damaged_store.timeline(damaged_store.zones("door")[0].id, 0, 1e9)
                damaged_store.events()
                damaged_store.add_event("door", "alarm", "again")
                damaged_store.tidy()
            finally:
                damaged_store.close()
