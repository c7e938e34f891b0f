"""From predictions to bytes: JSON, or a table of Arrow where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop.serving.arrow import ARROW, table_stream
from latedrop.serving.bodies import JSON
from latedrop.serving.limits import RefusalError

__all__ = ["answer_bytes", "named_columns"]


def named_columns(prediction: Any, level: float) -> dict[str, npt.NDArray[Any]]:
    """Arrays `(N, ...)` by name: mean, std, low, high; of classes probabilities, and sets where there are."""
    if hasattr(prediction, "interval"):
        found = prediction.to_dict(level)
    else:
        found = prediction.to_dict()
        if _known(prediction, "sets") is not None:
            found = {**found, "prediction_set": prediction.prediction_set(level)}
        if _known(prediction, "names"):
            found = {"name": prediction.names, **found}
    return {name: _array(value) for name, value in found.items()}


def _known(prediction: Any, name: str) -> Any:
    """What the calibration says: that of a model, or the record of an ONNX file."""
    record = getattr(prediction, "record", None) or getattr(prediction, "calibration", None)
    return getattr(record, name, None)


def answer_bytes(columns: Mapping[str, npt.NDArray[Any]], accept: str, about: Mapping[str, Any]) -> tuple[bytes, str]:
    """A body and its Content-Type: Arrow where `accept` names it, else JSON, where numbers that are none are null.

    `about` are the facts that belong to all rows; an Arrow table has none of them.
    """
    if ARROW in accept:
        flat: dict[str, Any] = {}
        for name, values in columns.items():
            if values.ndim > 2:
                raise RefusalError(
                    "expected Accept: application/json, as outputs are maps; a table has no room for them.", 406
                )
            parts = values.reshape(len(values), -1).T
            flat |= {name if len(parts) == 1 else f"{name}_{k}": part for k, part in enumerate(parts)}
        return table_stream(flat), ARROW
    plain = {name: _plain(values) for name, values in columns.items()}
    return json.dumps({**plain, **about}, allow_nan=False).encode(), JSON


def _plain(values: npt.NDArray[Any]) -> Any:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        whole = values.astype(object)
        whole[~np.isfinite(values)] = None
        return whole.tolist()
    return values.tolist()


def _array(value: Any) -> npt.NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
