"""Wrong options of `latedrop serve` are one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import latedrop

pytest.importorskip("fastapi")

CODE = (
    "import torch\ntorch.manual_seed(0)\nserved = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("served")
    (where / "served_code.py").write_text(CODE)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(CODE, names)
    dice = np.random.default_rng(0)
    data = dice.normal(size=(60, 3)), dice.normal(size=(60, 1))
    latedrop.calibrate(names["served"], data, progress=False).save(where / "cal.json")
    return where


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "expected a token for 0.0.0.0"),
        (["--token-file", "nowhere"], "expected a token at nowhere"),
        (["--batch-rows", "0"], "expected batch_rows to be 1 or more"),
        (["--level", "2"], "expected a probability inside"),
        (["--port", "99999"], "expected a port between 0 and 65535"),
        (["--host", "127.0.0.1.2"], "expected a token for 127.0.0.1.2"),
        (["--transform", "size=x"], "expected size=224"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_options_are_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], options: list[str], said: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("LATEDROP_TOKEN", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    code, out, err = call("serve", "served_code:served", "cal.json", *options)
    assert code in (1, 2)
    assert out == ""
    assert said in err.replace("\n", " ")


def test_an_onnx_file_is_served_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    from fastapi.testclient import TestClient

    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(CODE, names)
    uq = latedrop.load(folder / "cal.json", names["served"])
    file = tmp_path / "served.onnx"
    uq.to_onnx(file, torch.zeros(1, 3))
    apps: list[Any] = []
    monkeypatch.setattr("latedrop.serving.server.listen", lambda app, *_: apps.append(app))
    monkeypatch.delenv("LATEDROP_TOKEN", raising=False)
    code, _, err = call("serve", str(file))
    assert code == 0, err
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with TestClient(apps[0]) as client:
        found = client.post("/predict", json={"rows": rows.tolist(), "level": 0.8}).json()
    expected = uq.predict(rows)
    np.testing.assert_allclose(found["mean"], expected.mean.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["low"], expected.interval(0.8)[0].numpy(), rtol=1e-4, atol=1e-5)
    for wrong in ([str(file), "cal.json"], ["served_code:served"]):
        code, _, err = call("serve", *wrong)
        assert code == 2
        assert "expected an .onnx file alone" in err or "expected MODEL and CALIBRATION" in err
