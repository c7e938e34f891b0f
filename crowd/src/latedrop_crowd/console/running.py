"""Serve the console until somebody stops it."""

from __future__ import annotations

import ctypes
import secrets
import sys
from collections.abc import Callable, Mapping
from urllib.parse import quote

from latedrop.errors import ArgumentError
from latedrop.web import is_loopback
from latedrop.web.listening import listening, serve_on
from latedrop_crowd.console.server import ROLES, make_app
from latedrop_crowd.console.watch import Watch

__all__ = ["serve"]

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def serve(watch: Watch, host: str, port: int, tokens: Mapping[str, str | None], say: Callable[[str], object]) -> None:
    """Open the address and serve; returns when the process is asked to stop.

    Args:
        watch: what is shown.
        host: address to listen on.
        port: of it; 0 takes a free one.
        tokens: what requests must know, by role; that to configure is made up where it is None and others can reach
            the address, or have tokens.
        say: called with the address to open, once for each role.
    """
    given = {role: token for role, token in tokens.items() if token is not None}
    if any(len(token) < 8 or not token.isascii() or not token.isprintable() for token in given.values()):
        raise ArgumentError("expected a token of 8 plain characters or more; found fewer, or others.")
    if len(set(given.values())) < len(given):
        raise ArgumentError("expected another token for each role; found one twice. Change one.")
    if given or not is_loopback(host):
        given.setdefault(ROLES[-1], secrets.token_urlsafe(18))
    if sys.platform == "linux":
        # Freed maps go back to the system at once; glibc would keep hundreds of megabytes of them.
        getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(_MMAP_THRESHOLD, 1 << 20)
    found, address = listening(host, port)
    for role, token in given.items():
        say(f"the console, to {role}, is at {address}?token={quote(token, safe='')}")
    if not given:
        say(f"the console is at {address}")
    app = make_app(watch, given)
    serve_on(found, app, app.state.hub.end)
