"""The whole study in small, on a table of its own: what it writes, and that its measures agree."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latedrop.errors import DataError
from studies.__main__ import main
from studies.driver import read_record
from studies.regression import data
from studies.regression.data import SETS
from studies.shift import study as shift
from studies.shift.study import MEASURES, Settings

HOWS = ("raw", "scaled", "floor")
MEASURED = ("injected", "embedded", "concrete", "laplace", "ensemble", "ensemble variance", "gaussian",
            "gaussian ensemble", "rate-in", "swag")  # fmt: skip


def table(rows: int = 150) -> np.ndarray:
    """A table whose first two inputs can be cut; the third has two values."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3))
    x[:, 2] = x[:, 2] > 0
    return np.column_stack([x, x[:, 0] + np.sin(x[:, 1]) + x[:, 2] + 0.1 * random.normal(size=rows)])


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """A set of its own with few epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shift, "QUICK", Settings(epochs=0.002, draws=3))
        patch.setitem(SETS, "mine", replace(SETS["yacht"], name="mine", rows=150, columns=4, epochs=1000))
        patch.setattr(data, "load", lambda item, folder: table())
        yield


def words(out: Path, *more: str) -> list[str]:
    return ["--sets", "mine", "--quick", "--device", "cpu", "--out", str(out), *more]


def record_of(out: Path) -> dict[str, Any]:
    return read_record(out / "mine.json", shift.SCHEMA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small: None) -> Path:
    """Results and pages, as a user runs it."""
    out = tmp_path_factory.mktemp("shift")
    assert main(["shift", *words(out)]) == 0
    return out


def test_every_measure_of_every_method_and_cut(folder: Path) -> None:
    record = record_of(folder)
    assert [(cut["input"], cut["direction"]) for cut in record["cuts"]] == [
        (0, "above"), (0, "below"), (1, "above"), (1, "below"),
    ]  # fmt: skip
    assert [(one["input"], one["direction"]) for one in record["left_out"]] == [(2, "above"), (2, "below")]
    assert all("it has 2 values" in one["reason"] for one in record["left_out"])
    assert record["rows"] == {"train": 67, "validation": 17, "inside": 21}
    wanted = {f"{name}, {how}" for name in MEASURED for how in HOWS}
    wanted |= {"constant", "default", "default + reference", "injected per site, floor"}
    wanted |= {f"{name}, {how}" for name in ("leverage", "neighbours") for how in ("scaled", "floor")}
    assert set(record["methods"]) == wanted
    for measures in record["methods"].values():
        assert set(measures) == set(MEASURES)
        assert np.isfinite(np.array(list(measures.values()))).all()
        assert {len(values) for values in measures.values()} == {4}


def test_measures_agree_with_one_another(folder: Path) -> None:
    methods = record_of(folder)["methods"]
    constant = methods["constant"]
    assert constant["auroc"] == [0.5] * 4
    np.testing.assert_allclose(constant["variance_growth"], 0, atol=1e-6)
    growth = 2 * np.log(np.array(constant["rmse"]) / np.array(constant["inside_rmse"]))
    np.testing.assert_allclose(constant["error_growth"], growth, atol=2e-3)
    for name in ("laplace, floor", "leverage, scaled", "ensemble variance, raw"):
        np.testing.assert_allclose(methods[name]["rmse"], constant["rmse"], rtol=1e-3)
    # A scale does not change the order of rows.
    np.testing.assert_allclose(methods["laplace, raw"]["auroc"], methods["laplace, scaled"]["auroc"], atol=1e-3)


def test_a_common_recipe_has_the_steps_of_the_uci_study() -> None:
    yacht, protein = SETS["yacht"], SETS["protein-tertiary-structure"]
    plan = Settings().plan(yacht, 138)
    assert (plan.hidden, plan.learning_rate, plan.batch) == ((50, 50, 50), yacht.learning_rate, yacht.batch)
    assert plan.epochs * 5 == pytest.approx(1250 * 7, abs=5)  # 5 steps an epoch here, 7 of 222 rows there
    assert Settings().plan(protein, 2240).epochs * 35 == pytest.approx(20_000, abs=35)


def test_pages_come_from_the_json_alone(folder: Path) -> None:
    before = (folder / "tables.md").read_text(encoding="utf-8")
    assert main(["shift", *words(folder, "--figures")]) == 0
    assert (folder / "tables.md").read_text(encoding="utf-8") == before
    assert "- mine, input 2 above: " in before
    assert "decide nothing" in (folder / "claims.md").read_text(encoding="utf-8")


def test_a_table_that_cannot_be_cut_is_refused() -> None:
    flat = np.array([[i % 2, i] for i in range(150)], dtype=np.float64)
    with pytest.raises(DataError, match="expected an input of mine with at least 15 % of the rows beyond"):
        shift.measure(SETS["mine"], flat, Settings(), torch.device("cpu"))
