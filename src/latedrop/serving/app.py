"""The service over HTTP: `POST /predict`, `POST /update`, `GET /healthz`, `GET /metrics`, and `GET /openapi.json`.

Every error is JSON, `{"error": "expected ...; found ...", "status": 422}`.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from latedrop.errors import ArgumentError, DataError, LatedropError, OutputError
from latedrop.serving.bodies import IMAGES, JSON, NPY, Limits, RefusalError, answer_bytes, rows_of
from latedrop.serving.service import Service
from latedrop.terminal import need
from latedrop.web import bearer_token, foreign_page, from_elsewhere, is_loopback, listening, serve_on

__all__ = ["check_address", "listen", "make_app"]

_log = logging.getLogger(__name__)
_LARGE = 64 << 10  # bytes; more are read and written in a thread, so that others are heard meanwhile
_LEAST_TOKEN, _MOST_AT_ONCE = 16, 1024
_Handler = Callable[[Service, Any], Awaitable[tuple[bytes, str, int]]]
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_LIST = {"type": "array", "items": {}}
_ROWS = {
    "type": "object",
    "properties": {
        "rows": {**_LIST, "description": "lists of numbers, or objects by the names of columns"},
        "inputs": {"type": "object", "description": "instead of rows: several inputs by name"},
        "dtype": {"type": "string", "default": "float64"},
        "level": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "ids": {**_LIST, "description": "names of the rows, in a stream"},
    },
    "example": {"rows": [[0.1, -1.2, 3.0]], "level": 0.9},
}
_LABELS = {"type": "object", "properties": {"ids": _LIST, "labels": _LIST}, "required": ["ids", "labels"]}


def make_app(service: Service, token: str | None = None, *, local: bool = True) -> Any:
    """A FastAPI application.

    Args:
        service: what answers.
        token: requests need the header `Authorization: Bearer TOKEN`.
        local: where there is no token, answer only requests from this machine that are addressed to it, and none of
            web pages; False leaves it to the application that this one is mounted in.
    """
    need("serve", "fastapi", "uvicorn")
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    def answering(handle: _Handler) -> Any:
        async def answer(request: Request) -> Response:
            start, rows = time.perf_counter(), 0
            try:
                if token is not None and not hmac.compare_digest(bearer_token(request), token.encode()):
                    raise RefusalError(
                        "expected the header Authorization: Bearer TOKEN, with the service's token; found another.", 401
                    )
                body, kind, rows = await handle(service, request)
                response = Response(body, media_type=kind)
            except Exception as error:
                response = _error(*_explained(error))
            service.counts.answered(request.url.path, response.status_code, time.perf_counter() - start, rows)
            return response

        return answer

    async def healthz() -> Response:
        state = {"status": "ok" if service.healthy else "stopping"}
        return Response(json.dumps(state), 200 if service.healthy else 503, media_type=JSON)

    async def other(request: Request, error: Any) -> Any:
        message = f"expected one of the paths of /openapi.json; found {request.method} {request.url.path[:80]}."
        return _error(error.status_code, message)

    # FastAPI's own pages of documentation load scripts from the network.
    app = FastAPI(title="latedrop", lifespan=lifespan, docs_url=None, redoc_url=None)
    if token is None and local:
        app.add_middleware(_Local)
    kinds = {JSON: {"schema": _ROWS}, NPY: _BINARY}
    kinds |= dict.fromkeys(IMAGES, _BINARY) if service.form.transform is not None else {}
    level = {"name": "level", "in": "query", "required": False, "schema": {"type": "number"}}
    predicts = {"requestBody": {"required": True, "content": kinds}, "parameters": [level]}
    summary = "Mean, std, low and high of every row; of classes, their probabilities"
    app.post("/predict", summary=summary, openapi_extra=predicts)(answering(_predict))
    if service.stream is not None:
        labels = {"requestBody": {"required": True, "content": {JSON: {"schema": _LABELS}}}}
        app.post("/update", summary="Labels of rows", openapi_extra=labels)(answering(_update))
    app.get("/metrics", summary="Counts, for Prometheus")(answering(_metrics))
    app.get("/healthz", summary="200 while requests are taken")(healthz)
    app.head("/healthz", include_in_schema=False)(healthz)
    app.add_exception_handler(HTTPException, other)
    return app


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
    wire, address = listening(host, port)
    ready(address.rstrip("/"))
    more: dict[str, Any] = {"timeout_keep_alive": 30, "limit_concurrency": _MOST_AT_ONCE, "ws": "none"}
    serve_on(wire, app, patience=int(limits.timeout) + 1, **more)


class _Local:
    """Refuses requests of web pages, and to names that point here (DNS rebinding): nobody without a token reads."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from fastapi import Request

        answer = self._app
        if scope["type"] == "http":
            request = Request(scope)
            why = foreign_page(request) or from_elsewhere(request)
            if why is not None:
                answer = _error(403, f"{why} Others need a service with a token.")
        await answer(scope, receive, send)


