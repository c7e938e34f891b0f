"""Files of the commands on a user's own model: no input is written over, and every wrong file is named."""

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
def folder(user_folder: Path, call: Run) -> Path:
    """A user's folder, as the current one: code, rows, and a calibration."""
    Path("filed_model.py").write_text(CODE)
    x = np.random.default_rng(0).normal(size=(40, 2))
    np.savetxt("val.csv", np.c_[x, x @ [0.1, 0.2]], delimiter=",", header="a,b,y", comments="")
    assert call("calibrate", "filed_model:net", "--data", "val.csv", "--target", "y", *QUICK, "-o", "cal.json")[0] == 0
    return user_folder


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
def test_no_output_replaces_an_input(folder: Path, call: Run, words: Any, option: str, taken: str, source: str) -> None:
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
