"""Convert the bytes of a request to rows, by their Content-Type, and predictions to bytes; say what is too much.

JSON: `{"rows": [[1.5, 2], ...]}`, rows by the names of columns `{"rows": [{"a": 1.5, "b": 2}, ...]}`, or several inputs
`{"inputs": {"x": [...], "mask": [...]}}`. A npy file, or one image. Nothing is evaluated or unpickled.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.files import npy_head
from latedrop.metrics.levels import checked_level
from latedrop.terminal import listed

__all__ = [
    "IMAGES",
    "JSON",
    "NPY",
    "Asked",
    "Form",
    "Limits",
    "RefusalError",
    "answer_bytes",
    "ids_of",
    "json_object",
    "named_columns",
    "numbers",
    "rows_of",
]

JSON, NPY = "application/json", "application/x-npy"
IMAGES = ("image/png", "image/jpeg", "image/webp")
_DTYPES = ("float32", "float64", "int32", "int64", "bool")
_KEYS = ("rows", "inputs", "dtype", "level", "ids")
_SHOWN = 6
Array: TypeAlias = npt.NDArray[Any]


class RefusalError(LatedropError):
    """A request that is not answered with a prediction; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Set the limits of a service.

    Attributes:
        batch_rows: rows that run at once; more requests are not gathered into one batch.
        wait: seconds that the first request of a batch waits for others.
        queue_rows: rows that wait at most; more are refused with status 429, and a single request of more with 413.
        body_bytes: bytes of one request; more are refused with status 413.
        timeout: seconds until a request is given up, with status 503; also what a service that is told to stop has.
        pixels: of one image; more are refused with status 413.
    """

    batch_rows: int = 256
    wait: float = 0.002
    queue_rows: int = 8192
    body_bytes: int = 16 << 20
    timeout: float = 30.0
    pixels: int = 64_000_000

    def __post_init__(self) -> None:
        for name in ("batch_rows", "queue_rows", "body_bytes", "pixels"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"expected {name} to be 1 or more; found {getattr(self, name)}.")
        for name, least in (("wait", 0.0), ("timeout", 0.001)):
            if not least <= getattr(self, name) < 1e6:
                raise ArgumentError(f"expected {name} as seconds, {least:g} or more; found {getattr(self, name)}.")


@dataclass(frozen=True)
class Asked:
    """Inputs and options of one request.

    Attributes:
        arrays: inputs `(N, ...)` by name; an input without a name has the name "".
        level: level of the intervals; None takes the service's level.
        ids: names of the rows, in a stream; None lets it number them.
    """

    arrays: Mapping[str, Array]
    level: float | None = None
    ids: tuple[int | str, ...] | None = None

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.arrays.values())))


@dataclass(frozen=True)
class Form:
    """The expected form of rows.

    Attributes:
        columns: names of the columns, if known.
        transform: conversion of an image to an input, if the model takes images.
        inputs: names of the model's inputs, each with `"floats"` or `"whole"` for its numbers, or "" if only the model
            can tell; empty if the names are not known.
    """

    columns: tuple[str, ...] = ()
    transform: Callable[[Any], Array] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)


def rows_of(body: bytes, kind: str, form: Form, limits: Limits, level: float | None = None) -> Asked:
    """Return the rows in a body of Content-Type `kind`, or raise `RefusalError`."""
    if kind == JSON:
        asked = _of_json(body, form)
    elif kind == NPY:
        asked = Asked({"": _npy(body)})
    elif kind in IMAGES and form.transform is not None:
        asked = Asked({"": _image(body, form.transform, limits.pixels)})
    else:
        known = [JSON, NPY, *(IMAGES if form.transform is not None else ())]
        raise RefusalError(f"expected a Content-Type among {', '.join(known)}; found {kind[:80] or 'none'!r}.", 415)
    if level is not None:
        asked = replace(asked, level=level)
    if asked.level is not None:
        checked_level(asked.level)
    _check(asked, limits)
    _check_inputs(asked, form)
    return asked


def json_object(body: bytes, keys: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object in a body; refuse other keys than these, NaN and infinities."""
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusalError(f"expected JSON; found something else: {str(error)[:200]}.", 400) from error
    if not isinstance(content, dict):
        raise RefusalError(f'expected a JSON object such as {{"{keys[0]}": ...}}; found {type(content).__name__}.')
    more = [key for key in content if key not in keys]
    if more:
        raise RefusalError(
            f"expected {', '.join(keys)} in the JSON; found {listed((repr(k[:40]) for k in more), _SHOWN)}."
        )
    return content