async def _predict(service: Service, request: Any) -> tuple[bytes, str, int]:
    limits, start = service.limits, time.monotonic()
    body = await _body(request, limits.body_bytes, limits.timeout)
    level = request.query_params.get("level")
    asked = await _off(len(body), rows_of, body, _kind(request), service.form, limits, _number(level))
    waiting = asyncio.wrap_future(service.submit(asked))
    try:
        answer = await asyncio.wait_for(waiting, max(0.001, limits.timeout - (time.monotonic() - start)))
    except (TimeoutError, asyncio.TimeoutError):
        raise RefusalError(
            f"expected to answer within {limits.timeout:g} s; it took longer. Ask for less.", 503
        ) from None
    size = sum(values.nbytes for values in answer.columns.values())
    return await _off(size, answer_bytes, answer.columns, answer.about), JSON, asked.rows


async def _update(service: Service, request: Any) -> tuple[bytes, str, int]:
    body = await _body(request, service.limits.body_bytes, service.limits.timeout)
    if _kind(request) != JSON:
        raise RefusalError(f"expected Content-Type {JSON} for labels; found another.", 415)
    return json.dumps(await asyncio.to_thread(service.update, body)).encode(), JSON, 0


async def _metrics(service: Service, request: Any) -> tuple[bytes, str, int]:
    return service.counts.text(service.gauges()).encode(), "text/plain; version=0.0.4", 0


def _kind(request: Any) -> str:
    """Return the Content-Type without its parameters."""
    return str(request.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def _body(request: Any, most: int, timeout: float) -> bytes:
    """The bytes of a request, given up where they are too many or too slow."""

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if max(len(body), int(request.headers.get("content-length", "0"))) > most:
                raise RefusalError(f"expected a body of at most {most} bytes; found more. Send fewer rows.", 413)
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), timeout)
    except (TimeoutError, asyncio.TimeoutError):
        raise RefusalError(f"expected the whole body within {timeout:g} s; it did not come.", 408) from None


async def _off(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it here where there is little to do, else in a thread."""
    return await asyncio.to_thread(function, *arguments) if size > _LARGE else function(*arguments)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise RefusalError(f"expected level as a number; found {str(text)[:40]!r}.") from None


def _explained(error: Exception) -> tuple[int, str]:
    """Return the status and the message for an error."""
    if isinstance(error, LatedropError):
        refused = isinstance(error, (DataError, ArgumentError, OutputError))
        return getattr(error, "status", 422 if refused else 500), str(error)
    _log.error("a request failed", exc_info=error)
    return 500, f"{type(error).__name__}, which was not foreseen: the service's log has more."


def _error(status: int, message: str) -> Any:
    from fastapi.responses import JSONResponse

    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}.get(status)
    return JSONResponse({"error": message, "status": status}, status, headers)
