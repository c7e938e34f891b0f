"""HTTP on this machine: who may ask, and where it is served. FastAPI and uvicorn are extras.

A request is local where it comes from the loopback address and is addressed to it: a name that an attacker's page has
made to point here (DNS rebinding) is another one. What a proxy on this machine hands on looks local as well, so that it
takes a token. Requests that change something must come from our own page.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from latedrop.errors import ArgumentError

if TYPE_CHECKING:
    from fastapi import Request

__all__ = ["bearer_token", "foreign_page", "from_elsewhere", "is_loopback", "listening", "serve_on"]

HEAD_SECONDS = 20.0
"""Without a request, after which a connection is closed: only so many may be open."""
LAST_CALL = 0.5
"""Seconds that open connections have to send a request, after the server was asked to stop."""


def is_loopback(host: str) -> bool:
    """Return True if a name or an address is this machine, as itself sees it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("192.168.0.7")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def foreign_page(request: Request) -> str | None:
    """Return why a request comes from a page of another server, or None if it does not."""
    origin = request.headers.get("origin")
    if origin is None or origin.partition("://")[2] == request.headers.get("host", ""):
        return None
    return "expected a request of this server's own page; this one comes from another."


def from_elsewhere(request: Request) -> str | None:
    """Return why a request is not from this machine and addressed to it, or None if it is."""
    host = request.headers.get("host", "")
    try:
        name = "" if "@" in host else urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    client = request.client.host if request.client is not None else ""
    if is_loopback(client) and is_loopback(name):
        return None
    return (
        f"expected a request from this machine that is addressed to it, as http://127.0.0.1/ or http://localhost/ are; "
        f"found one to {name[:80]!r}. Open the address that the command printed."
    )


def bearer_token(request: Request) -> bytes:
    """Return the token after `Bearer`, in any case, in the header Authorization; empty without one."""
    scheme, _, words = request.headers.get("authorization", "").partition(" ")
    return words.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""


def listening(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a socket on an address, port 0 taking a free one, and how a browser calls it."""
    if not 0 <= port <= 65535:
        raise ArgumentError(f"expected a port from 0 to 65535; found {port}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        wire = socket.create_server((host, port), family=family, backlog=2048)  # who comes before it is up waits
    except OSError as error:
        raise ArgumentError(
            f"expected a free address to listen on; {host}:{port} is not: {error.strerror or error}. Pass "
            "another --port."
        ) from error
    # Connections inherit it; asyncio sets it elsewhere only.
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return wire, f"http://{f'[{host}]' if ':' in host else host}:{wire.getsockname()[1]}/"


def serve_on(
    wire: socket.socket, app: Any, stopping: Callable[[], object] = lambda: None, patience: int = 1, **more: Any
) -> None:
    """Serve an application until SIGTERM or Ctrl-C, then answer what was taken.

    Args:
        wire: where it listens.
        app: the application.
        stopping: called when the process is asked to end, before open pages are waited for.
        patience: seconds that what was taken is waited for.
        more: settings of uvicorn.
    """
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Closes connections on which no request comes: uvicorn waits for a head without end."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(HEAD_SECONDS, self._look, (None, True))

        def _look(self, before: Any) -> None:
            now = self.cycle, self.cycle is None or self.cycle.response_complete
            if now == before and now[1]:
                self.transport.close()
            elif not self.transport.is_closing():
                self.loop.call_later(HEAD_SECONDS, self._look, now)

    class Server(uvicorn.Server):
        """Loses no request at its end: what comes on an open connection within `LAST_CALL` is answered, the last."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            stopping()
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for server in self.servers:
                server.close()
            end = time.monotonic() + LAST_CALL
            while self.server_state.connections and time.monotonic() < end and not self.force_exit:
                await asyncio.sleep(0.02)
            await super().shutdown(sockets)

    async def closing(scope: Any, receive: Any, send: Any) -> None:
        async def last(message: Any) -> None:
            if server.should_exit and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, last)

    usual: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "http": Protocol}
    server = Server(uvicorn.Config(closing, timeout_graceful_shutdown=patience, **usual, **more))
    with wire:
        server.run([wire])
