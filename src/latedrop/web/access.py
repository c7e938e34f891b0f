"""Who may ask: the local address, and no page but our own.

A request is local where it comes from the loopback address and is addressed to it: a name that an attacker's page has
made to point here (DNS rebinding) is another one. What a proxy on this machine hands on looks local as well, so that it
takes a token. Requests that change something must come from our own page.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Request

from latedrop.web import is_loopback

__all__ = ["bearer_token", "foreign_page", "from_elsewhere"]


def foreign_page(request: Request) -> str | None:
    """Why a request comes from a page of another server; None where it does not."""
    origin = request.headers.get("origin")
    if origin is None or origin.partition("://")[2] == request.headers.get("host", ""):
        return None
    return "expected a request of this server's own page; this one comes from another."


def from_elsewhere(request: Request) -> str | None:
    """Why a request is not from this machine and addressed to it; None where it is."""
    name = _name(request.headers.get("host", ""))
    client = request.client.host if request.client is not None else ""
    if is_loopback(client) and is_loopback(name):
        return None
    return (
        f"expected a request from this machine that is addressed to it, as http://127.0.0.1/ or http://localhost/ are; "
        f"found one to {name[:80]!r}. Open the address that the command printed."
    )


def bearer_token(request: Request) -> bytes:
    """Return the token after `Bearer`, in any case of letters, in the header Authorization; else nothing."""
    scheme, _, words = request.headers.get("authorization", "").partition(" ")
    return words.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""


def _name(host: str) -> str:
    """The header Host without its port; nothing where it is none."""
    try:
        return "" if "@" in host else urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
