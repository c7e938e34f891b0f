"""The driver on a study of squares: finished units are kept, others refused, and what was finished survives."""

import errno
import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from latedrop.errors import ArgumentError, DataError, FileError
from studies.__main__ import main
from studies.driver import Study, Unit, command, parsed, read_record, run


def squared(number: int, device: torch.device, tick: Any) -> dict[str, Any]:
    tick(1)
    return {"square": number**2, "seconds": {}}


def refused(device: torch.device, tick: Any) -> dict[str, Any]:
    raise DataError("expected another number; found this one.")


def stopped(device: torch.device, tick: Any) -> dict[str, Any]:
    raise KeyboardInterrupt


def killed_once(mark: Path, device: torch.device, tick: Any) -> dict[str, Any]:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": 49, "seconds": {}}


def units(options: Namespace) -> list[Unit]:
    names = options.sets.split(",") if options.sets else ["1", "2", "3"]
    return [
        Unit(f"{name}.json", {"seed": options.seed}, 1, partial(squared, int(name))) for name in names if name != "0"
    ]


def read(folder: Path, options: Namespace) -> dict[str, dict[str, Any]]:
    return {path.stem: read_record(path, 7) for path in sorted(folder.glob("*.json"))}


def pages(results: Any, folder: Path) -> dict[str, bytes]:
    return {"claims.md": " ".join(str(record["square"]) for record in results.values()).encode()}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--more", type=int)


SQUARES = Study("squares", "Squares of numbers.", "nothing", "little", 7, options, units, read, pages)


def again(study: Study, out: Path, *words: str) -> list[Path]:
    return run(study, parsed(study, ["--out", str(out), "--device", "cpu", *words]))


def with_units(*listed: Unit) -> Study:
    return replace(SQUARES, units=lambda options: list(listed))


def test_records_and_pages(tmp_path: Path) -> None:
    files = again(SQUARES, tmp_path)
    assert [path.name for path in files] == ["1.json", "2.json", "3.json", "claims.md"]
    record = json.loads((tmp_path / "2.json").read_text())
    assert (record["square"], record["schema"], record["seed"]) == (4, 7, 0)
    assert record["seconds"]["total"] >= 0
    assert {"machine", "versions"} < set(record)
    assert (tmp_path / "claims.md").read_text() == "1 4 9"


def test_finished_units_are_kept_and_others_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again(SQUARES, tmp_path, "--sets", "1,2")
    before = (tmp_path / "1.json").read_bytes()
    again(SQUARES, tmp_path)
    assert "1.json: kept, finished before" in capsys.readouterr().err
    assert (tmp_path / "1.json").read_bytes() == before
    with pytest.raises(FileError, match=r"expected results with seed 3 in .*found 0\. Pass another --out, or --fresh"):
        again(SQUARES, tmp_path, "--seed", "3")
    again(SQUARES, tmp_path, "--seed", "3", "--fresh")
    assert json.loads((tmp_path / "1.json").read_text())["seed"] == 3


def test_damaged_and_older_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text("{")
    with pytest.raises(FileError, match="Delete it"):
        again(SQUARES, tmp_path)
    (tmp_path / "1.json").write_text('{"schema": 6}')
    with pytest.raises(FileError, match=r"schema 7, in .*found another\. Delete it, or .* with --fresh"):
        again(SQUARES, tmp_path)
    (tmp_path / "1.json").write_text('{"schema": 7, "square": NaN}')
    with pytest.raises(FileError, match="NaN is no number of JSON"):
        again(SQUARES, tmp_path, "--figures")
    (tmp_path / "1.json").write_text('{"schema": 7}')
    with pytest.raises(FileError, match="results of this study with all fields"):
        again(SQUARES, tmp_path, "--figures")


def test_what_was_finished_survives_a_stop_and_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = with_units(Unit("1.json", {}, 1, partial(squared, 1)), Unit("2.json", {}, 1, stopped))
    assert command(study, ["--out", str(tmp_path), "--device", "cpu"]) == 130
    assert "finished work is kept" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json"]
    before = (tmp_path / "1.json").read_bytes()

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FileError, match="No space left"):
        again(SQUARES, tmp_path, "--sets", "1", "--fresh")
    assert (tmp_path / "1.json").read_bytes() == before


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileError, match=r"expected a folder at .*Check --data"):
        again(SQUARES, tmp_path, "--data", str(tmp_path / "nowhere"))
    with pytest.raises(ArgumentError, match="expected --out and --data to be two"):
        again(SQUARES, tmp_path, "--data", str(tmp_path))
    with pytest.raises(FileError, match="expected data for one of the sets; found none"):
        again(SQUARES, tmp_path, "--sets", "0")
    with pytest.raises(FileError, match="Run the study first"):
        again(SQUARES, tmp_path, "--figures")
    with pytest.raises(ArgumentError, match="expected --device"):
        again(SQUARES, tmp_path, "--device", "abacus")
    with pytest.raises(ArgumentError, match="--gpus with --ray"):
        again(SQUARES, tmp_path, "--gpus", "1")
    for wrong in ("-1", "nan", "100"):
        with pytest.raises(ArgumentError, match="--gpus from 0 to 64"):
            again(SQUARES, tmp_path, "--ray", "auto", "--gpus", wrong)
    assert command(SQUARES, ["--out", str(tmp_path), "--figures"]) == 1


@pytest.mark.slow
def test_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    units = [Unit(f"{n}.json", {}, 1, partial(squared, n)) for n in range(5)]
    study = with_units(*units, Unit("7.json", {}, 1, partial(killed_once, tmp_path / "mark")))
    again(study, tmp_path / "out", "--ray")
    assert (tmp_path / "out" / "claims.md").read_text() == "0 1 4 9 16 49"
    with pytest.raises(DataError, match="expected another number"):
        again(with_units(Unit("a.json", {}, 1, refused)), tmp_path / "other", "--ray")
    assert cluster.is_initialized()  # whoever began it ends it


def test_a_study_runs_as_a_module() -> None:
    line = [sys.executable, "-m", "studies", "uci", "--help"]
    root = Path(__file__).parents[2]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m studies uci ")


def test_an_unknown_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["moon"]) == 2
    assert capsys.readouterr().err.startswith("studies: expected one of uci, shift, classification, crowd; found moon")
    assert main([]) == 0
