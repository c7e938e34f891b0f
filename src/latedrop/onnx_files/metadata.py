"""The metadata of an ONNX file, and a checksum over the whole of it: graph, weights and metadata.

    file = model | entry("latedrop.sha256", SHA-256(model))

A model is a protobuf message, so that an entry of its metadata may follow after everything else. The checksum finds
damage; whoever edits a file on purpose can make it fit, so that the fields are checked as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from latedrop.errors import FileError

__all__ = ["AGAIN", "RECORD", "WHOLE", "check_seal", "record_in", "record_text", "sealed"]

RECORD = "latedrop"
"""What is needed to make intervals or sets of what the graph gives, as JSON."""
WHOLE = "latedrop.calibration"
"""The whole calibration, but for the tensors that the graph holds."""
_SEAL = b"latedrop.sha256"
_FORMAT = 2
AGAIN = "Write it again with predictor.to_onnx(path, example)."


def sealed(model: bytes) -> bytes:
    """Append the checksum to a serialized model."""
    return model + _seal_of(model)


def check_seal(content: bytes, path: object) -> None:
    """Raise `FileError` where a file is not, byte for byte, one that `sealed` made."""
    model = memoryview(content)[: -len(_seal_of(b""))]
    if content[len(model) :] != _seal_of(model):
        raise FileError(
            f"expected an ONNX file that latedrop wrote, unchanged since; {path} is another one, was edited, or is "
            f"damaged: the checksum does not match. {AGAIN}"
        )


def record_text(record: Mapping[str, Any]) -> str:
    """A record as the text that a file holds."""
    return json.dumps({"format": _FORMAT, **record})


def record_in(metadata: Mapping[str, str], path: object) -> dict[str, Any]:
    """The record of a file; `FileError` where a field is missing or of another kind."""
    try:
        record = json.loads(metadata[RECORD])
        known = _is_record(record)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        known = False
    if not known:
        raise FileError(f"expected the calibration in the metadata of {path}, format {_FORMAT}; found another. {AGAIN}")
    return {key: value for key, value in record.items() if key != "format"}


def _seal_of(model: bytes | memoryview) -> bytes:
    """The last entry of the metadata: field 14 of the message, with a key and a value."""
    digest = hashlib.sha256(model).hexdigest().encode()
    entry = b"".join(tag + bytes([len(text)]) + text for tag, text in ((b"\x0a", _SEAL), (b"\x12", digest)))
    return b"\x72" + bytes([len(entry)]) + entry


def _is_record(record: Any) -> bool:
    both = record["format"] == _FORMAT and isinstance(record["verdict"], str) and _texts(record["columns"])
    if not both or not _texts(record["names"]):
        return False
    if record["task"] == "classification":
        return record["sets"] is None or _lists(record["sets"])
    target, intervals = record["target"], record["intervals"]
    if target is not None and target["kind"] not in ("own", "log"):
        both = all(_numbers(target[name]) for name in ("mean", "std"))
    if intervals is not None:
        fields = ("scores",) if intervals["kind"] == "conformal" else ("knots", "observed")
        both = both and all(_lists(intervals[name]) for name in fields)
    return both and record["task"] == "regression" and _numbers([record["level"]]) and 0 < record["level"] < 1


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _numbers(value: Any) -> bool:
    plain = isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)
    return plain and bool(value) and all(abs(float(item)) < float("inf") for item in value)


def _lists(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_numbers(item) for item in value)
