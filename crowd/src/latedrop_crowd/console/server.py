"""Serve the page of the console over HTTP: JSON, pictures, and a stream of server-sent events.

A `Hub` passes messages from the counting thread to every open page; a slow page misses messages, and blocks no other.

Every response has security headers, the size of requests is limited, and errors are JSON. A token in the address is
moved to a cookie at once. Each role has its own token.
"""

import asyncio
import hmac
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from latedrop import LatedropError
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.files import csv_line
from latedrop.web import bearer_token, foreign_page, from_elsewhere, is_loopback, listening, serve_on
from latedrop_crowd.console.daily import day_page, hours_table
from latedrop_crowd.console.pictures import density_layer
from latedrop_crowd.console.watch import View, Watch
from latedrop_crowd.console.zones import cells_of, drawn_points
from latedrop_crowd.regions import Policy

__all__ = ["make_app", "serve"]

_LONGEST = 86400.0 * 31
_Id = Annotated[int, InPath(ge=0, lt=2**63)]
_Seconds = Annotated[float, Query(allow_inf_nan=False)]
_Part = Annotated[float, Field(ge=0, le=1)]


class ZoneWords(BaseModel):
    """Describe a zone in a request of the page."""

    name: str = Field(min_length=1, max_length=60)
    points: list[tuple[float, float]] = Field(default_factory=list, max_length=64)
    limit: float | None = Field(default=None, ge=0, le=1e6)


class LabelWords(BaseModel):
    """Describe a label: a number of people, or heads as x, y in [0, 1] of the picture."""

    people: float | None = Field(default=None, ge=0, le=1e5)
    heads: list[tuple[_Part, _Part]] | None = Field(default=None, max_length=5000)


def make_app(watch: Watch, tokens: Mapping[str, str] = {}) -> FastAPI:
    """Make the application, which starts and stops `watch`. `tokens` are given by role, see `ROLES`."""
    hub = Hub()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        hub.begin()
        watch.tell = hub.tell
        watch.start()
        yield
        watch.close()

    app = FastAPI(title="latedrop console", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, tokens=tokens)
    app.state.hub = hub

    @app.get("/api/stream")
    def stream() -> Response:
        return StreamingResponse(hub.listen(), media_type="text/event-stream")

    _page(app)
    _looking(app, watch)
    _zones(app, watch)
    _labels(app, watch)
    _files(app, watch)
    return app


def _note(watch: Watch, request: Request, source: str, text: str, zone: int | None = None) -> None:
    """Store an audit event: the change, the role and the address of the client."""
    client = "" if request.client is None else f" from {request.client.host}"
    watch.store.add_event(source, "change", f"{text} (by {role_of(request)}{client})", zone)


def _looking(app: FastAPI, watch: Watch) -> None:
    """Add the routes for viewing, and for acknowledging alarms."""

    @app.get("/api/state")
    def state(request: Request) -> dict[str, Any]:
        rule = watch.settings.rule
        return {
            "role": role_of(request),
            "level": watch.settings.level,
            "sure": rule.sure,
            "hold": rule.hold,
            "sources": [_about(view) for view in watch.views],
            "events": watch.store.events(100),
            "alarms": watch.store.open_alarms(),
            "notices": {"targets": len(watch.notices.targets), "dropped": watch.notices.dropped},
        }

    @app.get("/api/events")
    def events() -> dict[str, Any]:
        return {"events": watch.store.events(100), "alarms": watch.store.open_alarms()}

    @app.get("/api/sources/{number}/picture")
    def picture(number: int, mapped: bool = False) -> Response:
        view = watch.view(number)
        shot = view.shown(mapped=mapped)
        if shot is None:
            return _image(None, "image/jpeg")
        return Response(view.picture_of(shot), media_type="image/jpeg", headers={"X-Frame-Time": f"{shot.time:.3f}"})

    @app.get("/api/sources/{number}/layers/{kind}")
    def layer(number: int, kind: str, mapped: bool = False) -> Response:
        return _image(watch.view(number).layer(kind, mapped=mapped), "image/png")

    @app.get("/api/sources/{number}/heat")
    def heat(number: int, since: _Seconds, until: _Seconds) -> Response:
        with watch.lock:
            mean, frames = watch.view(number).heat.mean(max(since, until - _LONGEST), until)
        if not frames:
            return _image(None, "image/png")
        return Response(density_layer(mean), media_type="image/png", headers={"X-Frames": str(frames)})

    @app.get("/api/zones/{zone}/timeline")
    def timeline(zone: _Id, seconds: _Seconds = 60.0) -> dict[str, Any]:
        until = time.time()
        since = until - min(max(seconds, 1.0), _LONGEST)
        rows = watch.store.timeline(zone, since, until)
        return {"since": since, "until": until, "rows": [[_short(value) for value in row] for row in rows]}

    @app.post("/api/alarms/{event}/acknowledge")
    def acknowledge(event: _Id, request: Request) -> dict[str, Any]:
        done = watch.store.acknowledge(event)
        if done:
            _note(watch, request, "", f"alarm {event} acknowledged")
        return {"done": done, "alarms": watch.store.open_alarms()}


