"""Serve the console until somebody stops it."""

from __future__ import annotations

import ctypes
import secrets
import sys
from collections.abc import Callable
from urllib.parse import quote

from latedrop.addresses import is_loopback
from latedrop.errors import ArgumentError
from latedrop.web.listening import listening, serve_on
from latedrop_crowd.console.server import make_app
from latedrop_crowd.console.watch import Watch

__all__ = ["serve"]

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def serve(watch: Watch, host: str, port: int, token: str | None, say: Callable[[str], object]) -> None:
    """Open the address and serve; returns when the process is asked to stop.

    Args:
        watch: what is shown.
        host: address to listen on.
        port: of it; 0 takes a free one.
        token: what requests must know; made up where others can reach the address, and it is None.
        say: called with the address to open.
    """
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise ArgumentError("expected a token of 8 plain characters or more; found fewer, or others.")
    token = token or (None if is_loopback(host) else secrets.token_urlsafe(18))
    if sys.platform == "linux":
        # Freed maps go back to the system at once; glibc would keep hundreds of megabytes of them.
        getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(_MMAP_THRESHOLD, 1 << 20)
    found, address = listening(host, port)
    say(f"the console is at {address}" + ("" if token is None else f"?token={quote(token, safe='')}"))
    app = make_app(watch, token)
    serve_on(found, app, app.state.hub.end)
