"""Listen on an address, and serve until somebody stops it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from latedrop.errors import ArgumentError

__all__ = ["listening", "serve_on"]


def listening(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket on an address, port 0 taking a free one, and how a browser calls it."""
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
    """Serve an application until SIGTERM or Ctrl-C.

    Args:
        wire: where it listens.
        app: the application.
        stopping: called when the process is asked to end, before open pages are waited for.
        patience: seconds that what was taken is waited for.
        more: settings of uvicorn.
    """
    usual: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "http": _Impatient}
    server = _Server(uvicorn.Config(app, timeout_graceful_shutdown=patience, **usual, **more))
    server.stopping = stopping
    server.config.app = server.closing(app)
    with wire:
        server.run([wire])


HEAD_SECONDS = 20.0
"""Within which the head of a request has to come: connections are counted, and one that says nothing takes a place."""


LAST_CALL = 0.5
"""Seconds that open connections have to send a request, after the server was asked to stop."""


class _Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes connections on which the head of a request does not come. Bodies have a limit of their own."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """Ends so that no request is lost: what comes on an open connection within `LAST_CALL` is answered.

    Each such answer says `Connection: close`, so that the client sends no more on it.
    """

    stopping: Callable[[], object] = staticmethod(lambda: None)

    def closing(self, app: Any) -> Any:
        """The application, which announces the end of connections when the server stops."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def last(message: Any) -> None:
                if self.should_exit and message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                await send(message)

            await app(scope, receive, last)

        return answer

    def handle_exit(self, sig: int, frame: object) -> None:
        """On Ctrl-C, or when the process is asked to end."""
        self.stopping()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, answer what comes on those that are there, and stop."""
        for server in self.servers:
            server.close()
        end = asyncio.get_running_loop().time() + LAST_CALL
        while self.server_state.connections and asyncio.get_running_loop().time() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
