"""Files of the commands on a user's own model: no input is written over, and every wrong file is named."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from latedrop.cli import app as cli

for package in ("typer", "rich"):
    pytest.importorskip(package, reason="typer and rich make the command line")

CODE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()
"""
QUICK = ("--rates", "0.3", "--draws", "5")
Run = Callable[..., tuple[int, str, str]]
posix = pytest.mark.skipif(os.name == "nt", reason="links of POSIX")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        printed = capsys.readouterr()
        assert isinstance(stop.value.code, int | None)
        return stop.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Run) -> Iterator[Path]:
    """A user's folder, as the current one: code, rows, and a calibration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("filed_model.py").write_text(CODE)
    x = np.random.default_rng(0).normal(size=(40, 2))
    np.savetxt("val.csv", np.c_[x, x @ [0.1, 0.2]], delimiter=",", header="a,b,y", comments="")
    assert call("calibrate", "filed_model:net", "--data", "val.csv", "--target", "y", *QUICK, "-o", "cal.json")[0] == 0
    yield tmp_path
    sys.modules.pop("filed_model", None)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@posix
@pytest.mark.parametrize("spelling", ["same", "./same", "absolute", "soft link", "hard link"])
@pytest.mark.parametrize(
    ("words", "option", "taken", "source"),
    [
        (["predict", "filed_model:net", "cal.json", "--data", "val.csv"], "--output", "val.csv", "--data"),
        (["evaluate", "filed_model:net", "cal.json", "--data", "val.csv"], "--report", "page.html", "CALIBRATION"),
        (["evaluate", "filed_model:net", "cal.json", "--data", "val.csv"], "--plot", "weights.png", "--weights"),
        (["calibrate", "filed_model:net", "--data", "val.csv", "--target", "y"], "--output", "val.csv", "--data"),
        (["calibrate", "filed_model:net", "--data", "val.csv", "--target", "y"], "--output", "filed_model.py", "MODEL"),
    ],
)
def test_no_output_takes_the_place_of_an_input(
    folder: Path, call: Run, words: list[str], option: str, taken: str, source: str, spelling: str
) -> None:
    pytest.importorskip("matplotlib")
    if not Path(taken).exists():  # a calibration, or weights, of a name that a page could have
        Path(taken).write_bytes(Path("cal.json").read_bytes())
        words = [taken if word == "cal.json" and source == "CALIBRATION" else word for word in words]
        words += ["--weights", taken] if source == "--weights" else []
    output = {"same": taken, "./same": f"./{taken}", "absolute": str(folder / taken)}.get(spelling)
    if output is None:
        output = f"link{Path(taken).suffix}"
        (os.symlink if spelling == "soft link" else os.link)(taken, output)
    before = content(folder)
    code, out, err = call(*words, option, output)
    assert (code, out) == (2, "")
    assert f"expected {option} and {source} to be two files; found one, {output}" in err
    assert content(folder) == before


def test_two_outputs_are_two_files(call: Run) -> None:
    pytest.importorskip("matplotlib")
    words = ("calibrate", "filed_model:net", "--data", "val.csv", "--target", "y", *QUICK)
    code, _, err = call(*words, "-o", "c.html", "--report", "./c.html")
    assert (code, "expected --report and --output to be two files" in err) == (2, True)


@posix
def test_streams_that_are_the_other_file(folder: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from latedrop.cli.app import main; main()",
        "predict",
        "filed_model:net",
        "cal.json",
    ]
    before = content(folder)["val.csv"]
    with open("val.csv", "a") as out:  # >> val.csv would read what it writes, without end
        done = subprocess.run([*command, "--data", "val.csv"], stdout=out, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, b"expected --output and --data to be two files" in done.stderr) == (2, True)
    with open("val.csv") as rows:
        words = [*command, "--data", "-", "-o", "val.csv"]
        done = subprocess.run(words, stdin=rows, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, b"expected --output and --data to be two files" in done.stderr) == (2, True)
    assert content(folder)["val.csv"] == before


def test_two_processes_with_one_output(folder: Path) -> None:
    """Both end well, and the file is what one of them writes alone."""
    lines = Path("val.csv").read_text().splitlines()
    Path("long.csv").write_text("\n".join([lines[0], *lines[1:] * 50]))

    def predict(name: str, output: str) -> "subprocess.Popen[bytes]":
        code = "from latedrop.cli.app import main; main()"
        words = ["predict", "filed_model:net", "cal.json", "--data", name, "-o", output, "--batch-size", "8"]
        return subprocess.Popen([sys.executable, "-c", code, *words])

    jobs = predict("long.csv", "out.csv"), predict("val.csv", "out.csv"), predict("long.csv", "alone.csv")
    assert [job.wait() for job in jobs] == [0, 0, 0]
    alone = Path("alone.csv").read_bytes()
    first = b"".join(alone.splitlines(keepends=True)[: len(lines)])
    assert Path("out.csv").read_bytes() in (alone, first)
    assert not list(folder.glob("*.part"))


@posix
def test_rows_of_a_killed_command_are_cleaned_up(folder: Path, call: Run) -> None:
    left = Path("out.csv.0123456789abcdef.part")
    left.write_text("half of the rows")
    os.utime(left, (time.time() - 100, time.time() - 100))
    assert call("predict", "filed_model:net", "cal.json", "--data", "val.csv", "-o", "out.csv")[0] == 0
    assert not left.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "filed_model:Net", "--data", "val.csv", "--target", "y", *QUICK, "-o", "new.json"),
        ("predict", "filed_model:Net", "cal.json", "--data", "val.csv", "-o", "new.csv"),
        ("evaluate", "filed_model:Net", "cal.json", "--data", "val.csv"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.filterwarnings("default")
def test_forgotten_weights(folder: Path, call: Run, words: tuple[str, ...]) -> None:
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "expected filed_model:Net to have trained weights; found random ones" in err
    assert not list(folder.glob("new.*"))
    assert call(*words, "--untrained")[0] == 0
    torch.save(sys.modules["filed_model"].net().state_dict(), "net.pt")
    code, _, err = call(*words, "--weights", "net.pt")
    assert (code, "weights" in err) == (0, False)
