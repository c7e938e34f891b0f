"""What every page of ours has: files by name, headers on every answer, requests that stay small, errors as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from latedrop.errors import FileError, LatedropError
from latedrop.web.access import HEADERS, refused

__all__ = ["LARGEST", "make_pages"]

LARGEST = 262_144
"""Bytes of a request."""
_SHARED = Path(__file__).parent / "page"
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


def make_pages(
    title: str,
    folder: Path,
    tokens: Mapping[str, str] = {},
    lifespan: Any = None,
    forbidden: Callable[[Request], str | None] = lambda request: None,
) -> FastAPI:
    """An application that serves `index.html` of a folder, and by name its other files and those that pages share.

    Args:
        title: of the application.
        folder: with `index.html` and what it loads.
        tokens: by role; without any the page is for this machine alone.
        lifespan: of the application, as FastAPI takes it.
        forbidden: why a request may not be answered, in words; None where it may. See `access.ROLE`.
    """
    app = FastAPI(title=title, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, tokens=tokens, forbidden=forbidden)
    # Nothing that is asked for becomes a path.
    files = {path.name: path for where in (_SHARED, folder) for path in where.iterdir() if path.suffix in _KINDS}

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


class _Guard:
    """Lets in who may ask, and no more bytes than `LARGEST`, counted as they come: a length need not be told."""

    def __init__(self, app: Any, tokens: Mapping[str, str], forbidden: Callable[[Request], str | None]) -> None:
        self._app, self._tokens, self._forbidden = app, tokens, forbidden

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
        why = self._forbidden(request) if answer is None else None
        if why is not None:
            answer = _said(403, why)
        told = request.headers.get("content-length", "")
        if answer is None and told.isdecimal() and int(told) > LARGEST:
            answer = _said(413, _TOO_LARGE)
        await (answer or self._app)(scope, counted, with_headers)


_TOO_LARGE = f"expected at most {LARGEST} bytes."


def _said(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, dict(headers or {}))
