"""The metadata of an ONNX file, and a checksum over the whole of it: graph, weights and metadata.

    file = model | entry("latedrop.sha256", SHA-256(model))

A model is a protobuf message, so that an entry of its metadata may follow after everything else. The checksum finds
damage; whoever edits a file on purpose can make it fit, so that the fields are checked as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal, TypeAlias

from latedrop.errors import FileError
from latedrop.quantiles import ConformalScores, IsotonicKnots
from latedrop.records import Format, Limits, Tagged, naming, record

__all__ = [
    *("AGAIN", "METADATA", "WHOLE", "ClassRecord", "Metadata", "RegressionRecord"),
    *("check_seal", "record_in", "sealed"),
]

WHOLE = "latedrop.calibration"
"""The whole calibration, but for the tensors that the graph holds."""
AGAIN = "Write the file again with predictor.to_onnx(path, example)."
_SEAL = b"latedrop.sha256"

_Scores: TypeAlias = tuple[Annotated[float, Limits(-10, 1e6)], ...]


@record
@dataclass(frozen=True)
class RegressionRecord:
    """All that makes intervals of what the graph gives.

    Attributes:
        columns: the names of the inputs; empty where they have none.
        verdict: what the variance is worth, in words.
        names: of the outputs; empty where they have none.
        level: of the intervals that the graph gives.
        target: `"log"` where `location` and `spread` are those of the logarithm.
        intervals: None is Gaussian, or a Student t with `degrees`.
        degrees: of freedom; None where intervals are Gaussian.
    """

    columns: tuple[str, ...]
    verdict: str
    names: tuple[str, ...]
    level: Annotated[float, Limits(0, 1)]
    target: Literal["log"] | None
    intervals: Annotated[IsotonicKnots | ConformalScores, Tagged()] | None
    degrees: Annotated[float, Limits(3, 1e6)] | None = None
    _: KW_ONLY
    task: Literal["regression"] = "regression"


@record
@dataclass(frozen=True)
class ClassRecord:
    """All that makes sets of what the graph gives; other fields are those of `RegressionRecord`.

    Attributes:
        sets: sorted scores of the true classes, one list or one for each class; None where there are none.
    """

    columns: tuple[str, ...]
    verdict: str
    names: tuple[str, ...]
    sets: tuple[_Scores, ...] | None
    _: KW_ONLY
    task: Literal["classification"] = "classification"


@record
@dataclass(frozen=True)
class Metadata:
    """The record of an ONNX file."""

    model: Annotated[RegressionRecord | ClassRecord, Tagged("task")]


METADATA = Format(Metadata, "latedrop", "the metadata of an ONNX file", AGAIN, "metadata", sealed=False)


def record_in(metadata: Mapping[str, str], path: object) -> RegressionRecord | ClassRecord:
    """The record of a file, or `FileError`."""
    if METADATA.key not in metadata:
        raise FileError(
            f"expected an ONNX file that latedrop wrote, with its calibration in the metadata; {path} has none. Write "
            "one with predictor.to_onnx(path, example)."
        )
    with naming(str(path)):
        return METADATA.from_json(metadata[METADATA.key]).model


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


def _seal_of(model: bytes | memoryview) -> bytes:
    """The last entry of the metadata: field 14 of the message, with a key and a value."""
    digest = hashlib.sha256(model).hexdigest().encode()
    entry = b"".join(tag + bytes([len(text)]) + text for tag, text in ((b"\x0a", _SEAL), (b"\x12", digest)))
    return b"\x72" + bytes([len(entry)]) + entry
