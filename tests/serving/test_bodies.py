"""Bodies become rows, or are refused with a status and a sentence; nothing in them is evaluated or unpickled."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import numpy as np
import pytest

from latedrop.errors import LatedropError
from latedrop.serving.bodies import JSON, NPY, Form, Limits, RefusalError, rows_of

LIMITS = Limits(queue_rows=10, pixels=100)
NAMED = Form(("a", "b"))


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def of_json(content: Any, form: Form = NAMED) -> Any:
    return rows_of(json.dumps(content).encode(), JSON, form, LIMITS)


def test_rows_as_lists_and_by_name_are_the_same() -> None:
    lists = of_json({"rows": [[1, 2.5], [3, 4]], "level": 0.8})
    named = of_json({"rows": [{"b": 2.5, "a": 1}, {"a": 3, "b": 4}]})
    assert lists.arrays[""].tolist() == named.arrays[""].tolist() == [[1, 2.5], [3, 4]]
    assert lists.arrays[""].dtype == np.float64
    assert (lists.level, named.level, lists.rows) == (0.8, None, 2)


def test_inputs_by_name_and_whole_numbers() -> None:
    asked = of_json({"inputs": {"x": [[1, 2]], "mask": [[1, 0]]}, "dtype": "int64"})
    assert {name: value.tolist() for name, value in asked.arrays.items()} == {"x": [[1, 2]], "mask": [[1, 0]]}
    assert asked.arrays["x"].dtype == np.int64


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(order: Any) -> None:
    array = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32, order=order)
    assert np.array_equal(rows_of(npy(array), NPY, NAMED, LIMITS).arrays[""], array)


def test_an_image_is_one_row() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (4, 5), (255, 0, 0)).save(file, "PNG")
    form = Form(transform=lambda found: np.asarray(found, np.float32).transpose(2, 0, 1))
    assert rows_of(file.getvalue(), "image/png", form, LIMITS).arrays[""].shape == (1, 3, 5, 4)
    with pytest.raises(RefusalError, match="at most 10 pixels; found 4 x 5") as caught:
        rows_of(file.getvalue(), "image/png", form, Limits(pixels=10))
    assert caught.value.status == 413
    with pytest.raises(RefusalError, match="expected an image"):
        rows_of(b"GIF89a", "image/png", form, LIMITS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": [[1, 2], [3]]}, "as many in every row"),
        ({"rows": [["1", 2]]}, "text, null"),
        ({"rows": [[None, 2]]}, "text, null"),
        ({"rows": [[10**400, 2]]}, "64 bits"),
        ({"rows": []}, "one row or more"),
        ({"rows": 1.5}, "one row or more"),
        ({"rows": [[1, 2]] * 11}, "at most 10 rows"),
        ({"rows": [{"a": 1}]}, "row 0 differs in 'b'"),
        ({"rows": [{"a": 1, "b": 2}, [1, 2]]}, "row 1 differs in 'list'"),
        ({"rows": [[1, 2]], "inputs": {"x": [[1]]}}, "both or neither"),
        ({"inputs": {"x": [[1]], "y": [[1], [2]]}}, "the same number in every input"),
        ({"inputs": []}, "an object of arrays"),
        ({"rows": [[1, 2]], "dtype": "object"}, "expected a dtype"),
        ({"rows": [[1.5, 2]], "dtype": "int64"}, "whole numbers"),
        ({"rows": [[1e300, 2]], "dtype": "float32"}, "expected finite numbers"),
        ({"rows": [[1, 2]], "level": "0.9"}, "level as a number"),
        ({"rows": [[1, 2]], "level": 1.5}, "inside"),
        ({"rows": [[1, 2]], "ids": [1, 2]}, "expected 1 ids"),
        ({"rows": [[1, 2]], "ids": [[1]]}, "list of texts"),
        ({"rows": [[1, 2]], "ids": ["x" * 300]}, "256 characters"),
        ({"rows": [[1, 2]], "code": "1"}, "found 'code'"),
        ([[1, 2]], "expected a JSON object"),
    ],
    ids=lambda value: None if isinstance(value, str) else "content",
)
def test_json_that_cannot_be_used(content: Any, message: str) -> None:
    with pytest.raises(LatedropError, match=message):
        of_json(content)


@pytest.mark.parametrize("body", [b"", b"{", b'{"rows": [[NaN, 1]]}', b"[" * 100_000, b'{"rows": "\xff"}'])
def test_json_that_is_none(body: bytes) -> None:
    with pytest.raises(RefusalError, match="expected JSON") as caught:
        rows_of(body, JSON, NAMED, LIMITS)
    assert caught.value.status == 400


def test_no_pickle_is_opened() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("a request was unpickled",))

    body = npy(np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(RefusalError, match="expected real numbers"):
        rows_of(body, NPY, NAMED, LIMITS)
    with pytest.raises(RefusalError, match="its head is damaged"):
        rows_of(pickle.dumps(Trap()), NPY, NAMED, LIMITS)


def test_a_head_cannot_claim_more_than_there_is() -> None:
    body = npy(np.zeros((2, 2))).replace(b"(2, 2), }          ", b"(2, 10000000000), }")
    assert b"10000000000" in body
    with pytest.raises(RefusalError, match="found 32 bytes") as caught:
        rows_of(body, NPY, NAMED, LIMITS)
    assert caught.value.status == 400


def test_missing_values_are_named() -> None:
    with pytest.raises(RefusalError, match=r"missing ones in 1 \(rows from 0\)"):
        rows_of(npy(np.array([[1.0, 1.0], [np.nan, 2.0]])), NPY, NAMED, LIMITS)


@pytest.mark.parametrize("kind", ["", "text/plain", "image/png", "application/x-pickle"])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(RefusalError, match="expected a Content-Type among") as caught:
        rows_of(b"x", kind, NAMED, LIMITS)
    assert caught.value.status == 415
