"""Who may ask: where there is a token, whoever knows it; else the local address; and no page but our own.

A request is local where it comes from the loopback address and is addressed to it: a name that an attacker's page has
made to point here (DNS rebinding) is another one. What a proxy on this machine hands on looks local as well, so a token
is asked of everybody. Requests that change something must come from our own page.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from latedrop.addresses import is_loopback

__all__ = ["COOKIE", "HEADERS", "refused"]

COOKIE = "latedrop_token"
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


def refused(request: Request, token: str | None) -> Response | None:
    """The answer to a request that is not allowed; None where it is."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return _no(403, "expected a request of this server's own page; this one comes from another.")
    client = request.client.host if request.client is not None else ""
    if token is None and is_loopback(client) and is_loopback(_name(host)):
        return None
    given = request.query_params.get("token")
    if token is not None and given is not None and hmac.compare_digest(given.encode(), token.encode()):
        # The token leaves the address at once, and stays in a cookie that scripts cannot read.
        answer = RedirectResponse(request.url.path, 303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", max_age=30 * 86400)
        return answer
    words = request.headers.get("authorization", "").removeprefix("Bearer ") or request.cookies.get(COOKIE, "")
    if token is not None and hmac.compare_digest(words.encode(), token.encode()):
        return None
    if token is None:
        return _no(
            403,
            f"expected a request from this machine that is addressed to it, as http://127.0.0.1/ or http://localhost/ "
            f"are; found one to {_name(host)[:80]!r}. Open the address that the command printed.",
        )
    return _no(401, "expected a token: open the address that the command printed, with ?token=....")


def _name(host: str) -> str:
    """The header Host without its port; nothing where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _no(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)
