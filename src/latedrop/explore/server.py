"""The page and what it asks for, over HTTP; only this machine is answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query

from latedrop.explore.rows import Explored
from latedrop.web.listening import listening, serve_on
from latedrop.web.pages import make_pages

__all__ = ["make_app", "serve"]

_Level = Annotated[float, Query(gt=0, lt=1, allow_inf_nan=False)]


def make_app(explored: Explored) -> FastAPI:
    """The application."""
    app = make_pages("latedrop explore", Path(__file__).parent / "page")

    @app.get("/api/about")
    def about() -> dict[str, Any]:
        return explored.about()

    @app.get("/api/outputs/{output}")
    def at(output: int, level: _Level = 0.9) -> dict[str, Any]:
        return explored.at(output, level)

    @app.get("/api/outputs/{output}/rows/{row}")
    def of(output: int, row: int) -> dict[str, Any]:
        return explored.of(row, output)

    return app


def serve(explored: Explored, port: int, say: Callable[[str], object]) -> None:
    """Serve on the local address until the process is asked to stop."""
    found, address = listening("127.0.0.1", port)
    say(f"the rows are at {address}")
    serve_on(found, make_app(explored))
