"""Where a service listens: only on the machine itself, unless it has a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from latedrop.addresses import is_loopback
from latedrop.errors import ArgumentError
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
    from latedrop.web.listening import listening, serve_on

    found, address = listening(host, port)
    ready(address.rstrip("/"))
    patience, most = int(limits.drain) + 1, 4 * limits.requests
    serve_on(found, app, patience=patience, timeout_keep_alive=30, limit_concurrency=most, ws="none")