def _zones(app: FastAPI, watch: Watch) -> None:
    """Add the routes that change zones."""

    @app.post("/api/sources/{number}/zones")
    def add(number: int, words: ZoneWords, request: Request) -> dict[str, Any]:
        view = watch.view(number)
        _check_cells(view, words.points)
        zone = watch.store.add_zone(view.name, words.name.strip() or "Zone", words.points, words.limit)
        watch.zones_changed(view)
        _note(watch, request, view.name, f"zone {words.name.strip()!r} added, limit {_limit(words)}", zone)
        return {"id": zone, "zones": [z.to_dict() for z in view.zones]}

    @app.put("/api/sources/{number}/zones/{zone}")
    def change(number: int, zone: _Id, words: ZoneWords, request: Request) -> dict[str, Any]:
        view = _with_zone(watch, number, zone)
        if words.points:
            _check_cells(view, words.points)
        watch.store.change_zone(zone, words.name.strip() or "Zone", words.limit, words.points)
        watch.zones_changed(view)
        corners = ", other corners" if words.points else ""
        _note(watch, request, view.name, f"zone {words.name.strip()!r} changed, limit {_limit(words)}{corners}", zone)
        return {"zones": [z.to_dict() for z in view.zones]}

    @app.delete("/api/sources/{number}/zones/{zone}")
    def remove(number: int, zone: _Id, request: Request) -> dict[str, Any]:
        view = _with_zone(watch, number, zone)
        name = next(z.name for z in view.zones if z.id == zone)
        watch.store.remove_zone(zone)
        watch.zones_changed(view)
        _note(watch, request, view.name, f"zone {name!r} removed", zone)
        return {"zones": [z.to_dict() for z in view.zones]}