def _no_constant(name: str) -> float:
    raise ValueError(f"{name}, which is no JSON")


def _of_json(body: bytes, form: Form) -> Asked:
    content = json_object(body, _KEYS)
    if ("rows" in content) == ("inputs" in content):
        raise RefusalError('expected "rows", or "inputs" by name, in the JSON; found both or neither.')
    dtype = content.get("dtype", "float64")
    if dtype not in _DTYPES:
        raise RefusalError(f"expected a dtype among {', '.join(_DTYPES)}; found {str(dtype)[:40]!r}.")
    if "rows" in content:
        arrays = {"": numbers("rows", _by_name(content["rows"], form), dtype)}
    else:
        named = content["inputs"]
        if not isinstance(named, dict) or not named:
            raise RefusalError(f'expected "inputs" as an object of arrays by name; found {type(named).__name__}.')
        arrays = {name: numbers(name, values, dtype) for name, values in named.items()}
    level = content.get("level")
    if level is not None and type(level) not in (int, float):
        raise RefusalError(f"expected level as a number; found {str(level)[:40]!r}.")
    return Asked(arrays, level, ids_of(content.get("ids")))


def ids_of(ids: Any) -> tuple[int | str, ...] | None:
    """Check the names of rows from a JSON object; None if there are none."""
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(name) in (int, str) for name in ids):
        raise RefusalError("expected ids as a list of texts or whole numbers; found something else.")
    if any(len(name) > 256 if isinstance(name, str) else abs(name) >= 1 << 63 for name in ids):
        raise RefusalError("expected ids of at most 256 characters, or numbers of 64 bits; found longer ones.")
    return tuple(ids)


def _by_name(rows: Any, form: Form) -> Any:
    """Return rows given as objects as lists in the order of the columns."""
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return rows
    if not form.columns:
        raise RefusalError("expected rows as lists, as this calibration knows no names of columns; found an object.")
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != set(form.columns):
            wrong = sorted(row.keys() ^ set(form.columns)) if isinstance(row, dict) else [type(row).__name__]
            raise RefusalError(
                f"expected the columns {listed(form.columns, _SHOWN)} in every row; row {i} differs in "
                f"{listed((repr(name[:40]) for name in wrong), _SHOWN)}."
            )
    return [[row[name] for name in form.columns] for row in rows]


def numbers(name: str, values: Any, dtype: str) -> Array:
    """Return lists of a JSON object as an array of numbers."""
    try:
        array = np.array(values)
    except (ValueError, OverflowError, RecursionError):
        array = np.array(None)
    if array.dtype.kind not in "fiub":
        raise RefusalError(
            f"expected numbers in {name[:40]!r}, and as many in every row; found lists of several lengths, text, null "
            "or numbers of more than 64 bits."
        )
    whole = dtype.startswith(("int", "bool"))
    if whole and (array.dtype.kind == "f" or not np.array_equal(array, array.astype(dtype))):
        raise RefusalError(f"expected whole numbers that fit {dtype} in {name[:40]!r}; found others.")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _npy(body: bytes) -> Array:
    """Read a npy file; compare its header with its length before allocating, and refuse objects."""
    file = io.BytesIO(body)
    try:
        shape, fortran, dtype = npy_head(file, len(body))
    except DataError as error:
        raise RefusalError(str(error), 400) from error
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise RefusalError(f"expected real numbers of up to 64 bits in the npy file; found dtype {str(dtype)[:40]}.")
    return np.frombuffer(body, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def _image(body: bytes, transform: Callable[[Any], Array], most: int) -> Array:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(body), formats=[kind.partition("/")[2].upper() for kind in IMAGES]) as image:
            width, height = image.size
            if width * height <= most:
                return np.asarray(transform(image))[None]
    except Exception as error:  # whatever a damaged file, or the user's function, raises
        raise RefusalError(
            f"expected an image; it cannot be used: {str(error)[:200] or type(error).__name__}."
        ) from error
    raise RefusalError(f"expected an image of at most {most} pixels; found {width} x {height}.", 413)


