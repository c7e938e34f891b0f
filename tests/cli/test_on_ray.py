"""`latedrop predict --ray`: what is refused before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saved import save_calibrated

CODE = "import torch\ntorch.manual_seed(0)\nnet = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 1))\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("on_ray")
    x = save_calibrated(where, "ray_net", CODE, "net", 2)
    (where / "rows.csv").write_text("a,b\n1,2\n")
    np.savez(where / "rows.npz", x=x)
    (where / "there").mkdir()
    return where


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "rows.csv"], "expected -o with a folder"),
        (["--data", "rows.csv", "-o", "out.csv"], "expected -o with a folder"),
        (["--data", "rows.csv", "-o", "there"], "expected no there yet"),
        (["--data", "rows.csv", "-o", "nowhere/out"], "expected the folder of nowhere/out"),
        (["--data", "rows.npz", "-o", "out"], "expected csv or parquet with --ray"),
        (["--data", "rows.csv", "-o", "out", "--images", "there"], "expected --images without --ray"),
        (["--data", "rows.csv", "-o", "out", "--keep", "c"], "expected column 'c'"),
    ],
    ids=["stdout", "file", "there", "nowhere", "arrays", "images", "column"],
)
def test_wrong_words_are_one_line(folder: Path, monkeypatch: Any, call: Any, words: list[str], said: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    code, out, err = call("predict", "ray_net:net", "cal.json", "--ray", "local", *words)
    assert code in (1, 2)
    assert out == ""
    assert said in " ".join(err.split())


def test_without_ray_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("latedrop.terminal.find_spec", lambda name: None if name == "ray" else find_spec(name))
    code, _, err = call("predict", "ray_net:net", "cal.json", "--ray", "local", "--data", "rows.csv", "-o", "out")
    assert code == 1
    assert "latedrop[ray]" in err
