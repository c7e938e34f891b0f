"""Files of the commands on a user's own model: no input is written over, and every wrong file is named."""

import gzip
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rounding import assert_same_up_to_rounding

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
@pytest.mark.parametrize(
    ("words", "option", "taken", "source"),
    [
        (["predict", "filed_model:net", "cal.json", "--data", "val.csv"], "--output", "val.csv", "--data"),
        (["evaluate", "filed_model:net", "cal.json", "--data", "val.csv"], "--report", "page.html", "CALIBRATION"),
        (["evaluate", "filed_model:net", "cal.json", "--data", "val.csv"], "--report", "weights.html", "--weights"),
        (["calibrate", "filed_model:net", "--data", "val.csv", "--target", "y"], "--output", "val.csv", "--data"),
    ],
)
def test_no_output_takes_the_place_of_an_input(
    folder: Path, call: Run, words: list[str], option: str, taken: str, source: str
) -> None:
    pytest.importorskip("matplotlib")
    if not Path(taken).exists():  # a calibration, or weights, of a name that a page could have
        Path(taken).write_bytes(Path("cal.json").read_bytes())
        words = [taken if word == "cal.json" and source == "CALIBRATION" else word for word in words]
        words += ["--weights", taken] if source == "--weights" else []
    output = f"link{Path(taken).suffix}"
    os.symlink(taken, output)  # other spellings are in tests/test_files.py
    before = content(folder)
    code, out, err = call(*words, option, output)
    assert (code, out) == (2, "")
    assert f"expected {option} and {source} to be two files; found one, {output}" in err
    assert content(folder) == before


@posix
@pytest.mark.slow
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


def calibrate(call: Run, data: str, *words: str) -> tuple[int, str, str]:
    return call("calibrate", "filed_model:net", "--data", data, "--target", "y", *QUICK, "-o", "new.json", *words)


class TestCells:
    def test_gzip_in_and_out(self, call: Run) -> None:
        Path("val.csv.gz").write_bytes(gzip.compress(Path("val.csv").read_bytes()))
        for data, output in (("val.csv.gz", "out.csv.gz"), ("val.csv", "out.csv"), ("val.csv", "again.csv.gz")):
            assert call("predict", "filed_model:net", "cal.json", "--data", data, "-o", output)[0] == 0
        assert gzip.decompress(Path("out.csv.gz").read_bytes()) == Path("out.csv").read_bytes()
        assert Path("out.csv.gz").read_bytes() == Path("again.csv.gz").read_bytes()
        assert calibrate(call, "val.csv.gz")[0] == 0

    @pytest.mark.parametrize(
        "content",
        [b"", b"plain,text\n1,2\n", gzip.compress(b"a,b,y\n" + b"1,2,3\n" * 999, mtime=0)[:-12]],
        ids=["empty", "plain", "cut"],
    )
    def test_gzip_that_is_none(self, call: Run, content: bytes) -> None:
        Path("bad.csv.gz").write_bytes(content)
        code, _, err = calibrate(call, "bad.csv.gz")
        assert (code, err.count("\n")) == (1, 1)
        assert "bad.csv.gz" in err
        assert content == b"" or "expected gzip in bad.csv.gz; it is damaged or something else" in err

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('"two\nlines",2,3', "expected numbers in column 'a' of bad.csv; found 'two\\nlines' in line 4"),
            ("1,x,3", "expected numbers in column 'b' of bad.csv; found 'x' in line 4"),
            ("1,2", "expected 3 cells in every line of bad.csv; found 2 in line 4"),
            ("1,,3", "found NaN, infinite or missing ones, first at line 4"),
            ("1,1e999,3", "found NaN, infinite or missing ones, first at line 4"),
            ("1,2,\udcff", "expected bad.csv as UTF-8 text; found other bytes in line 4, b'\\xff"),
        ],
    )
    def test_every_message_about_a_cell_has_its_line(self, call: Run, line: str, message: str) -> None:
        text = "\n".join(["a,b,y", "1,2,3", "2,3,4", line, "4,5,6"])
        Path("bad.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
        code, _, err = calibrate(call, "bad.csv")
        assert (code, err.count("\n")) == (1, 1)
        assert message in err.replace("two lines", "two\\nlines")

    @pytest.mark.filterwarnings("default")
    def test_an_absurd_cell_ends_no_prediction(self, call: Run) -> None:
        Path("odd.csv").write_text("a,b\n1,2\n2,1e30\n1,1e300\n1,\n2,3\n")
        Path("fine.csv").write_text("a,b\n1,2\n2,3\n")
        for name in ("odd", "fine"):
            assert (
                call("predict", "filed_model:net", "cal.json", "--data", f"{name}.csv", "-o", f"{name}_out.csv")[0] == 0
            )
        columns, fine = (np.genfromtxt(f"{name}_out.csv", delimiter=",", names=True) for name in ("odd", "fine"))
        assert_same_up_to_rounding(columns["std"][[0, 4]], fine["std"])
        assert (columns["std"][1:3] > fine["std"].max()).all()
        assert np.isnan(columns["std"][3])


class TestTheRealCause:
    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            (("--readout", "filed_model:net"), 1, "expected a readout that takes the model's output, Tensor of shape"),
            (("--readout", "filed_model:nothing"), 2, "expected 'nothing' in filed_model; it is not there"),
            (("--device", "gpu"), 2, "found 'gpu', which this machine or this torch does not have"),
            (("--device", "cuda:63"), 2, "found 'cuda:63', which this machine"),
        ],
    )
    def test_of_options(self, call: Run, words: tuple[str, ...], code: int, message: str) -> None:
        status, _, err = calibrate(call, "val.csv", *words)
        assert (status, err.count("\n")) == (code, 1)
        assert message in err
