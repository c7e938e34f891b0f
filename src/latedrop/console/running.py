"""Serve the console until somebody stops it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

import uvicorn

from latedrop.addresses import is_loopback
from latedrop.console.server import make_app
from latedrop.console.watch import Watch
from latedrop.errors import ArgumentError

__all__ = ["serve"]


def serve(watch: Watch, host: str, port: int, token: str | None, say: Callable[[str], object]) -> None:
    """Open the address and serve; returns when the process is asked to stop.

    Args:
        watch: what is shown.
        host: address to listen on.
        port: of it; 0 takes a free one.
        token: what all but local requests must know; made up where it is needed and None.
        say: called with the address to open.
    """
    if token is not None and len(token) < 8:
        raise ArgumentError("expected a token of 8 characters or more; found a shorter one.")
    local = is_loopback(host)
    token = token or (None if local else secrets.token_urlsafe(18))
    listening = _listening(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    say(f"the console is at {address}{'' if token is None or local else f'?token={token}'}")
    app = make_app(watch, token)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1
    )
    server = _Server(settings)
    server.stopping = app.state.hub.end
    server.run([listening])


class _Server(uvicorn.Server):
    """Lets open pages go before it waits for them."""

    stopping: Callable[[], object] = staticmethod(lambda: None)

    def handle_exit(self, sig: int, frame: object) -> None:
        """On Ctrl-C, or when the process is asked to end."""
        self.stopping()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def _listening(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ArgumentError(f"expected a port from 0 to 65535; found {port}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)  # whoever comes before the server is up waits, and is not refused
    except OSError as error:
        found.close()
        raise ArgumentError(
            f"expected a free address to listen on; {host}:{port} is not: {error.strerror or error}. Pass "
            "another --port."
        ) from error
    return found
