"""Who may ask: where there is a token, whoever knows it; else the local address; and no page but our own.

A request is local where it comes from the loopback address and is addressed to it: a name that an attacker's page has
made to point here (DNS rebinding) is another one. What a proxy on this machine hands on looks local as well, so a token
is asked of everybody. Requests that change something must come from our own page. Several tokens may stand for several
roles; which one a request has is in its scope, under `ROLE`.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from latedrop.web import is_loopback

__all__ = ["COOKIE", "HEADERS", "ROLE", "bearer_token", "foreign_page", "from_elsewhere", "refused"]

COOKIE = "latedrop_token"
"""The name of the cookie that holds a token."""
ROLE = "latedrop.role"
"""Under which the scope of a request has the role of its token."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""


def refused(request: Request, tokens: Mapping[str, str]) -> Response | None:
    """The answer to a request that is not allowed; None where it is. `tokens` are by their role; none: all is local."""
    why = foreign_page(request) or (None if tokens else from_elsewhere(request))
    if why is not None or not tokens:
        return None if why is None else JSONResponse({"error": why}, 403)
    given = request.query_params.get("token")
    role = None if given is None else _role(given.encode("utf-8", "replace"), tokens)
    if role is not None:
        # The token leaves the address at once, and stays in a cookie that scripts cannot read.
        answer = RedirectResponse(request.url.path, 303)
        answer.set_cookie(COOKIE, tokens[role], httponly=True, samesite="strict", max_age=30 * 86400)
        return answer
    role = _role(bearer_token(request) or request.cookies.get(COOKIE, "").encode("utf-8", "replace"), tokens)
    if role is not None:
        request.scope[ROLE] = role
        return None
    return JSONResponse({"error": "expected a token: open the address that the command printed, with ?token=...."}, 401)


def _role(words: bytes, tokens: Mapping[str, str]) -> str | None:
    """Whose token it is; all are compared, so that the time tells nothing."""
    roles = [role for role, token in tokens.items() if hmac.compare_digest(words, token.encode())]
    return roles[0] if roles else None


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
    """What follows `Bearer` in the header Authorization, in any case of letters; nothing where there is no such."""
    scheme, _, words = request.headers.get("authorization", "").partition(" ")
    return words.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""


def _name(host: str) -> str:
    """The header Host without its port; nothing where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
