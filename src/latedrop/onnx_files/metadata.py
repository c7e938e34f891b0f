"""What an ONNX file says of itself, under two names of its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latedrop.errors import FileError, LatedropError
from latedrop.records import parsed, sealed, unsealed

__all__ = ["RECORD", "WHOLE", "record_in", "sealed_record"]

RECORD = "latedrop"
"""What is needed to make intervals or sets of what the graph gives, as JSON with a checksum."""
WHOLE = "latedrop.calibration"
"""The whole calibration, but for the tensors that the graph holds."""
_FORMAT = 1


def sealed_record(record: Mapping[str, Any]) -> str:
    """A record as the text that a file holds."""
    return sealed(RECORD, {"format": _FORMAT, **record})


def record_in(metadata: Mapping[str, str], path: object) -> dict[str, Any]:
    """The record of a file, or `FileError`."""
    if RECORD not in metadata:
        raise FileError(
            f"expected an ONNX file that latedrop wrote, with its calibration in the metadata; {path} has none. Write "
            "one with predictor.to_onnx(path, example)."
        )
    again = "Write the file again with predictor.to_onnx(path, example)."
    try:
        document = parsed(metadata[RECORD], "the metadata of an ONNX file", again)
        return unsealed(document, RECORD, "the metadata of an ONNX file", _FORMAT, again, again)
    except LatedropError as error:
        raise FileError(f"{path}: {error}") from error