def _labels(app: FastAPI, watch: Watch) -> None:
    """Add the routes for frames, labels and calibrations."""

    @app.get("/api/sources/{number}/labels")
    def labels(number: int) -> dict[str, Any]:
        return _learned(watch, watch.view(number))

    @app.post("/api/sources/{number}/freeze")
    def freeze(number: int) -> dict[str, Any]:
        view = watch.view(number)
        frame = watch.freeze(view)
        return {"id": frame, **_learned(watch, view)}

    @app.post("/api/sources/{number}/frames/{frame}/label")
    def label(number: int, frame: _Id, words: LabelWords, request: Request) -> dict[str, Any]:
        view = watch.view(number)
        heads = None if words.heads is None else float(len(words.heads))
        people = heads if words.people is None else words.people
        if people is None or heads not in (None, people):
            numbers = "neither" if people is None else f"{people:g} people and {heads:g} heads"
            raise DataError(
                f"expected a number of people, or as many heads; found {numbers}. Count again, or mark every head."
            )
        message = watch.label(view, frame, people, words.heads)
        _note(watch, request, view.name, f"frame {frame} labelled, {people:g} people")
        return {"said": message, **_learned(watch, view)}

    @app.delete("/api/sources/{number}/frames/{frame}/label")
    def unlabel(number: int, frame: _Id, request: Request) -> dict[str, Any]:
        view = watch.view(number)
        message = watch.label(view, frame, None)
        _note(watch, request, view.name, f"label of frame {frame} deleted")
        return {"said": message, **_learned(watch, view)}

    @app.delete("/api/sources/{number}/frames/{frame}")
    def drop(number: int, frame: _Id, request: Request) -> dict[str, Any]:
        view = watch.view(number)
        watch.store.drop_frame(frame)
        _note(watch, request, view.name, f"frame {frame} dropped")
        return _learned(watch, view)

    @app.get("/api/frames/{frame}")
    def frame_picture(frame: _Id) -> Response:
        row = watch.store.frame(frame)
        return _image(None if row is None else bytes(row["jpeg"]), "image/jpeg")

    @app.post("/api/sources/{number}/calibrations/{calibration}/restore")
    def restore(number: int, calibration: _Id, request: Request) -> dict[str, Any]:
        view = watch.view(number)
        watch.restore(view, calibration)
        _note(watch, request, view.name, f"calibration {calibration} restored")
        return _learned(watch, view)


def _files(app: FastAPI, watch: Watch) -> None:
    """Add the routes for snapshots, pictures, reports and CSV files."""

    @app.post("/api/sources/{number}/snapshot")
    def snapshot(number: int) -> dict[str, Any]:
        view = watch.view(number)
        shot, count = view.shown(), view.message.get("zones", [{}])[0]
        text = "snapshot"
        if count.get("count") is not None:
            text = f"snapshot: {count['count']:.0f} people, {count['low']:.0f} to {count['high']:.0f}"
        picture = None if shot is None else view.picture_of(shot)
        return {"id": watch.store.add_event(view.name, "snapshot", text, None, picture)}

    @app.get("/api/pictures/{number}")
    def stored_picture(number: _Id) -> Response:
        return _image(watch.store.picture(number), "image/jpeg")

    @app.get("/api/events.csv")
    def events_file() -> Response:
        head = ("time", "source", "kind", "text", "acknowledged", "ended")
        rows = ([_clock(e["time"]), e["source"], e["kind"], e["text"], _clock(e["acknowledged"]), _clock(e["ended"])]
                for e in watch.store.events(5000))  # fmt: skip
        return _csv("events.csv", head, rows)

    @app.get("/api/sources/{number}/report.{kind}")
    def report(number: int, kind: Literal["html", "csv"], day: date | None = None) -> Response:
        view, day = watch.view(number), day or date.today()
        if kind == "csv":
            text = hours_table(watch.store, view.zones, day)
        else:
            text = day_page(watch.store, view.name, view.zones, day, watch.settings.level)
        return _download(f"report-{day}.{kind}", text)

    @app.get("/api/sources/{number}/counts.csv")
    def counts_file(number: int, seconds: _Seconds = 86400.0) -> Response:
        head = ("time", "zone", "count", "low", "high", "strangeness", "averaged")
        since = time.time() - min(max(seconds, 1.0), _LONGEST)
        rows = (
            [_clock(r["time"]), zone.name, *(_short(r[key]) for key in head[2:6]), r["thinned"]]
            for zone in watch.view(number).zones
            for r in watch.store.all_counts(zone.id, since)
        )
        return _csv("counts.csv", head, rows)


def _about(view: View) -> dict[str, Any]:
    """Return the state of a source for the page."""
    calibration = view.counter.calibration
    policy = calibration.policy or Policy(0.0)
    return {
        "number": view.number,
        "name": view.name,
        "zones": [zone.to_dict() for zone in view.zones],
        "colours": {zone: alarm.colour for zone, alarm in view.alarms.items()},
        "camera": {} if view.camera is None else view.camera.about(),
        "faint": {"mass": policy.faint_mass, "seen": policy.faint_seen, "false": policy.faint_false},
        "message": view.message,
        "width": f"Its width {calibration.width}; unusual frames widen it.",
    }


