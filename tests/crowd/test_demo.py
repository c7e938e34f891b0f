"""The whole chain on small scenes: every step measured, everything in files, nothing global touched."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("scipy")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

from latedrop.errors import ArgumentError
from latedrop_crowd import demo as room
from latedrop_crowd.calibration import load_calibration
from latedrop_crowd.counting import finished_frames
from latedrop_crowd.demo import CrowdDemo, rejection_table, run, write
from latedrop_crowd.mcnn import MCNN, Trained
from latedrop_crowd.scenes import make_scenes
from rounding import assert_same_up_to_rounding

SHAPE = (72, 96)


@pytest.fixture(scope="module")
def trained() -> Trained:
    model = MCNN()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.uniform_(module.weight, -0.05, 0.1)
                nn.init.uniform_(module.bias, 0.1, 0.2)
    return Trained(model.eval(), None, {"set": "scenes"})


@pytest.fixture(scope="module")
def result(trained: Trained) -> CrowdDemo:
    return run(3, scenes=make_scenes(4, 10, 4, shape=SHAPE), trained=trained, progress=False)


def test_everything_is_measured(result: CrowdDemo) -> None:
    assert [row.label for row in result.evaluations] == ["sampled, raw", "sampled, scaled", "sampling-free", "constant"]
    assert {row.rows for row in result.evaluations} == {4}
    assert set(room.NOTES) == {row.label for row in result.evaluations}
    assert result.scenes == {"validation": 10, "test": 4}
    assert len(result.counted) == len(result.prediction) == len(result.sampled) == 4
    assert result.calibration.policy is not None
    assert result.rejection["frames"] == result.scenes
    assert {"10", "4"} <= set(result.headline().split())
    assert set(result.seconds) == {
        "scenes",
        "calibration, sampling-free",
        "counting, sampling-free",
        "rejection",
        "calibration and counting, sampled",
    }


def test_coverage_is_that_of_the_counted_frames(result: CrowdDemo) -> None:
    free = next(row for row in result.evaluations if row.label == "sampling-free")
    inside = [row.low <= true <= row.high for row, true in zip(result.counted, result.target.tolist(), strict=True)]
    assert free.coverage == pytest.approx(np.mean(inside))
    stds = [row.std for row in result.counted]
    assert_same_up_to_rounding(result.prediction.std, stds)


def test_files(result: CrowdDemo, trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("of an earlier run\n")
    files = write(result, tmp_path)
    assert sorted(files) == sorted(tmp_path.iterdir())
    names = {path.name for path in files}
    assert {"report.html", "demo.png", "result.json", "counts.csv", "scenes.calibration.json"} < names
    assert sum(name.endswith(".panel.png") for name in names) == 3
    record = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert record["evaluations"][0]["label"] == "sampled, raw"
    assert [row["true"] for row in record["test"]] == result.target.tolist()
    assert set(finished_frames(tmp_path / "counts.csv")) == {row.name for row in result.counted}
    assert load_calibration(tmp_path / "scenes.calibration.json", trained).to_json() == result.calibration.to_json()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == 3
    assert 'class="verdict"' in page
    assert result.rejection["why"] in page


def test_table_of_rejection(result: CrowdDemo) -> None:
    table = rejection_table(result.rejection)
    assert [line[0] for line in table[1:]] == [
        "before",
        "after rejection",
        "as many at random",
        "as many of least mass",
        "low density, tuned",
    ]
    assert {len(line) for line in table} == {7}
    assert table[1][2] == str(result.rejection["before"]["false_kept"])


def test_random_state_is_left_alone(trained: Trained) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()
    run(2, scenes=make_scenes(4, 10, 3, shape=SHAPE), trained=trained, progress=False)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="at least 2 draws"):
        run(1)
    with pytest.raises(ArgumentError, match=r"expected a seed from 0 to 2\*\*32 - 1; found -1"):
        run(seed=-1)
