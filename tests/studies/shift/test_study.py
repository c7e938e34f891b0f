"""The whole study in small, on a table of one's own: what it writes, and that it goes on where it was."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latedrop.errors import ArgumentError, DataError, FileError
from studies.shift import study as shift
from studies.shift.measured_set import Settings
from studies.shift.measures import MEASURES
from studies.shift.study import Request, main, read, run, study
from studies.uci.data import SETS

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "uci"
HOWS = ("raw", "scaled", "floor")
MEASURED = ("injected", "embedded", "concrete", "laplace", "ensemble", "ensemble variance", "gaussian",
            "gaussian ensemble", "rate-in", "swag")  # fmt: skip
TINY = Settings(epochs=0.002, draws=3)


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift, "_QUICK", TINY)


def written(path: Path, rows: int = 150) -> Path:
    """A table whose first two inputs can be cut; the third has two values."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3))
    x[:, 2] = x[:, 2] > 0
    y = x[:, 0] + np.sin(x[:, 1]) + x[:, 2] + 0.1 * random.normal(size=rows)
    lines = [",".join(f"{value:.6f}" for value in row) for row in np.column_stack([x, y])]
    path.write_text("\n".join(["a,b,c,y", *lines]) + "\n", encoding="utf-8")
    return path


def tiny(out: Path, **changes: Any) -> Request:
    options = {"csv": written(out.parent / "mine.csv"), "target": "y", "quick": True, "progress": False}
    return Request(out, device="cpu", **options | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and pages, as a user runs it."""
    place = tmp_path_factory.mktemp("shift")
    table, out = written(place / "mine.csv"), place / "out"
    words = ["--csv", str(table), "--target", "y", "--quick", "--no-progress", "--device", "cpu", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shift, "_QUICK", TINY)
        assert main(words) == 0
    return out


def test_every_measure_of_every_method_and_cut(folder: Path) -> None:
    record = read(folder, ["mine"])["mine"]
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
    methods = read(folder, ["mine"])["mine"]["methods"]
    constant = methods["constant"]
    assert constant["auroc"] == [0.5] * 4
    np.testing.assert_allclose(constant["variance_growth"], 0, atol=1e-6)
    growth = 2 * np.log(np.array(constant["rmse"]) / np.array(constant["inside_rmse"]))
    np.testing.assert_allclose(constant["error_growth"], growth, atol=2e-3)
    for name in ("laplace, floor", "leverage, scaled", "ensemble variance, raw"):
        np.testing.assert_allclose(methods[name]["rmse"], constant["rmse"], rtol=1e-3)
    # A scale does not change the order of rows.
    np.testing.assert_allclose(methods["laplace, raw"]["auroc"], methods["laplace, scaled"]["auroc"], atol=1e-3)


def test_pages_come_from_the_json_alone(folder: Path) -> None:
    before = (folder / "index.md").read_text(encoding="utf-8")
    files = study(Request(folder, csv=folder.parent / "mine.csv", target="y"), figures_only=True)
    assert (folder / "index.md").read_text(encoding="utf-8") == before
    assert {"index.md", "claims.md"} <= {path.name for path in files}
    assert "- mine, input 2 above: " in before
    assert "decide nothing" in (folder / "claims.md").read_text(encoding="utf-8")
    if find_spec("matplotlib") is not None:
        assert {"coverage.png", "auroc.png", "growth.png"} <= {path.name for path in files}


def test_a_stopped_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "mine.json").read_bytes()
    monkeypatch.setattr(shift, "measure", lambda *_: pytest.fail("computed again"))
    assert run(tiny(folder)) == [folder / "mine.json"]
    assert "mine: kept" in capsys.readouterr().err
    with pytest.raises(FileError, match="Pass another --out, or --fresh"):
        run(tiny(folder, seed=3))
    assert (folder / "mine.json").read_bytes() == before


def test_what_a_kill_leaves_is_a_finished_set_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not FOLDER.is_dir():
        pytest.skip("the UCI files are not at ../shared/data/uci")
    done = []

    def once(item: Any, *_: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append(item.name)
        return {"cuts": [], "left_out": [], "seconds": {}}

    monkeypatch.setattr(shift, "measure", once)
    words = ["--quick", "--data", str(FOLDER), "--sets", "yacht,energy", "--no-progress", "--out", str(tmp_path)]
    assert main(words) == 130
    assert "finished sets are kept" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["yacht.json"]
    assert main(words) == 130
    assert "yacht: kept" in capsys.readouterr().err


@pytest.mark.slow
def test_the_seed_and_the_table_matter(folder: Path, tmp_path: Path) -> None:
    again, other = (run(tiny(tmp_path / str(seed), seed=seed))[0].parent for seed in (0, 1))
    first, second, third = (read(place, ["mine"])["mine"]["methods"] for place in (folder, again, other))
    assert first == second
    assert first != third


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileError, match=r"found none\. Pass --data"):
        run(Request(tmp_path, tmp_path, sets="energy"))
    with pytest.raises(ArgumentError, match="expected --csv FILE and --target COLUMN together"):
        run(tiny(tmp_path / "out", target=None))
    assert main(["--sets", "moon", "--out", str(tmp_path)]) == 2
    assert main(["--figures", "--out", str(tmp_path)]) == 1
    assert "Run the study first" in capsys.readouterr().err
    flat = tmp_path / "flat.csv"
    flat.write_text("a,y\n" + "".join(f"{i % 2},{i}\n" for i in range(150)), encoding="utf-8")
    with pytest.raises(DataError, match="expected an input of flat with at least 15 % of the rows beyond"):
        run(tiny(tmp_path / "out", csv=flat))


def test_a_common_recipe_has_the_steps_of_the_uci_study() -> None:
    yacht, protein = SETS["yacht"], SETS["protein-tertiary-structure"]
    plan = Settings().plan(yacht, 138)
    assert (plan.hidden, plan.learning_rate, plan.batch) == ((50, 50, 50), yacht.learning_rate, yacht.batch)
    assert plan.epochs * 5 == pytest.approx(1250 * 7, abs=5)  # 5 steps an epoch here, 7 of 222 rows there
    assert Settings().plan(protein, 2240).epochs * 35 == pytest.approx(20_000, abs=35)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("typer") is None, reason="needs typer")
def test_the_command_line_draws(folder: Path) -> None:
    code = "from latedrop.cli.app import main; main()"
    words = ["study", "shift", "--figures", "--out", str(folder), "--csv", str(folder.parent / "mine.csv")]
    command = [sys.executable, "-c", code, *words, "--target", "y"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "claims.md" in done.stdout
