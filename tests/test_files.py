"""Files on disk: whole or not there, whoever else writes; no output takes the place of an input."""

import os
import subprocess
from pathlib import Path

import pytest

from latedrop.errors import ArgumentError, FileError
from latedrop.files import aside, check_apart, write_aside

posix = pytest.mark.skipif(os.name == "nt", reason="links and devices of POSIX")


def test_the_last_to_finish_wins_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with aside(path) as first:
        first.write_bytes(b"first" * 1000)
        with aside(path) as second:
            assert second != first
            second.write_bytes(b"second")
        assert path.read_bytes() == b"second"
        with first.open("ab") as file:
            file.write(b"end")
    assert path.read_bytes() == b"first" * 1000 + b"end"
    assert list(tmp_path.iterdir()) == [path]


@posix
def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "inner" / "real.json")
    write_aside(link, b"through")
    assert link.is_symlink()
    assert (tmp_path / "inner" / "real.json").read_bytes() == b"through"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write_aside(pipe, b"content")
        assert reader.communicate()[0] == b"content"
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "link.json", "pipe"]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"expected to write .*out.csv; the system says"):
        write_aside(tmp_path / "nowhere" / "out.csv", b"")


@posix
def test_an_output_that_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("a\n1\n")
    Path("soft.csv").symlink_to("in.csv")
    os.link("in.csv", "hard.csv")
    Path("inner").mkdir()
    for output in ("in.csv", "./in.csv", str(tmp_path / "in.csv"), "inner/../in.csv", "soft.csv", "hard.csv"):
        with pytest.raises(ArgumentError, match="expected --output and --data to be two files; found one, "):
            check_apart({"--output": output}, {"--weights": None, "--data": "in.csv"})
    with open("in.csv", "a") as stream, pytest.raises(ArgumentError, match="two files"):
        check_apart({"--output": stream.fileno()}, {"--data": "in.csv"})
    with pytest.raises(ArgumentError, match="expected --report and --output to be two files"):
        check_apart({"--output": "new.html", "--report": "./new.html"}, {"--data": "in.csv"})
    check_apart({"--output": "other.csv", "--report": None}, {"--data": "in.csv", "--model": "not/there"})
    check_apart({"--output": os.devnull}, {"--data": os.devnull})