def _check(asked: Asked, limits: Limits) -> None:
    lengths = {value.shape[:1] for value in asked.arrays.values()}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        shapes = ", ".join(str(value.shape) for value in asked.arrays.values())[:200]
        raise RefusalError(f"expected one row or more, the same number in every input; found shapes {shapes}.")
    if asked.rows > limits.queue_rows:
        raise RefusalError(f"expected at most {limits.queue_rows} rows in a request; found {asked.rows}.", 413)
    if asked.ids is not None and len(asked.ids) != asked.rows:
        raise RefusalError(f"expected {asked.rows} ids, one for each row; found {len(asked.ids)}.")
    for name, value in asked.arrays.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            bad = np.flatnonzero(~np.isfinite(value).reshape(len(value), -1).all(1))
            raise RefusalError(
                f"expected finite numbers in {name or 'rows'!r}; found NaN, infinite or missing ones in "
                f"{listed(map(str, bad.tolist()), _SHOWN)} (rows from 0)."
            )


def _check_inputs(asked: Asked, form: Form) -> None:
    """Check names and kinds of numbers against the model; a single array without a name is its first input."""
    if not form.inputs:
        return
    unknown = [name for name in asked.arrays if name and name not in form.inputs]
    if unknown:
        raise RefusalError(
            f"expected inputs among {listed(form.inputs, _SHOWN)}; found "
            f"{listed((repr(name[:40]) for name in unknown), _SHOWN)}."
        )
    for name, value in asked.arrays.items():
        wanted = form.inputs[name] if name else next(iter(form.inputs.values()))
        if wanted and wanted != ("floats" if value.dtype.kind == "f" else "whole"):
            other = "float32 or float64" if wanted == "floats" else "int64"
            raise RefusalError(
                f"expected {'floating-point' if wanted == 'floats' else 'whole'} numbers in {name or 'rows'!r}, as the "
                f"model takes; found {value.dtype}. Send {other}."
            )


def named_columns(prediction: Any, level: float) -> dict[str, Array]:
    """Arrays `(N, ...)` by name: mean, std, low, high; of classes probabilities, and sets where there are."""
    if hasattr(prediction, "interval"):
        named = prediction.to_dict(level)
    else:
        record = getattr(prediction, "record", None) or getattr(prediction, "calibration", None)
        named = {"name": prediction.names} if getattr(record, "names", None) else {}
        named |= prediction.to_dict()
        if getattr(record, "sets", None) is not None:
            named["prediction_set"] = prediction.prediction_set(level)
    return {
        name: np.asarray(value.detach().cpu() if hasattr(value, "detach") else value) for name, value in named.items()
    }


def answer_bytes(columns: Mapping[str, Array], about: Mapping[str, Any]) -> bytes:
    """Write columns `(N, ...)` and the facts that belong to all rows as JSON; numbers that are none are null."""
    plain = {}
    for name, values in columns.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            finite, values = np.isfinite(values), values.astype(object)
            values[~finite] = None
        plain[name] = values.tolist()
    return json.dumps({**plain, **about}, allow_nan=False).encode()
