"""What the console's pages share: files by name, headers on every answer, small requests, errors as JSON, tokens.

A token leaves the address at once, and stays in a cookie. Several tokens stand for several roles.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from latedrop import LatedropError
from latedrop.errors import FileError
from latedrop.web.access import bearer_token, foreign_page, from_elsewhere

__all__ = ["ROLES", "make_pages", "role_of"]

LARGEST = 262_144
"""Bytes of a request."""
COOKIE = "latedrop_token"
"""The name of the cookie that holds a token."""
ROLES = ("view", "label", "configure")
"""What a token allows: to look; also to label frames, acknowledge alarms and take snapshots; also all else."""
_LABELLING = re.compile(r"/api/(alarms/.*|sources/\d+/(freeze|snapshot|frames/.*))")
_ROLE = "latedrop.role"
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
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


def make_pages(tokens: Mapping[str, str], lifespan: Any) -> FastAPI:
    """An application that serves `index.html` and, by name, what it loads; `tokens` are by role, see `ROLES`."""
    app = FastAPI(title="latedrop console", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, tokens=tokens)
    # Nothing that is asked for becomes a path.
    folder = Path(__file__).parent / "page"
    files = {path.name: path for path in folder.iterdir() if path.suffix in _KINDS}

    @app.api_route("/", methods=["GET", "HEAD"])
    def page() -> Response:
        return Response(files["index.html"].read_bytes(), media_type="text/html")

    @app.api_route("/page/{name}", methods=["GET", "HEAD"])
    def part(name: str) -> Response:
        path = files.get(name)
        if path is None:
            return _said(404, "there is no such file")
        return Response(path.read_bytes(), media_type=_KINDS[path.suffix])

    @app.exception_handler(LatedropError)
    async def wrong(request: Request, error: LatedropError) -> Response:
        return _said(500 if isinstance(error, FileError) else 400, str(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return _said(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def misread(request: Request, error: RequestValidationError) -> Response:
        # Not what was found: numbers and letters that no answer can hold may be among it.
        told = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:3])
        return _said(422, f"expected another request; {told}.")

    return app


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
        request.scope[_ROLE] = role
        return None
    return JSONResponse({"error": "expected a token: open the address that the command printed, with ?token=...."}, 401)


def _role(words: bytes, tokens: Mapping[str, str]) -> str | None:
    """Whose token it is; all are compared, so that the time tells nothing."""
    roles = [role for role, token in tokens.items() if hmac.compare_digest(words, token.encode())]
    return roles[0] if roles else None


def role_of(request: Request) -> str:
    """The role of a request that was let in; without tokens everybody may do all."""
    role: str = request.scope.get(_ROLE, ROLES[-1])
    return role


def _forbidden(request: Request) -> str | None:
    """Why the role of a request does not allow it, in words; None where it does."""
    wanted = "label" if _LABELLING.fullmatch(request.scope["path"]) else "configure"
    if request.method in ("GET", "HEAD") or ROLES.index(role_of(request)) >= ROLES.index(wanted):
        return None
    return f"expected the token to {wanted}; this one is to {role_of(request)}. Open the console with another token."


class _Guard:
    """Lets in who may ask, and no more bytes than `LARGEST`, counted as they come: a length need not be told."""

    def __init__(self, app: Any, tokens: Mapping[str, str]) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, size = Request(scope), 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LARGEST:
                raise HTTPException(413, _TOO_LARGE)
            return message

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = refused(request, self._tokens)
        why = _forbidden(request) if answer is None else None
        if why is not None:
            answer = _said(403, why)
        told = request.headers.get("content-length", "")
        if answer is None and told.isdecimal() and int(told) > LARGEST:
            answer = _said(413, _TOO_LARGE)
        await (answer or self._app)(scope, counted, with_headers)


_TOO_LARGE = f"expected at most {LARGEST} bytes."


def _said(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, dict(headers or {}))