def _learned(watch: Watch, view: View) -> dict[str, Any]:
    """Return labelled and unlabelled frames, and calibrations that can be restored."""
    calibrations = watch.store.calibrations(view.name)
    return {
        "proposed": watch.store.frames(view.name, labelled=False),
        "labelled": watch.store.frames(view.name, labelled=True),
        "calibrations": [
            {"id": row["id"], "time": row["time"], "note": row["note"], "used": row["used"] > 0} for row in calibrations
        ],
    }


def _limit(words: ZoneWords) -> str:
    return "none" if words.limit is None else f"{words.limit:g}"


def _with_zone(watch: Watch, number: int, zone: int) -> View:
    """Return the view of a source that has this zone; raise if it has not."""
    view = watch.view(number)
    if zone not in {z.id for z in view.zones}:
        raise LatedropError("expected a zone of this source; found none with this number. Reload the page.")
    return view


def _check_cells(view: View, points: Any) -> None:
    """Refuse a zone that contains no cell centre of the density map: it would always count 0."""
    if view.count is not None:
        h, w = view.count.reading.density.shape
        if not cells_of(drawn_points(points), (h, w)).any():
            raise DataError(
                f"expected a zone with at least one cell of the counter's {w} x {h} map; found none inside. Draw it "
                "larger."
            )


def _image(content: bytes | None, kind: str) -> Response:
    return Response(status_code=204) if content is None else Response(content, media_type=kind)


def _csv(name: str, head: tuple[str, ...], rows: Any) -> Response:
    return _download(name, "".join(map(csv_line, (head, *rows))))


def _download(name: str, text: str) -> Response:
    kind = f"text/{name.rpartition('.')[2]}"
    return Response(text, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


_WAITING = 32


class Hub:
    """Pass messages to all open pages; `tell` may be called from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pages: set[asyncio.Queue[str | None]] = set()

    def begin(self) -> None:
        """Keep the running event loop of the server; call this inside it."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """Close the streams of all pages; may be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_on, None)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to all pages."""
        if self._loop is not None and self._pages and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_on, json.dumps(message))

    async def listen(self) -> AsyncIterator[str]:
        """Yield server-sent events for one page."""
        messages: asyncio.Queue[str | None] = asyncio.Queue(_WAITING)
        self._pages.add(messages)
        try:
            yield "retry: 1000\n\n"
            while True:
                try:
                    text = await asyncio.wait_for(messages.get(), 10)
                except asyncio.TimeoutError:  # differs from TimeoutError before Python 3.11
                    yield ": still here\n\n"
                    continue
                if text is None:
                    return
                yield f"data: {text}\n\n"
        finally:
            self._pages.discard(messages)

    def _hand_on(self, text: str | None) -> None:
        for page in self._pages:
            if page.full():
                page.get_nowait()
            page.put_nowait(text)


def serve(watch: Watch, host: str, port: int, tokens: Mapping[str, str | None], say: Callable[[str], object]) -> None:
    """Listen on the address, `say` the URL for each role, and serve until the process is stopped.

    `tokens` are given by role. The token to configure is generated if it is None and the address is not local or
    another role has a token.
    """
    given = {role: token for role, token in tokens.items() if token is not None}
    if any(len(token) < 8 or not token.isascii() or not token.isprintable() for token in given.values()):
        raise ArgumentError(
            "expected tokens of 8 or more printable ASCII characters; found a shorter one or other "
            "characters. Pass another token."
        )
    if len(set(given.values())) < len(given):
        raise ArgumentError("expected a different token for each role; found one twice. Change one.")
    if given or not is_loopback(host):
        given.setdefault(ROLES[-1], secrets.token_urlsafe(18))
    wire, address = listening(host, port)
    for role, token in given.items():
        say(f"the console, to {role}, is at {address}?token={quote(token, safe='')}")
    if not given:
        say(f"the console is at {address}")
    app = make_app(watch, given)
    serve_on(wire, app, app.state.hub.end)


LARGEST = 262_144
"""Maximum size of a request in bytes."""
COOKIE = "latedrop_token"
"""The name of the cookie that holds a token."""
ROLES = ("view", "label", "configure")
"""Roles in rising order: view; also label frames, acknowledge alarms and take snapshots; also everything else."""
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
"""Headers of every response."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
_KINDS = {f".{ending}": kind for ending, kind in _TYPES.items()}


