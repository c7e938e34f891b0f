"""`latedrop predict --ray`: the same rows, predicted by the workers of a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from latedrop.cli.feed import Source
from latedrop.cli.options import LEVEL, Pictured, scale_of
from latedrop.errors import ArgumentError
from latedrop.prediction.calibrated import Calibrated
from latedrop.terminal import need

__all__ = ["check_folder", "on_ray"]

_ROWS = 1024


def check_folder(output: str, images: Pictured) -> None:
    """Before the work: raise unless the output can be a folder, and the inputs are columns."""
    need("ray", "ray", "pyarrow")
    if output == "-" or Path(output).suffix:
        raise ArgumentError(f"expected -o with a folder for parquet files, as Ray writes several; found {output!r}.")
    if images.images is not None:
        raise ArgumentError("expected columns of numbers with --ray; found --images. Predict these on one machine.")


def on_ray(
    address: str,
    uq: Calibrated[Any, Any],
    source: Source,
    output: str,
    level: float | None,
    size: int | None,
    scale: str | None,
    **model: Any,
) -> int:
    """Predict the rows of a source and write a folder; how many there were."""
    from latedrop.adapters.ray import Asked, predict_folder
    from latedrop.prediction.predictor import Predictor

    if not isinstance(uq, Predictor):
        raise ArgumentError("expected a regression with --ray; found a calibration of classes. Leave --ray out.")
    if source.table.arrays:
        raise ArgumentError(f"expected csv or parquet with --ray; found {source.table.path}, which holds arrays.")
    local = address == "local"
    if local:  # workers have folders of their own
        paths = ("calibration", "weights", *(["model"] if Path(model["model"]).exists() else []))
        model |= {name: str(Path(model[name]).absolute()) for name in paths if model[name] is not None}
    readout = model.pop("readout")
    asked = Asked(
        **model,
        readout=int(readout) if readout is not None and readout.lstrip("-").isdecimal() else readout,
        inputs=source.columns.inputs,
        keep=source.columns.kept,
        level=LEVEL if level is None else level,
        scale=None if scale is None else scale_of(scale),
        folder=os.getcwd() if local else None,
        batch_size=_ROWS if size is None else size,
    )
    return predict_folder(asked, source.table.path, output, address=address)
