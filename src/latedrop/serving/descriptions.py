"""What the OpenAPI page says of each path."""

from __future__ import annotations

from typing import Any

from latedrop.serving.arrow import ARROW
from latedrop.serving.bodies import IMAGES, JSON, NPY

__all__ = ["described"]

_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "status": {"type": "integer"}},
    "required": ["error", "status"],
}
_STATUSES = {
    400: "the body is damaged",
    401: "no token, or another one",
    408: "the body did not come in time",
    413: "too many bytes, rows or pixels",
    415: "an unknown Content-Type",
    422: "rows that cannot be predicted",
    429: "the queue is full: ask again after Retry-After seconds",
    500: "the model failed",
    503: "too late, too many at once, or stopping",
}
_RESPONSES = {
    status: {"description": text, "content": {JSON: {"schema": _ERROR}}} for status, text in _STATUSES.items()
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ROWS = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {}, "description": "lists of numbers, or objects by the names of columns"},
        "inputs": {"type": "object", "description": "instead of rows: several inputs by name"},
        "dtype": {"type": "string", "default": "float64"},
        "level": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "ids": {"type": "array", "items": {}, "description": "names of the rows, in a stream"},
    },
    "example": {"rows": [[0.1, -1.2, 3.0]], "level": 0.9},
}
_LABELS = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {}}, "labels": {"type": "array", "items": {}}},
    "required": ["ids", "labels"],
}


def described(images: bool, stream: bool) -> dict[str, dict[str, Any]]:
    """Summary, bodies and answers by path, as FastAPI's decorators take them."""
    bodies: dict[str, Any] = {JSON: {"schema": _ROWS}, NPY: _BINARY, ARROW: _BINARY}
    bodies |= dict.fromkeys(IMAGES, _BINARY) if images else {}
    level = {"name": "level", "in": "query", "required": False, "schema": {"type": "number"}}
    predict = {"requestBody": {"required": True, "content": bodies}, "parameters": [level]}
    found: dict[str, dict[str, Any]] = {
        "predict": {
            "summary": "Mean, std, low and high of every row; of classes, their probabilities",
            "responses": _RESPONSES,
            "openapi_extra": predict,
        },
        "metrics": {"summary": "Counts, for Prometheus"},
        "healthz": {"summary": "200 while requests are taken"},
    }
    if stream:
        labels = {"requestBody": {"required": True, "content": {JSON: {"schema": _LABELS}}}}
        found["update"] = {"summary": "Labels of rows", "responses": _RESPONSES, "openapi_extra": labels}
    return found