def _page(app: FastAPI) -> None:
    """Serve `index.html` and its files by name, and errors as JSON. No part of a request is used as a path."""
    folder = Path(__file__).parent / "page"
    files = {path.name: path for path in folder.iterdir() if path.suffix in _KINDS}

    @app.api_route("/", methods=["GET", "HEAD"])
    def page() -> Response:
        return Response(files["index.html"].read_bytes(), media_type="text/html")

    @app.api_route("/page/{name}", methods=["GET", "HEAD"])
    def part(name: str) -> Response:
        path = files.get(name)
        if path is None:
            return _said(404, "expected a file of the page; found no such file. Reload the page.")
        return Response(path.read_bytes(), media_type=_KINDS[path.suffix])

    @app.exception_handler(LatedropError)
    async def wrong(request: Request, error: LatedropError) -> Response:
        return _said(500 if isinstance(error, FileError) else 400, str(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return _said(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def misread(request: Request, error: RequestValidationError) -> Response:
        # The message leaves out the values, which may not be valid JSON.
        problems = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:3])
        return _said(422, f"expected a valid request; {problems}.")


def refused(request: Request, tokens: Mapping[str, str]) -> Response | None:
    """Return the response to a refused request, or None if it is allowed. Without `tokens` only local requests are."""
    why = foreign_page(request) or (None if tokens else from_elsewhere(request))
    if why is not None or not tokens:
        return None if why is None else JSONResponse({"error": why}, 403)
    given = request.query_params.get("token")
    role = None if given is None else _role(given.encode("utf-8", "replace"), tokens)
    if role is not None:
        # Move the token from the address to a cookie that scripts cannot read.
        answer = RedirectResponse(request.url.path, 303)
        answer.set_cookie(COOKIE, tokens[role], httponly=True, samesite="strict", max_age=30 * 86400)
        return answer
    role = _role(bearer_token(request) or request.cookies.get(COOKIE, "").encode("utf-8", "replace"), tokens)
    if role is not None:
        request.scope[_ROLE] = role
        return None
    return JSONResponse({"error": "expected a token: open the address that the command printed, with ?token=...."}, 401)


def _role(words: bytes, tokens: Mapping[str, str]) -> str | None:
    """Return the role of a token, or None; compare it with all in constant time."""
    roles = [role for role, token in tokens.items() if hmac.compare_digest(words, token.encode())]
    return roles[0] if roles else None


def role_of(request: Request) -> str:
    """Return the role of an allowed request; without tokens it is the highest one."""
    role: str = request.scope.get(_ROLE, ROLES[-1])
    return role


def _forbidden(request: Request) -> str | None:
    """Return an error message if the role of a request does not allow it, else None."""
    wanted = "label" if _LABELLING.fullmatch(request.scope["path"]) else "configure"
    if request.method in ("GET", "HEAD") or ROLES.index(role_of(request)) >= ROLES.index(wanted):
        return None
    return f"expected the token to {wanted}; this one is to {role_of(request)}. Open the console with another token."


class _Guard:
    """Check tokens, and refuse bodies over `LARGEST` bytes, counted as they arrive because a length may be missing."""

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
        length = request.headers.get("content-length", "")
        if answer is None and length.isdecimal() and int(length) > LARGEST:
            answer = _said(413, _TOO_LARGE)
        await (answer or self._app)(scope, counted, with_headers)


_TOO_LARGE = f"expected a request of at most {LARGEST} bytes; found a larger one. Send less."


def _said(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, dict(headers or {}))
