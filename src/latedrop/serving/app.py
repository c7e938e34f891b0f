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
from functools import partial
from typing import Any

from latedrop.errors import ArgumentError, DataError, LatedropError, OutputError
from latedrop.serving.bodies import IMAGES, JSON, NPY, answer_bytes, rows_of
from latedrop.serving.limits import Limits, RefusalError
from latedrop.serving.service import Service
from latedrop.terminal import need
from latedrop.web import is_loopback

__all__ = ["check_address", "listen", "make_app"]

_log = logging.getLogger(__name__)
_LARGE = 64 << 10  # bytes; more are read and written in a thread, so that others are heard meanwhile
_LEAST_TOKEN = 16
_Handler = Callable[[Any], Awaitable[tuple[bytes, str, int]]]
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "status": {"type": "integer"}},
    "required": ["error", "status"],
}
_STATUSES = {
    400: "the body is damaged",
    401: "no token, or another one",
    408: "the body did not come in time",
    413: "too many bytes, rows or pixels",
    415: "an unknown Content-Type",
    422: "rows that cannot be predicted",
    429: "the queue is full: ask again after Retry-After seconds",
    500: "the model failed",
    503: "too late, too many at once, or stopping",
}
_RESPONSES = {
    status: {"description": text, "content": {JSON: {"schema": _ERROR}}} for status, text in _STATUSES.items()
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ROWS = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {}, "description": "lists of numbers, or objects by the names of columns"},
        "inputs": {"type": "object", "description": "instead of rows: several inputs by name"},
        "dtype": {"type": "string", "default": "float64"},
        "level": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "ids": {"type": "array", "items": {}, "description": "names of the rows, in a stream"},
    },
    "example": {"rows": [[0.1, -1.2, 3.0]], "level": 0.9},
}
_LABELS = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {}}, "labels": {"type": "array", "items": {}}},
    "required": ["ids", "labels"],
}


def make_app(service: Service, token: str | None = None, *, title: str = "latedrop", local: bool = True) -> Any:
    """A FastAPI application.

    Args:
        service: what answers.
        token: requests need the header `Authorization: Bearer TOKEN`.
        title: of the description.
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

    # FastAPI's own pages of documentation load scripts from the network.
    app = FastAPI(title=title, lifespan=lifespan, docs_url=None, redoc_url=None)
    if token is None and local:
        app.add_middleware(_Local)
    door = _Door(service, token)

    def respond(status: int, body: bytes, kind: str) -> Response:
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(body, status, headers, kind)

    def answering(handle: Callable[..., Any]) -> Any:
        async def answer(request: Request) -> Response:
            return respond(*await door.answer(request, partial(handle, service)))

        return answer

    async def healthz() -> Response:
        state = {"status": "ok" if service.healthy else "stopping"}
        return Response(json.dumps(state), 200 if service.healthy else 503, media_type=JSON)

    async def other(request: Request, error: Any) -> Response:
        message = f"expected one of the paths of /openapi.json; found {request.method} {request.url.path[:80]}."
        return respond(*_error(error.status_code, message))

    words = _described(service.form.transform is not None, service.stream is not None)
    app.post("/predict", **words["predict"])(answering(_predict))
    if service.stream is not None:
        app.post("/update", **words["update"])(answering(_update))
    app.get("/metrics", **words["metrics"])(answering(_metrics))
    app.get("/healthz", **words["healthz"])(healthz)
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
    from latedrop.web.listening import listening, serve_on

    wire, address = listening(host, port)
    ready(address.rstrip("/"))
    patience, most = int(limits.drain) + 1, 4 * limits.requests
    serve_on(wire, app, patience=patience, timeout_keep_alive=30, limit_concurrency=most, ws="none")


class _Local:
    """Refuses requests of web pages, and to names that point here (DNS rebinding): nobody without a token reads."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from fastapi import Request, Response

        from latedrop.web.access import foreign_page, from_elsewhere

        answer = self._app
        if scope["type"] == "http":
            request = Request(scope)
            why = foreign_page(request) or from_elsewhere(request)
            if why is not None:
                status, body, kind = _error(403, f"{why} Others need a service with a token.")
                answer = Response(body, status, media_type=kind)
        await answer(scope, receive, send)


class _Door:
    """Check the token and the number of requests at once, turn errors into JSON, and count."""

    def __init__(self, service: Service, token: str | None) -> None:
        self._service, self._inside = service, 0
        self._token = None if token is None else token.encode()

    async def answer(self, request: Any, handle: _Handler) -> tuple[int, bytes, str]:
        start, rows = time.perf_counter(), 0
        self._inside += 1
        try:
            self._check(request)
            body, kind, rows = await handle(request)
            answer = (200, body, kind)
        except Exception as error:
            answer = _explained(error)
        finally:
            self._inside -= 1
        self._service.counts.answered(request.url.path, answer[0], time.perf_counter() - start, rows)
        return answer

    def _check(self, request: Any) -> None:
        from latedrop.web.access import bearer_token

        if self._token is not None and not hmac.compare_digest(bearer_token(request), self._token):
            raise RefusalError(
                "expected the header Authorization: Bearer TOKEN, with the service's token; found another.", 401
            )
        if self._inside > self._service.limits.requests:
            raise RefusalError(
                f"expected at most {self._service.limits.requests} requests at once. Ask again later.", 503
            )


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
    too_large = RefusalError(f"expected a body of at most {most} bytes; found more. Send fewer rows.", 413)
    if int(request.headers.get("content-length", "0")) > most:
        raise too_large

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large
            parts.append(part)
        return b"".join(parts)

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


def _explained(error: Exception) -> tuple[int, bytes, str]:
    if isinstance(error, LatedropError):
        refused = isinstance(error, (DataError, ArgumentError, OutputError))
        return _error(getattr(error, "status", 422 if refused else 500), str(error))
    _log.error("a request failed", exc_info=error)
    return _error(500, f"{type(error).__name__}, which was not foreseen: the service's log has more.")


def _error(status: int, message: str) -> tuple[int, bytes, str]:
    return status, json.dumps({"error": message, "status": status}).encode(), JSON


def _described(images: bool, stream: bool) -> dict[str, dict[str, Any]]:
    """Summary, bodies and answers by path, as FastAPI's decorators take them."""
    bodies: dict[str, Any] = {JSON: {"schema": _ROWS}, NPY: _BINARY}
    bodies |= dict.fromkeys(IMAGES, _BINARY) if images else {}
    level = {"name": "level", "in": "query", "required": False, "schema": {"type": "number"}}
    predict = {"requestBody": {"required": True, "content": bodies}, "parameters": [level]}
    described: dict[str, dict[str, Any]] = {
        "predict": {
            "name": "predict",
            "summary": "Mean, std, low and high of every row; of classes, their probabilities",
            "responses": _RESPONSES,
            "openapi_extra": predict,
        },
        "metrics": {"name": "metrics", "summary": "Counts, for Prometheus"},
        "healthz": {"summary": "200 while requests are taken"},
    }
    if stream:
        labels = {"requestBody": {"required": True, "content": {JSON: {"schema": _LABELS}}}}
        described["update"] = {"name": "update", "summary": "Labels of rows", "responses": _RESPONSES}
        described["update"]["openapi_extra"] = labels
    return described
