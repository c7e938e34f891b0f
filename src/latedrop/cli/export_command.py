"""`latedrop export`: a model with its calibration as one ONNX file."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latedrop.cli import options as opt
from latedrop.cli.command import command
from latedrop.cli.options import example_rows, split
from latedrop.errors import ArgumentError
from latedrop.terminal import need

if TYPE_CHECKING:
    from torch import nn

    from latedrop.calibration.class_record import ClassCalibration
    from latedrop.calibration.record import Calibration

__all__ = ["export"]


def export(
    model: opt.Model,
    calibration: opt.Record,
    output: opt.Exported,
    data: opt.Example = None,
    input_shape: opt.InputShape = None,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    images: opt.Pictured = opt.NO_IMAGES,
    level: opt.Level = opt.LEVEL,
    loading: opt.Loading = opt.ON_CPU,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write one ONNX file that gives mean, std, low and high; it runs without torch.

    Sizes other than the number of rows are those of an example: --data, --input-shape, the columns that the calibration
    knows, or what a .pt2 file was exported with.
    """
    with command(debug) as out:
        need("onnx", "onnx", "onnxruntime")
        from latedrop.cli.feed import Source
        from latedrop.cli.writing import check_apart, check_output
        from latedrop.quantiles import checked_level

        checked_level(level)
        check_output(output, ".onnx")
        sources = {"MODEL": model, "CALIBRATION": calibration, "--weights": loading.weights, "--data": data}
        check_apart({"--output": output}, {**sources, "--readout": loading.readout})
        if data is not None and input_shape:
            raise ArgumentError("expected --data or --input-shape; found both. Leave one out.")
        uq: Any = loading.load_calibrated(model, calibration)
        columns: dict[str, Any] = {"ignored": split(ignore), "record": uq.calibration}
        pictures = images.of(uq.calibration) if data is not None else None
        source = None if data is None else Source.of(data, split(inputs), **columns, images=pictures)
        with nullcontext() if source is None else source.explained():
            x = _rows(uq.model, uq.calibration, input_shape) if source is None else source.example(uq.model)
            chosen = {} if hasattr(uq.calibration, "classes") else {"level": level}
            path = uq.to_onnx(output, x, **chosen)
        _print(path, out, as_json)


def _rows(network: "nn.Module", record: "Calibration | ClassCalibration", shapes: list[str] | None) -> Any:
    """Rows of the shape that the command or the calibration says."""
    known = (record.columns or {}).get("inputs")
    return example_rows(network, shapes or ([str(len(known))] if known else None))


def _print(path: Path, out: Any, as_json: bool) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    shapes = {kind: getattr(session, f"get_{kind}")() for kind in ("inputs", "outputs")}
    named = {kind: {value.name: value.shape for value in values} for kind, values in shapes.items()}
    if as_json:
        print(json.dumps({"file": str(path), "bytes": path.stat().st_size, **named}, indent=1), file=out)
        return
    for kind, values in named.items():
        print(f"{kind}: " + ", ".join(f"{name} {shape}" for name, shape in values.items()), file=out)
    print(f"compared with torch on 1, 4 and 7 rows\nwritten: {path}, {path.stat().st_size / 1024:.0f} KB", file=out)
