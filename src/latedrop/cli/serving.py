"""The command `latedrop serve`: a model and its calibration behind HTTP."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from latedrop.cli import options as opt
from latedrop.cli.command import command
from latedrop.errors import ArgumentError
from latedrop.files import readable
from latedrop.terminal import argument, need, option, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from latedrop.serving import Limits, Service
    from latedrop.serving.bodies import Array

__all__ = ["serve"]

_limit, _address = (partial(option, rich_help_panel=name) for name in ("Limits", "Address"))


class Bounds(NamedTuple):
    """The options that say what is too much, of one parameter; `serving.Limits` in other units."""

    batch_rows: Annotated[int, _limit("Rows that run at once; 1 runs each request by itself.")] = 256
    wait: Annotated[float, _limit("Milliseconds that a request waits for others to run with.")] = 2.0
    queue_rows: Annotated[int, _limit("Rows that may wait; more are refused with 429.")] = 8192
    body_megabytes: Annotated[float, _limit("Of one request; more are refused with 413.")] = 16.0
    timeout: Annotated[float, _limit("Seconds until a request is given up with 503, also after SIGTERM.")] = 30.0

    def limits(self) -> "Limits":
        """Convert megabytes and milliseconds."""
        from latedrop.serving import Limits

        megabyte = 1 << 20
        return Limits(
            self.batch_rows, self.wait / 1000, self.queue_rows, int(self.body_megabytes * megabyte), self.timeout
        )


def serve(
    *,
    model: Annotated[str, argument("As for other commands, or an .onnx file of `latedrop export`.", metavar="MODEL")],
    calibration: Annotated[
        str | None, argument("What `latedrop calibrate` wrote; none for an .onnx file.", metavar="CALIBRATION")
    ] = None,
    host: Annotated[str, _address("Address to listen at; others than the local need a token.")] = "127.0.0.1",
    port: Annotated[int, _address("Port; 0 takes a free one.")] = 8000,
    token_file: Annotated[str | None, _address("File with the token; else LATEDROP_TOKEN is.")] = None,
    level: opt.Level = opt.LEVEL,
    stream: Annotated[
        str | None, option("Follow labels, sent to /update; the state is kept in this file.", "--stream")
    ] = None,
    transform: opt.ImageTransform = None,
    bounds: Bounds,
    loading: opt.Loading,
    debug: opt.Debug = False,
) -> None:
    """Answer requests over HTTP: POST /predict, GET /healthz, /metrics and /openapi.json; with --stream, POST /update.

    Requests are gathered into batches. SIGTERM ends it after all accepted requests are answered.
    """
    with command(debug):
        need("serve", "fastapi", "uvicorn")
        from latedrop.serving.app import check_address, listen, make_app

        token = _token(token_file)
        check_address(host, token)
        limits = bounds.limits()
        uq = _predictor(model, calibration, loading, limits.batch_rows)
        service = _service(uq, limits, level=level, stream=stream, transform=transform)
        listen(make_app(service, token), host, port, limits, lambda url: say(f"serving {model} at {url}"))


def _predictor(model: str, calibration: str | None, loading: opt.Loading, rows: int) -> Any:
    """Load what is served: anything with `predict(rows)`."""
    if model.endswith(".onnx"):
        others = {"CALIBRATION": calibration, "--readout": loading.readout, "--weights": loading.weights}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ArgumentError(
                f"expected an .onnx file alone, which holds its calibration; found {', '.join(given)}. Leave it out."
            )
        from latedrop import load_onnx

        return load_onnx(model, batch_size=rows)
    if calibration is None:
        raise ArgumentError("expected MODEL and CALIBRATION, or an .onnx file; found no calibration.")
    return loading.load_calibrated(model, calibration, rows)


def _service(uq: Any, limits: "Limits", *, level: Any, stream: str | None, transform: str | None) -> "Service":
    """Make a service of anything with `predict(rows)`; a calibrated model of torch also gives its inputs' order."""
    from latedrop.cli.tables import image_transform
    from latedrop.named import as_arguments
    from latedrop.serving import Service
    from latedrop.serving.bodies import Form

    if stream is not None and not hasattr(uq, "stream"):
        raise ArgumentError("expected a regression model of torch for --stream; found another. Leave it out.")
    record = getattr(uq, "calibration", None)
    known = {"inputs": uq.record.columns} if record is None else record.columns or {}
    if transform is None and "images" in known:
        transform = known["images"][1]
    if transform is not None:
        need("images", "PIL")
    made = None if transform is None else image_transform(transform)
    form = Form(tuple(known.get("inputs", ())), made, _inputs(uq))

    def arrange(arrays: "Mapping[str, Array]") -> Any:
        named = {name: arrays[name] for name in form.inputs if name in arrays} if form.inputs else arrays
        return as_arguments(uq.model, named) if hasattr(uq, "model") else dict(arrays)

    followed = None if stream is None else uq.stream(level, stream)
    return Service(uq, form, limits, level=level, stream=followed, arrange=arrange)


def _inputs(uq: Any) -> dict[str, str]:
    """Return the model's inputs by name; of an ONNX file also which numbers they are."""
    if hasattr(uq, "session"):
        floats = ("tensor(float)", "tensor(double)")
        return {each.name: "floats" if each.type in floats else "whole" for each in uq.session.get_inputs()}
    from latedrop.named import input_names

    return dict.fromkeys(input_names(uq.model), "") if hasattr(uq, "model") else {}


def _token(path: str | None) -> str | None:
    if path is None:
        return os.environ.get("LATEDROP_TOKEN") or None
    with readable(path, "a token"):
        return Path(path).read_text(encoding="utf-8").strip()
