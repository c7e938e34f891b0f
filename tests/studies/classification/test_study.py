"""The whole study in small, on the digits: what it writes, and that its measures agree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latedrop.errors import ArgumentError, FileError
from studies.__main__ import main
from studies.classification import study as classification
from studies.classification.claims import CLAIMS
from studies.classification.data import SETS
from studies.classification.methods import MEASURES
from studies.classification.study import STUDY, Settings
from studies.driver import parsed, run

pytest.importorskip("sklearn", reason="needs scikit-learn")
pytestmark = pytest.mark.slow  # together half a minute
TINY = Settings(epochs=0.1, shifted=40, strange=40, draws=3)
SMALL = replace(SETS["digits-mlp"], train=300, validation=80, test=150)
METHODS = {"softmax", "temperature", "guard", "leverage", "dropout", "leverage + dropout", "default", "draws",
           "embedded", "ensemble", "laplace"}  # fmt: skip


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "QUICK", TINY)
    monkeypatch.setitem(SETS, "digits-mlp", SMALL)


def read(out: Path) -> dict[str, dict[str, Any]]:
    return STUDY.read(out, parsed(STUDY, []))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and the page, as a user runs it."""
    out = tmp_path_factory.mktemp("classification") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification, "QUICK", TINY)
        patch.setitem(SETS, "digits-mlp", SMALL)
        assert main(["classification", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    return out


def test_every_measure_of_every_method(folder: Path) -> None:
    units = read(folder)["digits-mlp"]["units"]
    assert [unit["repeat"] for unit in units] == [0, 1]
    for unit in units:
        assert set(unit["methods"]) == METHODS
        assert len(unit["labelled"]) == 16
        for measures in unit["methods"].values():
            assert set(measures) == set(MEASURES)
            assert np.isfinite(np.array(list(measures.values()))).all()
        assert unit["others"][-1] == "uniform noise"
        for told_by in unit["scores"].values():
            assert all(0 <= value <= 1 for each in told_by.values() for value in each)
    assert units[0]["methods"] != units[1]["methods"]


def test_measures_agree_with_one_another(folder: Path) -> None:
    methods = read(folder)["digits-mlp"]["units"][0]["methods"]
    for name in ("temperature", "guard", "leverage"):  # a temperature does not change which class is likeliest
        assert methods[name]["accuracy"] == methods["softmax"]["accuracy"]
    assert methods["ensemble"]["accuracy"] != methods["softmax"]["accuracy"]


def test_pages_come_from_the_json_alone(folder: Path) -> None:
    before = {name: (folder / name).read_text(encoding="utf-8") for name in ("tables.md", "claims.md")}
    assert main(["classification", "--figures", "--out", str(folder)]) == 0
    assert all((folder / name).read_text(encoding="utf-8") == text for name, text in before.items())
    assert "decide nothing" in before["claims.md"]
    assert all(claim.text in before["claims.md"] for claim in CLAIMS)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="expected data for one of the sets; found none"):
        run(STUDY, parsed(STUDY, ["--sets", "mnist-cnn", "--out", str(tmp_path)]))
    with pytest.raises(ArgumentError, match="expected at most 5 --repeats"):
        run(STUDY, parsed(STUDY, ["--repeats", "6", "--out", str(tmp_path)]))
    assert main(["classification", "--repeats", "0", "--out", str(tmp_path)]) == 2
