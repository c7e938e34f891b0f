"""The command line: what it prints, its exit codes, and one line for every error."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest
import typer

import latedrop
from latedrop.cli import app as cli
from latedrop.cli import main
from latedrop.errors import LatedropWarning

Run = Callable[..., tuple[int, str, str]]


def test_the_package_can_be_run_as_a_module() -> None:
    words = [sys.executable, "-m", "latedrop", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"latedrop {latedrop.__version__}\n", "")


def test_no_command_shows_the_help(call: Run) -> None:
    code, out, err = call()
    assert code == 2
    assert "Usage: latedrop" in out + err


@pytest.mark.parametrize(
    "words",
    [
        "fly",
        "evaluate a b --data c --batch-size many",
        "sites",
        "sites a --colour red",
        "calibrate a --data b -o c --seed -1",
    ],
)
def test_usage_errors(call: Run, words: str) -> None:
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert "Usage: latedrop" in err


def test_system_error_is_one_line(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("latedrop.named.load_model", full)
    assert call("sites", "any:net") == (1, "", "latedrop: [Errno 28] No space left on device\n")


@pytest.mark.filterwarnings("always")
def test_warnings_are_one_line(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*_: object, **__: object) -> None:
        warnings.warn("only 3 rows.", LatedropWarning, stacklevel=2)
        raise latedrop.LatedropError("expected more.")

    monkeypatch.setattr("latedrop.named.load_model", warned)
    assert call("sites", "any:net") == (1, "", "latedrop: warning: only 3 rows.\nlatedrop: expected more.\n")


def test_missing_extra(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.terminal.find_spec", lambda name: None)
    message = 'expected onnx and onnxruntime; not installed. Run: pip install "latedrop[onnx]"'
    assert call("export", "any:net", "cal.json", "-o", "net.onnx") == (1, "", f"latedrop: {message}\n")


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
    "matplotlib", "pandas", "pyarrow", "sklearn", "torch", "latedrop.report.page"
} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def weather() -> typer.Typer:
    app = typer.Typer(help="Ask about the weather.")
    app.command("today")(lambda: print("rain"))
    app.command("tomorrow")(lambda: print("sun"))
    return app


def broken() -> typer.Typer:
    raise ImportError("no module named cloud")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let these functions of this file be the entry points of packages."""

    def install(**points: Callable[[], typer.Typer]) -> None:
        monkeypatch.setattr(EntryPoint, "load", lambda self: points[self.name])
        actual = [EntryPoint(name, "unused", cli.GROUP) for name in points]
        monkeypatch.setattr(cli, "entry_points", lambda group: actual if group == "latedrop.commands" else [])

    return install


def test_a_package_adds_its_commands(call: Run, installed: Callable[..., None]) -> None:
    installed(weather=weather)
    assert call("weather", "tomorrow") == (0, "sun\n", "")
    code, out, _ = call("--help")
    assert (code, "Ask about the weather." in out, "calibrate" in out) == (0, True, True)


def test_a_package_that_is_not_installed(call: Run, installed: Callable[..., None]) -> None:
    installed()
    for words in (["crowd"], ["crowd", "count", "a.png", "--weights", "mall"]):
        code, out, err = call(*words)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "expected the package latedrop-crowd for `latedrop crowd`; it is not installed. Run: pip install" in err


def test_a_broken_package_takes_no_other_command_away(call: Run, installed: Callable[..., None]) -> None:
    installed(cloud=broken, weather=weather)
    code, _, err = call("cloud", "today")
    assert code == 1
    assert "importing it says: ImportError('no module named cloud')" in err
    assert call("weather", "today")[1] == "rain\n"
    assert call("--version")[0] == 0
