"""The whole study in small, on the digits: what it writes, and that it goes on where it was."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latedrop.errors import ArgumentError, FileError
from studies.claims import decide
from studies.classification import study as classification
from studies.classification.claims import CLAIMS
from studies.classification.data import SETS
from studies.classification.measured_unit import Settings
from studies.classification.measures import MEASURES
from studies.classification.study import Request, main, read, run, study
from studies.classification.tables import told, values

pytest.importorskip("sklearn", reason="needs scikit-learn")
pytestmark = pytest.mark.slow  # together half a minute
TINY = Settings(epochs=0.1, shifted=40, strange=40, draws=3)
SMALL = replace(SETS["digits-mlp"], train=300, validation=80, test=150)
METHODS = {"softmax", "temperature", "guard", "leverage", "dropout", "leverage + dropout", "default", "draws",
           "embedded", "ensemble", "laplace"}  # fmt: skip


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "_QUICK", TINY)
    monkeypatch.setitem(SETS, "digits-mlp", SMALL)


def tiny(out: Path, **changes: Any) -> Request:
    return Request(out, **{"quick": True, "progress": False, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and the page, as a user runs it."""
    out = tmp_path_factory.mktemp("classification") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification, "_QUICK", TINY)
        patch.setitem(SETS, "digits-mlp", SMALL)
        assert main(["--quick", "--no-progress", "--device", "cpu", "--out", str(out)]) == 0
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


def test_means_over_parts(folder: Path) -> None:
    record = read(folder)["digits-mlp"]
    nll = np.array([unit["methods"]["default"]["nll"] for unit in record["units"]])
    np.testing.assert_allclose(values(record, "default", "nll"), nll[:, 0])
    np.testing.assert_allclose(values(record, "default", "nll", "shift"), nll[:, 1:].mean(1))
    np.testing.assert_allclose(values(record, "default", "nll", "noise"), nll[:, 6:11].mean(1))
    np.testing.assert_allclose(values(record, "default", "nll", "blur-5"), nll[:, 15])
    assert values(record, "moon", "nll") is None
    auroc = [unit["scores"]["energy"]["auroc"] for unit in record["units"]]
    if find_spec("matplotlib") is not None:  # letters are the only other set
        assert record["units"][0]["others"][-2] == "letters"
        np.testing.assert_allclose(told(record, "energy"), np.array(auroc)[:, -2])
    assert told(record, "energy", where="mnist") is None
    np.testing.assert_allclose(told(record, "energy", where="uniform noise"), np.array(auroc)[:, -1])


def test_pages_come_from_the_json_alone(folder: Path) -> None:
    before = (folder / "index.md").read_text(encoding="utf-8")
    files = study(Request(folder), figures_only=True)
    assert (folder / "index.md").read_text(encoding="utf-8") == before
    assert "decide nothing" in before
    assert all(claim.text in before for claim in CLAIMS)
    if find_spec("matplotlib") is not None:
        assert {"gains.png", "strengths.png", "strange.png"} <= {path.name for path in files}


def test_claims_compare_repeat_by_repeat() -> None:
    def record(gains: list[float]) -> dict[str, Any]:
        units = [
            {"labelled": ["test"], "methods": {"temperature": {"nll": [0.5 + i]}, "default": {"nll": [0.5 + i - gain]}}}
            for i, gain in enumerate(gains)
        ]
        return {"units": units, "overlap": 0.0}

    (claim,) = [c for c in CLAIMS if c.text == "The default has a lower NLL than one temperature"]
    results = {"up": record([0.1, 0.11, 0.12]), "down": record([-0.1, -0.11, -0.12]), "one": record([0.1])}
    found = {name: outcome.verdict for name, outcome in decide(claim, results).items()}
    assert found == {"up": "holds", "down": "fails", "one": "not decided"}


def test_a_stopped_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "digits-mlp-1.json").read_bytes()
    monkeypatch.setattr(classification, "measure", lambda *_: pytest.fail("computed again"))
    assert run(tiny(folder)) == [folder / f"digits-mlp-{i}.json" for i in (0, 1)]
    assert "digits-mlp-1: kept" in capsys.readouterr().err
    with pytest.raises(FileError, match="Pass another --out, or --fresh"):
        run(tiny(folder, seed=3))
    assert (folder / "digits-mlp-1.json").read_bytes() == before


def test_a_kill_leaves_finished_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []

    def once(item: Any, images: Any, repeat: int, *_: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append(repeat)
        return {"seconds": {}}

    monkeypatch.setattr(classification, "measure", once)
    words = ["--quick", "--no-progress", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(words) == 130
    assert "finished repeats are kept" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["digits-mlp-0.json"]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileError, match="expected folders of mnist in --data; found none"):
        run(tiny(tmp_path, sets="mnist-cnn"))
    with pytest.raises(ArgumentError, match="expected at most 5 --repeats"):
        run(tiny(tmp_path, repeats=6))
    with pytest.raises(FileError, match="it is not there"):
        run(tiny(tmp_path, data=tmp_path / "nowhere"))
    assert main(["--repeats", "0", "--out", str(tmp_path)]) == 2
    assert main(["--sets", "moon", "--out", str(tmp_path)]) == 2
    assert main(["--figures", "--out", str(tmp_path)]) == 1
    assert "Run the study first" in capsys.readouterr().err
    (tmp_path / "digits-mlp-0.json").write_text(json.dumps({"schema": 1}), encoding="utf-8")
    assert main(["--figures", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("typer") is None, reason="needs typer")
def test_the_command_line_draws(folder: Path) -> None:
    code = "from latedrop.cli.app import main; main()"
    words = ["study", "classification", "--figures", "--out", str(folder)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "index.md" in done.stdout
