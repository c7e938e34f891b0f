"""Linux, macOS and Windows, and devices: what only some machines have is not taken for granted."""

import ast
import hashlib
import io
import sys
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn

import pytest
import torch

import latedrop
from latedrop import files
from latedrop.devices import chosen_device
from latedrop.errors import ArgumentError

SOURCE = Path(latedrop.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "crypt", "syslog"}
POSIX_NAMES = {"fork", "forkpty", "killpg", "getuid", "geteuid", "setsid", "mkfifo", "sched_getaffinity", "SIGKILL"}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_of_one_system_without_need(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    guarded = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and id(node) not in guarded
        for alias in node.names
    }
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert imported & POSIX_MODULES == set()
    assert used & POSIX_NAMES == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_text_is_read_and_written_as_utf_8(path: Path) -> None:
    """Windows reads text in its own code page, where nothing else is said."""
    silent = [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("read_text", "write_text")
        and "encoding" not in {word.arg for word in node.keywords}
    ]
    assert silent == []


def test_files_are_written_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    files.write_aside(tmp_path / "whole.txt", b"all of it")
    assert [path.name for path in tmp_path.iterdir()] == ["whole.txt"]


@pytest.mark.parametrize("windows", [False, True])
def test_a_folder_has_one_digest_on_every_system(tmp_path: Path, monkeypatch: Any, windows: bool) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "x.txt").write_bytes(b"1")
    (tmp_path / "B.txt").write_bytes(b"2")
    (tmp_path / "a.txt").write_bytes(b"3")
    inner = type(tmp_path).relative_to
    if windows:
        monkeypatch.setattr(type(tmp_path), "relative_to", lambda self, *where: PureWindowsPath(inner(self, *where)))
    assert files.digest_of(tmp_path) == hashlib.sha256(b"B.txt2a.txt3part/x.txt1").hexdigest()


def test_a_console_that_does_not_know_a_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    from latedrop.cli import main

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    with pytest.raises(SystemExit):
        main(["--version"])
    print("1 ± 2")
    assert raw.getvalue().endswith(b"1 \\xb1 2\n")


def test_a_camera_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    from latedrop_crowd.console.sources import open_sources

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ArgumentError, match="where numbers are not supported"):
        open_sources(["0"])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert [source.name for source in open_sources(["0"])] == ["Camera 0"]


def test_cpu_is_the_cpu() -> None:
    assert chosen_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "said"), [("gpu", ""), ("cuda:63", ""), ("cuda", "driver is too old")], ids=["name", "number", "driver"]
)
def test_one_that_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{said}.\nCompile with TORCH_USE_CUDA_DSA")

    if said:
        monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ArgumentError, match=f"--device auto.*found '{name}', which.*: {said}.*Use --device auto"):
        chosen_device(name)
