"""Ray Data: the same bytes however the data are cut, and where a worker dies."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import latedrop
from latedrop.adapters.ray import Asked, Predictions
from latedrop.errors import ArgumentError, DataError, FileError
from networks import mlp
from rounding import assert_same_up_to_rounding

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CODE = """
import os
from pathlib import Path
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

class Mortal(nn.Sequential):
    def forward(self, x):
        flag = Path(__file__).with_name("died")
        if Path(__file__).with_name("kill").exists() and not flag.exists():
            flag.touch()
            os._exit(1)
        return super().forward(x)

mortal = Mortal(*net)
"""
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("ray")
    (where / "ray_code.py").write_text(CODE)
    names: dict[str, Any] = {"__file__": str(where / "ray_code.py")}
    exec(CODE, names)
    dice = np.random.default_rng(0)
    x = dice.normal(size=(200, 3))
    with torch.no_grad():
        y = names["net"](torch.from_numpy(x).float()).numpy() + np.abs(x[:, :1]) * dice.normal(size=(200, 1))
    latedrop.calibrate(names["net"], (x, y), progress=False).save(where / "cal.json")
    (where / "data").mkdir()
    for i in range(3):
        rows = {name: dice.normal(size=500 + i) for name in NAMES}
        rows["a"][7] = np.nan
        parquet.write_table(arrow.table({**rows, "id": np.arange(500 + i) + 1000 * i}), where / "data" / f"{i}.parquet")
    return where


def asked(folder: Path, **more: Any) -> Asked:
    given = {"inputs": NAMES, "keep": ("id",), "folder": str(folder), "device": "cpu", "batch_size": 64}
    return Asked("ray_code:net", str(folder / "cal.json"), **{**given, **more})


def whole(folder: Path) -> Any:
    return arrow.concat_tables([parquet.read_table(file) for file in sorted(folder.glob("*.parquet"))])


def alike(one: Any, other: Any) -> bool:
    """Whether two tables have the same bytes, NaN included."""
    if one.column_names != other.column_names or len(one) != len(other):
        return False
    return all(one[name].to_numpy().tobytes() == other[name].to_numpy().tobytes() for name in one.column_names)


def test_a_table_is_predicted_as_the_predictor_does(folder: Path) -> None:
    table = whole(folder / "data")
    predictions = Predictions(asked(folder))(table)
    assert predictions.column_names == ["id", "mean", "std", "low", "high", "novelty"]
    assert predictions["id"].equals(table["id"])
    x = np.column_stack([table[name].to_numpy() for name in NAMES])
    finite = np.isfinite(x).all(1)
    network = asked(folder).predictor().model
    wanted = latedrop.load(folder / "cal.json", network).predict(x[finite]).to_dict(0.9)
    for name, values in wanted.items():
        assert np.isnan(predictions[name].to_numpy()[~finite]).all()
        assert_same_up_to_rounding(predictions[name].to_numpy()[finite], values.numpy().reshape(-1))


@pytest.mark.parametrize("cuts", [(700,), (1, 2, 64, 65, 1000)])
def test_the_cut_changes_no_byte(folder: Path, cuts: tuple[int, ...]) -> None:
    table, predictions = whole(folder / "data"), Predictions(asked(folder))
    bounds = [0, *cuts, len(table)]
    parts = [predictions(table.slice(i, j - i)) for i, j in pairwise(bounds)]
    assert alike(arrow.concat_tables(parts), predictions(table))
    assert len(predictions(table.slice(0, 0))) == 0


def test_what_cannot_be_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="expected the columns d"):
        Predictions(asked(folder, inputs=(*NAMES, "d")))(whole(folder / "data"))
    with pytest.raises(DataError, match="its type is string"):
        Predictions(asked(folder))(arrow.table({"a": ["x"], "b": [1.0], "c": [1.0], "id": [1]}))
    for wrong, match in (
        ({"inputs": ()}, "the input columns"),
        ({"batch_size": 0}, "at least 1"),
        ({"level": 2}, "inside"),
    ):
        with pytest.raises(ArgumentError, match=match):
            Predictions(asked(folder, **wrong))
    own = mlp(3, 16, 1, act=torch.nn.ReLU, seed=5)
    data = torch.randn(50, 3), torch.randn(50, 1)
    uq = latedrop.calibrate(own, data, method=latedrop.Sampling(rates=[0.1], draws=10, shared=False), progress=False)
    uq.save(folder / "apart.json")
    (folder / "apart_code.py").write_text(
        "import torch\nfrom torch import nn\n\ntorch.manual_seed(0)\n"
        "net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))\n"
    )
    apart = Asked("apart_code:net", str(folder / "apart.json"), folder=str(folder))
    with pytest.warns(match="weights"), pytest.raises(ArgumentError, match="depend on how the data are cut"):
        apart.predictor()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_partitions_and_a_killed_worker_change_no_byte(folder: Path, cluster: Any, tmp_path: Path) -> None:
    from latedrop.adapters.ray import predict_folder

    once = Predictions(asked(folder))(whole(folder / "data"))
    for partitions in (1, 2, 7):
        out = tmp_path / f"out{partitions}"
        count = predict_folder(asked(folder), str(folder / "data"), str(out), workers=2, partitions=partitions)
        assert count == len(once)
        assert alike(whole(out), once)
    (folder / "kill").touch()
    mortal = replace(asked(folder), model="ray_code:mortal")
    predict_folder(mortal, str(folder / "data"), str(tmp_path / "killed"), workers=2, partitions=7)
    assert (folder / "died").exists()
    assert alike(whole(tmp_path / "killed"), once)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_an_error_in_a_worker_is_told_as_here(folder: Path, cluster: Any, tmp_path: Path) -> None:
    from latedrop.adapters.ray import predict_folder

    with pytest.raises(FileError, match="expected no"):
        predict_folder(asked(folder), str(folder / "data"), str(tmp_path))
    with pytest.raises(DataError, match=r"^expected the columns zz in all files; found a table without"):
        predict_folder(asked(folder, keep=("zz",)), str(folder / "data"), str(tmp_path / "wrong"))
    assert list(tmp_path.iterdir()) == []
