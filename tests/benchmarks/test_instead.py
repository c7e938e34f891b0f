"""The comparison of latedrop with what one would use instead: its parts, resuming and tables, on tiny data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import instead
from benchmarks.instead import APART, CHOSEN_ON, METHODS, Case, Predicted, figures, measures
from benchmarks.sets import trained
from latedrop.calibration.tails import Tail
from latedrop.metrics import crps, interval_score, nll


def table_of(count: int = 150, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return np.column_stack([x, x @ [1.0, 0.3, 0.1] + 0.1 * rng.normal(size=count)])


@pytest.fixture(scope="module")
def case() -> Case:
    data = torch.tensor(table_of(), dtype=torch.float32)
    x, y = data[:, :-1], data[:, -1]
    nets = trained([((x[:60], y[:60]), (x[60:70], y[60:70]))] * 5, seed=0, steps=100)
    return Case(nets, x[:70], x[70:], y[70:].double())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_finite_predictions(name: str, case: Case) -> None:
    found = METHODS[name](case)(case.x_val[:9])
    assert found.mean.shape == found.variance.shape == (9,)
    assert bool((found.variance > 0).all())
    scores = measures(found, case.y_val[:9])
    assert scores["score"] < 100
    assert scores["nll"] < 100 or name.startswith("conformal")


def test_measures_are_those_of_the_library() -> None:
    torch.manual_seed(0)
    mean, variance, y = torch.randn(50).double(), torch.rand(50).double() + 0.1, torch.randn(50).double()
    found = measures(Predicted(mean, variance), y)
    assert found["nll"] == pytest.approx(float(nll(mean, variance, y)))
    assert found["crps"] == pytest.approx(float(crps(mean, variance, y)))
    assert found["score"] == pytest.approx(float(interval_score(mean, variance, y, level=0.9)), rel=1e-5)
    wide = measures(Predicted(mean, variance, Tail(3.0)), y)
    assert wide["width"] > found["width"]
    assert wide["coverage"][4] >= found["coverage"][4]


def test_halves_do_not_overlap_and_name_all_sets() -> None:
    assert not set(CHOSEN_ON) & set(APART)
    assert len({*CHOSEN_ON, *APART}) == 17


def test_a_run_writes_each_unit_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instead, "HALVES", {"chosen": ("boston-housing",), "apart": ("yacht",)})
    monkeypatch.setattr(instead, "METHODS", {name: METHODS[name] for name in ("constant", "latedrop", "ensemble")})
    monkeypatch.setattr(instead, "SIZES", (10,))
    monkeypatch.setattr(instead, "STEPS", 60)
    monkeypatch.setattr(instead, "RESULTS", tmp_path)
    monkeypatch.setattr(instead, "table", lambda name: table_of(200, len(name)))
    out = tmp_path / "r.json"
    for only in ("yacht", "boston-housing"):
        instead.main(["--out", str(out), "--seeds", "1", "--only", only, "--nets", str(tmp_path / "nets")])
    record = json.loads(out.read_text())
    assert set(record["units"]) == {"yacht", "boston-housing"}
    assert set(record["units"]["yacht"]["0"]) == {"in", "above", "below"}
    monkeypatch.setitem(instead.METHODS, "constant + t", METHODS["constant + t"])
    instead.main(["--out", str(out), "--seeds", "1", "--nets", str(tmp_path / "nets")])
    more = json.loads(out.read_text())["units"]["yacht"]["0"]["in"]["10"]
    assert set(more) == {"constant", "constant + t", "latedrop", "ensemble"}
    assert more["ensemble"] == record["units"]["yacht"]["0"]["in"]["10"]["ensemble"]  # seconds too: not measured again
    monkeypatch.setattr(instead, "unit", None)  # nothing is left to measure
    instead.main(["--out", str(out), "--seeds", "1"])
    monkeypatch.setattr(instead, "PAGE", tmp_path / "page.md")
    instead.main(["--out", str(out), "--page"])
    assert "| latedrop | " in (tmp_path / "page.md").read_text()


def test_kept_networks_answer_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instead, "STEPS", 60)
    monkeypatch.setattr(instead, "table", lambda name: table_of(100))
    first, second = (instead.cases("yacht", 0, tmp_path) for _ in range(2))
    for (*_, one, (x, _)), (*_, other, _) in zip(first, second, strict=True):
        torch.testing.assert_close(one.nets[3](x), other.nets[3](x))


def test_figures_are_medians_over_sets_of_means_over_units() -> None:
    def part(gain: float) -> dict[str, object]:
        base = {"nll": 1.0, "crps": 2.0, "score": 4.0, "width": 1.0, "ranking": 0.0, "coverage": [0.5] * 5}
        return {"in": {"all": {"constant": base, "m": {**base, "nll": 1 - gain, "score": 2.0}}}}

    record = {"units": {"a": {"0": part(0.1), "1": part(0.3)}, "b": {"0": part(-0.4)}, "c": {"0": part(1.0)}}}
    found = figures(record, ["a", "b", "c", "d"], ["in"], "all", "m")
    assert found is not None
    assert (found.sets, found.worst_set, found.score) == (3, "b", 0.5)
    assert found.gain == pytest.approx(0.2)
    assert figures(record, ["a"], ["above"], "all", "m") is None


def test_a_method_that_needs_more_rows_counts_as_the_one_that_it_falls_back_to() -> None:
    base = {"nll": 1.0, "crps": 2.0, "score": 4.0, "width": 1.0, "ranking": 0.0, "coverage": [0.5] * 5}
    parts = {"constant": base, "latedrop": {**base, "nll": 0.5}}
    more = {**parts, "latedrop, corrected mean": {**base, "nll": 0.2}}
    record = {"units": {"a": {"0": {"in": {"all": parts}}}, "b": {"0": {"in": {"all": more}}}}}
    found = figures(record, ["a", "b"], ["in"], "all", "latedrop, corrected mean")
    assert found is not None
    assert (found.sets, found.worst_set) == (2, "a")
    assert found.gain == pytest.approx(0.65)
