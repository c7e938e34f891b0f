"""The service over HTTP: what it answers equals what the predictor says; what it cannot answer it refuses, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from latedrop import load_onnx
from latedrop.serving import Limits, Service
from latedrop.serving.app import make_app
from latedrop.serving.bodies import Asked, Form
from rounding import assert_same_up_to_rounding

ROWS = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
HERE = "http://127.0.0.1:8000"


@contextmanager
def running(predictor: Any, token: str | None = None, **options: Any) -> Iterator[TestClient]:
    with TestClient(make_app(Service(predictor, **options), token), HERE, client=("127.0.0.1", 5)) as client:
        yield client


def asked(rows: Any, **more: Any) -> dict[str, Any]:
    return {"rows": np.asarray(rows).tolist(), **more}


class Slow:
    """A predictor that waits."""

    def __init__(self, predictor: Any) -> None:
        self.calibration, self._predictor = predictor.calibration, predictor
        self.gate, self.begun, self.sizes = Event(), Event(), []

    def predict(self, x: Any) -> Any:
        self.begun.set()
        assert self.gate.wait(20)
        self.sizes.append(len(x))
        return self._predictor.predict(x)


def test_one_request_is_the_prediction(regression: Any) -> None:
    with running(regression) as client:
        answer = client.post("/predict", json=asked(ROWS, level=0.8)).json()
    wanted = regression.predict(ROWS).to_dict(0.8)
    assert answer.pop("level") == 0.8
    assert answer.keys() == wanted.keys()
    for name, values in wanted.items():
        assert_same_up_to_rounding(np.array(answer[name], values.numpy().dtype), values.numpy())


@pytest.mark.parametrize("kind", ["regression", "drawn"])
@pytest.mark.parametrize("exact", [False, True])
def test_gathered_requests_equal_single_ones(kind: str, exact: bool, request: pytest.FixtureRequest) -> None:
    predictor = request.getfixturevalue(kind)
    slow = Slow(predictor)
    service = Service(slow, limits=Limits(batch_rows=1) if exact else None)
    first = service.submit(Asked({"": ROWS[:1]}))
    assert slow.begun.wait(20)
    parts = [ROWS[i : i + 1 + i % 3] for i in range(30)]
    levels = [0.5 if i % 2 else None for i in range(30)]
    futures = [service.submit(Asked({"": part}, level)) for part, level in zip(parts, levels, strict=True)]
    slow.gate.set()
    answers = [future.result(20) for future in futures]
    first.result(20)
    service.close()
    assert slow.sizes[1:] == ([len(part) for part in parts] if exact else [sum(map(len, parts))])
    for part, level, answer in zip(parts, levels, answers, strict=True):
        wanted = predictor.predict(part).to_dict(level or 0.9)
        for name, values in wanted.items():
            if exact:  # one request, one batch: the same call
                assert np.array_equal(answer.columns[name], values.numpy()), name
            else:
                assert_same_up_to_rounding(answer.columns[name], values.numpy())


@pytest.mark.parametrize("onnx", [False, True])
def test_classes(onnx: bool, classes: Any, tmp_path: Path) -> None:
    wanted = classes.predict(ROWS)
    served = load_onnx(classes.to_onnx(tmp_path / "classes.onnx", ROWS[:2])) if onnx else classes
    with running(served) as client:
        answer = client.post("/predict", json=asked(ROWS, level=0.8)).json()
        assert client.post("/predict", json=asked(ROWS, level=0.9999)).status_code == 422
        assert client.post("/predict", json=asked(ROWS.astype(float) * 1e300)).status_code == 422
    assert answer["name"] == wanted.names
    assert answer["label"] == wanted.label.tolist()
    assert_same_up_to_rounding(answer["probabilities"], wanted.probabilities.numpy())
    assert np.array_equal(answer["prediction_set"], wanted.prediction_set(0.8).numpy())


def test_refusals_are_json_and_leave_it_healthy(regression: Any) -> None:
    limits = Limits(queue_rows=50, body_bytes=4000)
    with running(regression, limits=limits) as client:
        cases = [
            (422, {"json": asked(ROWS[:, :2])}),
            (422, {"json": asked(np.full((1, 3), 1e300))}),
            (422, {"json": asked(ROWS[:1], ids=[1])}),
            (413, {"json": asked(np.zeros((51, 3)))}),
            (413, {"content": b" " * 5000}),
            (413, {"content": iter([b" " * 3000, b" " * 3000])}),
            (415, {"content": b"x", "headers": {"content-type": "text/plain"}}),
            (400, {"content": b"x", "headers": {"content-type": "application/json"}}),
        ]
        for status, options in cases:
            answer = client.post("/predict", **options)
            assert answer.status_code == answer.json()["status"] == status
            assert answer.json()["error"].startswith("expected")
        assert client.post("/predict?level=x", json=asked(ROWS[:1])).status_code == 422
        for path in ("/update", "/nothing"):
            assert client.post(path, json={}).json()["status"] == 404
        assert client.get("/predict").json()["status"] == 405
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.post("/predict", json=asked(ROWS[:1])).status_code == 200


def test_a_full_queue_and_a_late_answer(regression: Any) -> None:
    slow = Slow(regression)
    limits = Limits(queue_rows=2, timeout=0.5)
    with running(slow, limits=limits) as client, ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/predict", json=asked(ROWS[:1]))
        assert slow.begun.wait(20)
        second = pool.submit(client.post, "/predict", json=asked(ROWS[:2]))
        while "latedrop_queue_rows 2" not in client.get("/metrics").text:
            pass
        full = client.post("/predict", json=asked(ROWS[:1]))
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        for late in (first, second):
            assert late.result(20).status_code == 503
            assert "within 0.5 s" in late.result(20).json()["error"]
        slow.gate.set()


def test_a_model_that_fails_is_told(regression: Any) -> None:
    class Broken:
        def predict(self, x: Any) -> Any:
            raise ZeroDivisionError("secret")

    with running(Broken()) as client:
        answer = client.post("/predict", json=asked(ROWS[:1]))
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_the_token(regression: Any) -> None:
    token = "0123456789abcdef"
    with running(regression, token) as client:
        for given in ({}, {"authorization": token}, {"authorization": "Bearer wrong"}, {"authorization": b"\xff"}):
            for method, path in (("POST", "/predict"), ("GET", "/metrics")):
                assert client.request(method, path, headers=given).status_code == 401
        for scheme in ("Bearer", "bearer", "BEARER "):
            right = {"authorization": f"{scheme} {token}", "host": "model.example", "origin": "https://app.example"}
            assert client.post("/predict", json=asked(ROWS[:1]), headers=right).status_code == 200
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},  # a name that was made to point here
        {"host": "127.0.0.1.evil.example"},
        {"host": "evil.example@127.0.0.1:8000"},
        {"host": ""},
        {"host": "["},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9000"},  # another server of this machine
    ],
)
def test_without_a_token_no_page_of_others_is_answered(headers: dict[str, str], regression: Any) -> None:
    stream = regression.stream()
    with running(regression, stream=stream) as client:
        for method, path in (("POST", "/predict"), ("POST", "/update"), *(("GET", at) for at in PATHS)):
            answer = client.request(method, path, json=asked(ROWS[:1], ids=["a"]), headers=headers)
            assert (answer.status_code, answer.json()["status"]) == (403, 403), path
            assert answer.json()["error"].startswith("expected a request")
        assert client.post("/update", json={"ids": ["a"], "labels": [1.0]}).status_code == 422  # no row was followed
        for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
            assert client.get("/healthz", headers={"host": host}).status_code == 200
        assert client.post("/predict", json=asked(ROWS[:1]), headers={"origin": HERE}).status_code == 200


PATHS = ("/healthz", "/metrics", "/openapi.json", "/else")


def test_other_machines_are_refused_unless_the_application_around_it_decides(regression: Any) -> None:
    service = Service(regression)
    with TestClient(make_app(service), HERE, client=("192.168.0.7", 5)) as client:
        assert client.get("/metrics").status_code == 403
    with TestClient(make_app(Service(regression), local=False), "http://model.example") as client:
        assert client.post("/predict", json=asked(ROWS[:1])).status_code == 200


def test_counts_and_the_description(regression: Any) -> None:
    with running(regression) as client:
        client.post("/predict", json=asked(ROWS[:7]))
        client.post("/predict", content=b"", headers={"content-type": "application/json"})
        text = client.get("/metrics").text
        page = client.get("/openapi.json").json()
        assert client.head("/healthz").status_code == 200
    for line in (
        'latedrop_requests_total{path="/predict",status="200"} 1',
        'latedrop_requests_total{path="/predict",status="400"} 1',
        "latedrop_rows_total 7",
        "latedrop_batches_total 1",
        "latedrop_queue_rows 0",
    ):
        assert line in text.splitlines()
    assert {"/predict", "/metrics", "/healthz"} == set(page["paths"])
    assert "application/json" in page["paths"]["/predict"]["post"]["requestBody"]["content"]


def test_a_stream_learns_from_labels(regression: Any, tmp_path: Path) -> None:
    stream = regression.stream(0.9, tmp_path / "state.json")
    with running(regression, stream=stream) as client:
        answer = client.post("/predict", json=asked(ROWS[:2], ids=["x", "y"])).json()
        own = regression.predict(ROWS[:2]).interval(0.9)[0].numpy()
        assert_same_up_to_rounding(answer["low"], own)
        numbered = client.post("/predict", json=asked(ROWS[2:4])).json()
        assert len(numbered["ids"]) == 2
        update = client.post("/update", json={"ids": ["x", "y"], "labels": [100.0, answer["mean"][1][0]]})
        assert update.json()["held"] == [[False], [True]]
        assert (update.json()["labels"], update.json()["coverage"]) == (2, [0.5])
        for wrong in (
            {"ids": ["x"], "labels": [1.0]},
            {"ids": ["z"], "labels": [[1.0, 2.0]]},
            {"ids": [numbered["ids"][0]], "labels": [[1.0, 2.0]]},
            {"ids": [1], "labels": ["a"]},
            {"labels": [1.0]},
        ):
            assert client.post("/update", json=wrong).json()["status"] == 422
        assert client.post("/update", content=b"{}").status_code == 415
        assert client.post("/predict", json=asked(ROWS[:1], level=0.5)).status_code == 422
        assert "latedrop_stream_labels 2" in client.get("/metrics").text
    assert json.loads((tmp_path / "state.json").read_text())


def test_anything_that_predicts_can_be_served() -> None:
    class Found:
        def to_dict(self) -> dict[str, Any]:
            return {"mean": np.array([1.0, np.inf])}

    class Own:
        def predict(self, rows: Any) -> Any:
            return Found()

    with running(Own(), form=Form(("a",))) as client:
        answer = client.post("/predict", json={"rows": [{"a": 1}, {"a": 2}]})
        assert answer.json() == {"mean": [1.0, None], "level": 0.9}
