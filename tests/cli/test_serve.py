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
