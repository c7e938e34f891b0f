"""Wrong options of `latedrop serve` are one line; inputs go by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import latedrop
from rounding import assert_same_up_to_rounding
from saved import save_calibrated

CODE = "import torch\ntorch.manual_seed(0)\nnet = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("served")
    save_calibrated(where, "served_code", CODE, "net", 3)
    return where


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> Callable[..., Any]:
    """Run a command on the network and its calibration in their folder."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("LATEDROP_TOKEN", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    return lambda command, words: call(command, "served_code:net", "cal.json", *words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--host 0.0.0.0", "expected a token for 0.0.0.0"),
        ("--token-file nowhere", "expected a token at nowhere"),
        ("--batch-rows 0", "expected batch_rows to be 1 or more"),
        ("--level 2", "expected a probability inside"),
        ("--port 99999", "expected a port from 0 to 65535"),
        ("--host 127.0.0.1.2", "expected a token for 127.0.0.1.2"),
        ("--transform size=8", "expected --transform as package.module:function"),
    ],
)
def test_wrong_options_are_one_line(run: Callable[..., Any], words: str, said: str) -> None:
    code, out, err = run("serve", words)
    assert (code in (1, 2), out, said in " ".join(err.split())) == (True, "", True)


TWO = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x, more):
        return self.last(torch.relu(self.left(x) + self.right(more)))

torch.manual_seed(0)
two = Two()
"""


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_inputs_go_by_their_names_and_kinds(tmp_path: Path, monkeypatch: Any, call: Any, kind: str) -> None:
    """One rule for both: names that the model has, in any order, and no whole numbers for floats."""
    from io import BytesIO

    from fastapi.testclient import TestClient

    (tmp_path / "two_code.py").write_text(TWO)
    names: dict[str, Any] = {}
    exec(TWO, names)
    x, more = torch.randn(60, 3), torch.randn(60, 2)
    uq = latedrop.calibrate(names["two"], ((x, more), torch.randn(60, 1)), progress=False)
    uq.save(tmp_path / "cal.json")
    uq.to_onnx(tmp_path / "two.onnx", (x[:2], more[:2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LATEDROP_TOKEN", raising=False)
    apps: list[Any] = []
    monkeypatch.setattr("latedrop.serving.app.listen", lambda app, *_: apps.append(app))
    code, _, err = call("serve", *(["two_code:two", "cal.json"] if kind == "torch" else ["two.onnx"]))
    assert code == 0, err
    wanted = uq.predict((x[:4], more[:4])).std.numpy()
    with TestClient(apps[0], "http://localhost:8000", client=("127.0.0.1", 5)) as client:
        given = {"x": x[:4].tolist(), "more": more[:4].tolist()}
        for order in (["x", "more"], ["more", "x"]):
            body = client.post("/predict", json={"inputs": {name: given[name] for name in order}}).json()
            assert_same_up_to_rounding(body["std"], wanted)
        for wrong in ({"x": given["x"], "other": given["more"]}, {"other": given["x"]}):
            answer = client.post("/predict", json={"inputs": wrong})
            assert answer.status_code == 422
            assert "expected inputs among x, more; found 'other'" in answer.json()["error"]
        whole = client.post("/predict", json={"inputs": {"x": [[1, 2, 3]], "more": [[1, 2]]}, "dtype": "int64"})
        assert whole.status_code == 422
        file = BytesIO()
        np.save(file, np.ones((2, 3), np.int64))
        assert (
            client.post("/predict", content=file.getvalue(), headers={"Content-Type": "application/x-npy"}).status_code
            == 422
        )
    for words in (["two.onnx", "cal.json"], ["two_code:two"]):
        code, _, err = call("serve", *words)
        assert (code, "expected an .onnx file alone" in err or "expected MODEL and CALIBRATION" in err) == (2, True)
