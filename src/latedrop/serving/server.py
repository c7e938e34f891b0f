"""Where a service listens: only on the machine itself, unless it has a token."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from latedrop.addresses import is_loopback
from latedrop.errors import ArgumentError, LatedropError
from latedrop.serving.limits import Limits
from latedrop.terminal import need

__all__ = ["check_address", "listen"]

_LEAST_TOKEN = 16


def check_address(host: str, token: str | None) -> None:
    """Raise where others could reach the service without a token, or where that is easily guessed."""
    if token is not None and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable()):
        raise ArgumentError(
            f"expected a token of at least {_LEAST_TOKEN} plain characters; found {len(token)}. Make one: python -c "
            "'import secrets; print(secrets.token_urlsafe())'."
        )
    if token is None and not is_loopback(host):
        raise ArgumentError(
            f"expected a token for {host}, where others can reach the service; found none. Set LATEDROP_TOKEN or "
            "--token-file, or listen on 127.0.0.1."
        )


def listen(app: Any, host: str, port: int, limits: Limits, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was taken. `ready` is told the address."""
    need("serve", "fastapi", "uvicorn")
    import uvicorn

    if not 0 <= port <= 65535:
        raise ArgumentError(f"expected a port between 0 and 65535; found {port}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise LatedropError(
            f"expected to listen at {host}, port {port}; the system says: {error}. Pass another --port or --host."
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it; asyncio sets it elsewhere only
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.drain) + 1,
        limit_concurrency=4 * limits.requests,
        ws="none",
    )
    with sock:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{sock.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[sock])
