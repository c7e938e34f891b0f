"""`latedrop serve` as a process: where it listens, how it ends."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from latedrop.serving.app import check_address
from saved import save_calibrated

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

CODE = """
import time
import torch
from torch import nn

class Slow(nn.Sequential):
    def forward(self, x):
        if x.shape[0] == 1 and float(x[0, 0]) == 7.0:
            time.sleep(0.5)
        return super().forward(x)

torch.manual_seed(0)
net = Slow(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
"""
RUN = uvicorn.Server.run
ENDS_CLEANLY = (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("served")
    save_calibrated(where, "net_code", CODE, "net", 3)
    return where


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", "from latedrop.cli import main; main()", "serve", "net_code:net", "cal.json"]
    environment = {name: value for name, value in os.environ.items() if name != "LATEDROP_TOKEN"}
    process = subprocess.Popen(
        [*command, "--port", "0", *options], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stderr.readline()
        match = re.search(r"http://\S+?:\d+", line)
        assert match, line + process.stderr.read()
        for _ in range(200):
            try:
                httpx.get(f"{match[0]}/healthz")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield process, match[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_it_finishes_what_it_took(folder: Path) -> None:
    with served(folder) as (process, url), ThreadPoolExecutor(1) as pool:
        assert url.startswith("http://127.0.0.1:")
        assert httpx.post(f"{url}/predict", json={"rows": [[1, 2, 3]]}).status_code == 200
        taken = pool.submit(httpx.post, f"{url}/predict", json={"rows": [[7, 2, 3]]}, timeout=20)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert taken.result(20).status_code == 200
        assert process.wait(20) in ENDS_CLEANLY
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_need_a_token(host: str) -> None:
    with pytest.raises(ValueError, match=r"expected a token for .*LATEDROP_TOKEN"):
        check_address(host, None)
    check_address(host, "0123456789abcdef")
    with pytest.raises(ValueError, match="at least 16"):
        check_address(host, "short")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    check_address(host, None)


class Clients:
    """Numbered requests over connections that stay open, each sent as soon as the last was answered."""

    def __init__(self, place: tuple[str, int], count: int) -> None:
        self.sent: set[int] = set()
        self.answered: set[int] = set()
        self.resets: list[str] = []
        self._threads = [Thread(target=self._ask, args=(place, i)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, place: tuple[str, int], first: int) -> None:
        wire = http.client.HTTPConnection(*place, timeout=30)
        for number in range(1_000_000 * first, 1_000_000 * (first + 1)):
            try:
                self.sent.add(number)
                wire.request("POST", f"/{number}", b"x")
                wire.getresponse().read()
            except OSError as error:
                self.resets.append(f"{number}: {error!r}")
                break
            self.answered.add(number)
            if wire.sock is None:  # the answer said that the connection ends
                break
        wire.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)


def answering(seconds: float = 0.0, taken: set[int] | None = None) -> Any:
    """An application that answers every request with the two letters ok, after a while, and notes its number."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            if taken is not None:
                taken.add(int(scope["path"][1:]))
            await asyncio.sleep(seconds)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    return app


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, app: Any, **options: Any) -> Iterator[tuple[tuple[str, int], Any]]:
    """Serve an application in a thread, which has to end in time; give the address and a function that stops it."""
    from latedrop import web

    servers: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, wire: (servers.append(self), RUN(self, wire)))
    wire, _ = web.listening("127.0.0.1", 0)
    thread = Thread(target=web.serve_on, args=(wire, app), kwargs=options)
    thread.start()
    try:
        yield wire.getsockname(), lambda: servers[0].handle_exit(signal.SIGTERM, None)
        thread.join(60)
        assert not thread.is_alive()
    finally:
        servers[0].should_exit = True


@pytest.mark.parametrize("work", [0.0, 0.02], ids=["quick", "slow"])
def test_no_request_is_lost_when_the_server_stops_under_load(work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[int] = set()
    with listening(monkeypatch, answering(work, taken), patience=20) as (place, stop):
        clients = Clients(place, 64)
        while len(taken) < 500:
            time.sleep(0.01)
        stop()
    clients.join()
    assert not clients.resets
    assert taken == clients.answered == clients.sent


def test_what_is_sent_on_an_open_connection_while_the_server_stops_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.web.LAST_CALL", 20.0)
    with listening(monkeypatch, answering()) as (place, stop):
        wire = http.client.HTTPConnection(*place, timeout=30)
        wire.request("GET", "/")
        assert wire.getresponse().read() == b"ok"
        stop()
        time.sleep(0.5)  # the server has noticed
        wire.request("GET", "/")
        last = wire.getresponse()
        assert (last.read(), last.headers["connection"]) == (b"ok", "close")
        wire.close()


def test_a_head_that_does_not_come_takes_no_place_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.web.HEAD_SECONDS", 0.3)
    # It works longer than a head may take: what was asked is answered.
    with listening(monkeypatch, answering(0.6)) as (place, stop):
        address = f"http://{place[0]}:{place[1]}"
        with socket.create_connection(place) as silent, socket.create_connection(place) as half:
            half.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
            assert httpx.get(address).text == "ok"
            for connection in (silent, half):
                connection.settimeout(10)
                assert connection.recv(1) == b""  # closed by the server
        with httpx.Client() as client:
            assert [client.get(address).text for _ in range(2)] == ["ok", "ok"]
        stop()
